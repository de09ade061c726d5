package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestTLSWhereConfigured: 'tls init' writes where the configuration and the flags
// say, 'tls show' reads there, and what init prints fits. The control is --dir.
func TestTLSWhereConfigured(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	file := in("config.yaml")
	text := "tls_cert: " + in("a/cert.pem") + "\ntls_key: " + in("b/key.pem") + "\nlisten: 127.0.0.1:7999\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args, made []string
		says       string
	}{
		"configuration": {[]string{"--config", file}, []string{"a/cert.pem", "b/key.pem", "a/ca.pem", "a/ca-key.pem"}, "https://box.example:7999 "},
		"flags":         {[]string{"--config", file, "--tls-cert", in("c/cert.pem"), "--tls-key", in("c/key.pem")}, []string{"c/cert.pem", "c/key.pem", "c/ca.pem"}, "listen: 127.0.0.1:7999"},
		"directory":     {[]string{"--dir", in("d")}, []string{"d/server.pem", "d/server-key.pem", "d/ca.pem", "d/ca-key.pem"}, "https://box.example:7463 "},
	} {
		run := func(args ...string) string {
			t.Helper()
			var out bytes.Buffer
			cmd := command()
			cmd.SetOut(&out)
			cmd.SetArgs(append(args, c.args...))
			if err := cmd.Execute(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			return out.String()
		}
		said := run("tls", "init", "--host", "box.example")
		for i, made := range c.made {
			if _, err := os.Stat(in(made)); err != nil || i < 3 && !strings.Contains(said, in(made)) {
				t.Errorf("%s: %v; it says\n%s", name, err, said)
			}
		}
		if !strings.Contains(said, c.says) {
			t.Errorf("%s: want %q in\n%s", name, c.says, said)
		}
		if shown := run("tls", "show"); !strings.Contains(shown, in(c.made[0])) || !strings.Contains(shown, in(c.made[2])) {
			t.Errorf("%s: shown is\n%s", name, shown)
		}
	}
}
