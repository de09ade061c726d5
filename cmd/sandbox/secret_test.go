package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestSecretCommands(t *testing.T) {
	w := newWorld(t)
	code, out, errs := w.run("Bearer tell-nobody\n", "secret", "set", "key", "--to", "api.example.com")
	if code != 0 || out != "key\n" || strings.Contains(errs, "tell-nobody") || w.m.Values["key"] != "Bearer tell-nobody" {
		t.Errorf("set: %d %q %q, %q", code, out, errs, w.m.Values["key"])
	}
	file := filepath.Join(t.TempDir(), "value")
	if err := os.WriteFile(file, []byte("of a file\r\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.ok("secret", "set", "other", "--from-file", file)
	if w.m.Values["other"] != "of a file" {
		t.Errorf("from a file: %q", w.m.Values["other"])
	}
	for _, args := range [][]string{{"secret", "ls"}, {"secret", "ls", "-o", "json"}, {"secret", "ls", "-q"}} {
		if out := w.ok(args...); !strings.Contains(out, "key") || !strings.Contains(out, "other") || strings.Contains(out, "tell-nobody") {
			t.Errorf("%v: %s", args, out)
		}
	}
	for name, stdin := range map[string]string{"empty": "", "two lines": "hidden\nhidden", "long": strings.Repeat("hidden", sandbox.MaxSecretBytes)} {
		if code, _, errs := w.run(stdin, "secret", "set", "bad"); code != exitTrouble || strings.Contains(errs, "hidden") {
			t.Errorf("%s: %d %s", name, code, errs)
		}
	}
	if code, _, errs := w.run("x", "secret", "set", "key", "value-on-the-line"); code != exitTrouble || !strings.Contains(errs, "accepts 1 arg") {
		t.Errorf("a value on the command line: %d %s", code, errs)
	}
	w.ok("secret", "rm", "key", "other")
	if code, _, errs := w.run("", "secret", "rm", "key"); code != exitTrouble || !strings.Contains(errs, "secret_not_found") {
		t.Errorf("rm twice: %d %s", code, errs)
	}
}
