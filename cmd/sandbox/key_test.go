package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestKeyCommands(t *testing.T) {
	w := newWorld(t)
	key := strings.TrimSpace(w.ok("key", "create", "alice", "--name", "laptop", "--expires", "1h"))
	if len(key) != 68 || !strings.HasPrefix(key, "e2b_") {
		t.Fatalf("created %q", key)
	}
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := w.ok("whoami"); !strings.Contains(out, "admin") {
		t.Errorf("on the socket: %s", out)
	}
	if out := w.ok("whoami", "--key-file", file); !strings.Contains(out, "owner  alice") || !strings.Contains(out, "3 sandboxes") {
		t.Errorf("with the key: %s", out)
	}
	list := w.ok("key", "ls", "--owner", "alice")
	id := "key_" + strings.Fields(list[strings.Index(list, "key_")+4:])[0]
	if strings.Contains(list, key) || !strings.Contains(list, "laptop") {
		t.Errorf("listed %s", list)
	}
	if code, _, errs := w.run("", "key", "ls", "--key-file", file); code != exitTrouble || !strings.Contains(errs, "admin") {
		t.Errorf("keys for a developer: %d %s", code, errs)
	}
	if out := w.ok("owner", "set", "alice", "--max-sandboxes", "20", "--max-memory", "64g", "--max-lifetime", "0s"); !strings.Contains(out, "20 sandboxes") || !strings.Contains(out, "64GiB") || strings.Contains(out, "lifetime") || !strings.Contains(out, "6 cpus") {
		t.Errorf("owner set: %s", out)
	}
	w.ok("key", "revoke", id)
	if code, _, errs := w.run("", "whoami", "--key-file", file); code != exitTrouble || !strings.Contains(errs, "revoked") {
		t.Errorf("with a revoked key: %d %s", code, errs)
	}
	if out := w.ok("key", "ls"); strings.Contains(out, id) {
		t.Errorf("listed %s", out)
	}
	if out := w.ok("key", "ls", "-a"); !strings.Contains(out, "revoked") {
		t.Errorf("listed %s", out)
	}
	if code, _, errs := w.run("", "owner", "set", "uid:1000", "--disable"); code != 125 || !strings.Contains(errs, "(owner_not_found)") {
		t.Errorf("disabled nobody: exit %d, %s", code, errs)
	}
	w.ok("owner", "set", "uid:1000", "--role", "viewer")
	w.ok("owner", "set", "uid:1000", "--disable")
	if out := w.ok("owner", "ls"); !strings.Contains(out, "uid:1000") || !strings.Contains(out, "disabled") {
		t.Errorf("owners: %s", out)
	}
	w.ok("owner", "rm", "alice")
	if out := w.ok("audit", "ls"); !strings.Contains(out, "remove-owner") || !strings.Contains(out, "create-key") {
		t.Errorf("audit: %s", out)
	}
	out := w.ok("audit", "verify")
	_, head, _ := strings.Cut(strings.TrimSpace(out), "head: ")
	w.ok("audit", "verify", strings.Fields(head)[0], strings.Fields(head)[1])
	if code, out, _ := w.run("", "audit", "verify", strings.Fields(head)[0], strings.Repeat("0", 64)); code != 1 || !strings.Contains(out, "BROKEN") {
		t.Errorf("another head: %d %s", code, out)
	}
	for _, args := range [][]string{
		{"key", "create", "Alice"},
		{"key", "create", "alice", "--role", "king"},
		{"key", "create", "alice", "--expires", "-1h"},
		{"key", "revoke", "key_nonenonenonenone"},
		{"owner", "set", "alice", "--max-disk", "lots"},
		{"owner", "set", "alice", "--disable", "--enable"},
		{"owner", "rm", "nobody"},
		{"audit", "verify", "7"},
		{"whoami", "--key-file", "/nonexistent"},
		{"whoami", "--ca", "/nonexistent"},
		{"whoami", "--ca", file},
		{"whoami", "--host", "http://192.0.2.1:80", "--key-file", file},
	} {
		if code, _, errs := w.run("", args...); code != exitTrouble || errs == "" {
			t.Errorf("%v: %d %q", args, code, errs)
		}
	}
}
