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

func TestTokenNamesItsSandboxAndKey(t *testing.T) {
	s := &Server{secret: make([]byte, secretBytes)}
	id := sandbox.NewID()
	good := s.tokenOf(id, "key_a")
	if got, key, ok := s.readToken(good); !ok || got != id || key != "key_a" {
		t.Errorf("readToken gives %q, %q, %v; want %q", got, key, ok, id)
	}
	other := &Server{secret: []byte("another key of the same length!!")}
	for name, token := range map[string]string{
		"of another daemon":  other.tokenOf(id, "key_a"),
		"of another sandbox": string(id) + s.tokenOf(sandbox.NewID(), "key_a")[idLength:],
		"of another key":     string(id) + "key_b" + good[idLength+len("key_a"):],
		"cut":                good[:40],
		"none":               "",
		"the id alone":       string(id),
		"for traffic":        string(id) + "key_a." + s.trafficTokenOf(id),
	} {
		if _, _, ok := s.readToken(token); ok {
			t.Errorf("a token %s was taken", name)
		}
	}
}

// TestTokensAreChanged: what was given out before a change opens nothing, also
// after a restart; tokens of others go on.
func TestTokensAreChanged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "rotated")
	id, other := sandbox.NewID(), sandbox.NewID()
	open := func() *Server {
		r, err := OpenRotations(path, []sandbox.ID{id, other})
		if err != nil {
			t.Fatal(err)
		}
		return &Server{secret: make([]byte, secretBytes), rotated: r}
	}
	s := open()
	before, kept, traffic := s.tokenOf(id, "key_a"), s.tokenOf(other, "key_a"), s.trafficTokenOf(id)
	if err := s.rotated.change(id); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Server{s, open()} {
		if _, _, ok := s.readToken(before); ok || s.trafficTokenOf(id) == traffic {
			t.Error("a token that was changed still opens")
		}
		if _, _, ok := s.readToken(kept); !ok {
			t.Error("the change reached another sandbox")
		}
		if _, _, ok := s.readToken(s.tokenOf(id, "key_a")); !ok {
			t.Error("the new token does not open")
		}
	}
}
