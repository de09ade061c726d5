package e2b

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestSecretIsMadeOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	one, err := Secret(path)
	if err != nil {
		t.Fatal(err)
	}
	two, err := Secret(path)
	if err != nil || string(one) != string(two) {
		t.Errorf("a second look gives another key: %v", err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the key: %v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(path, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Secret(path); err == nil {
		t.Error("a key cut short was taken")
	}
}

func TestTokenNamesItsSandbox(t *testing.T) {
	s := &Server{secret: make([]byte, secretBytes)}
	id := sandbox.NewID()
	if got, ok := s.idOfToken(s.tokenOf(id)); !ok || got != id {
		t.Errorf("idOfToken gives %q, %v; want %q", got, ok, id)
	}
	other := &Server{secret: []byte("another key of the same length!!")}
	for name, token := range map[string]string{
		"of another daemon":  other.tokenOf(id),
		"of another sandbox": string(id) + s.tokenOf(sandbox.NewID())[idLength:],
		"cut":                s.tokenOf(id)[:40],
		"none":               "",
		"the id alone":       string(id),
		"for traffic":        string(id) + s.trafficTokenOf(id),
	} {
		if _, ok := s.idOfToken(token); ok {
			t.Errorf("a token %s was taken", name)
		}
	}
}
