//go:build root

package faults

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestReadyShellsAreNotDecided: after a crash the pool's shells are nothing to
// decide about; in a quarantine they hide no loss. The control is what a sandbox
// in no row wrote.
func TestReadyShellsAreNotDecided(t *testing.T) {
	h := newHouse(t)
	ready := func() {
		t.Helper()
		h.Sh(t, "runs", "true")
		need(t, within(60e9, func() bool { return len(names(t, h.path("volume/sandboxes"))) >= 4 })) // two of them
	}
	ready()
	h.Crash()
	out, err := h.offline(t, "recover")
	if err != nil || strings.Contains(out, "in no row") || !strings.Contains(out, "agree") || !strings.Contains(out, "of the pool") {
		t.Errorf("recover after a crash: %v\n%s", err, out)
	}
	older := h.save(t, keptFiles[:3]...)
	h.Up()
	lost := h.New(t, sandbox.Spec{Name: "lost"})
	h.Sh(t, "lost", "echo lost >/root/lost")
	ready()
	h.Crash()
	h.load(t, older, databaseFiles...)
	log := start(t, h, "QUARANTINE")
	if n := strings.Count(log, "does not know; it stays"); n != 1 || !strings.Contains(log, "it stays\" sandbox="+string(lost.ID)) {
		t.Errorf("the log tells of %d, not of the lost one alone:\n%s", n, harness.Quiet(log))
	}
	h.Crash()
	out, err = h.offline(t, "recover")
	if err != nil || strings.Count(out, "in no row") != 1 || !strings.Contains(out, "sandbox "+string(lost.ID)+", in no row") || !strings.Contains(out, "1 sandboxes and 0 layers") {
		t.Errorf("recover in the quarantine: %v\n%s", err, out)
	}
	if out, err = h.offline(t, "recover", "--adopt", string(lost.ID)); err != nil || !strings.Contains(out, "agree again") {
		t.Errorf("recover --adopt: %v\n%s", err, out)
	}
	start(t, h, "")
}

// TestAnothersNetwork: where the sandboxes of another installation live in the
// network namespace, or beneath the parent cgroup, an installation neither starts
// nor retires, and touches nothing of theirs; it says whose they are and what to do.
func TestAnothersNetwork(t *testing.T) {
	h := &house{Daemon: harness.Install(t, "")}
	h.New(t, sandbox.Spec{Name: "theirs", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	pid := h.Sh(t, "theirs", "readlink /proc/self/ns/pid")
	o := &house{Daemon: harness.InstallApart(t, "")}
	o.Shut()
	h.Crash()
	rules := func() string {
		t.Helper()
		out, err := exec.Command("nft", "-s", "list", "table", "inet", "sandboxd").CombinedOutput()
		if err != nil {
			t.Fatalf("list the rules: %v\n%s", err, out)
		}
		return string(out)
	}
	refused := func(want string, args ...string) {
		t.Helper()
		before := rules()
		argv := append(append([]string{"-k", "9", "20", harness.Program(t, "sandboxd")}, o.Extra...), args...)
		b, err := exec.Command("timeout", argv...).CombinedOutput() // it would go on
		if out := string(b); err == nil || !strings.Contains(out, "network_taken") && !strings.Contains(out, "sandboxes of another installation (") || !strings.Contains(out, want) || strings.Contains(out, "is stopped") {
			t.Errorf("sandboxd %q: %v\n%s", args, err, harness.Quiet(out))
		}
		if now := rules(); now != before {
			t.Errorf("sandboxd %q changed the rules of the other:\n%s\nwere:\n%s", args, now, before)
		}
	}
	refused("network namespace of its own")
	refused("network namespace of its own", "retire")
	refused("network namespace of its own", "--cgroup-parent", h.Parent)
	start(t, h, "") // the control
	h.Crash()

	at := len(o.Extra)
	o.Extra = append(o.Extra, "--cgroup-parent", h.Parent)
	if log := start(t, o, "QUARANTINE"); !strings.Contains(why(log), "another --cgroup-parent") {
		t.Errorf("beneath the other's cgroup: %s", why(log))
	}
	o.Crash()
	for _, args := range [][]string{nil, {"--adopt", "all"}, {"--remove", "all", "--yes"}} {
		out, err := o.offline(t, append([]string{"recover"}, args...)...)
		if err != nil || !strings.Contains(out, "another --cgroup-parent") || !strings.Contains(out, "left alone") {
			t.Errorf("recover %q beneath the other's cgroup: %v\n%s", args, err, out)
		}
	}
	o.Extra = o.Extra[:at]
	start(t, h, "")
	if now := h.Sh(t, "theirs", "readlink /proc/self/ns/pid"); now != pid {
		t.Errorf("the other's sandbox is another: %s, was %s", now, pid)
	}
}

// TestRestoreTellsOfKeys: whom a backup lets in again is told, with the command
// against it; who was valid all along is not. Where the database that it replaces
// cannot be read, that is told.
func TestRestoreTellsOfKeys(t *testing.T) {
	h := &house{Daemon: harness.Install(t, "backup: {every: 1h}\n")}
	made := map[string]access.Key{}
	for _, name := range []string{"revoked", "stays", "early", "off", "gone"} {
		k, err := h.CreateKey(t.Context(), api.KeyRequest{Owner: "of-" + name, Name: "laptop-" + name})
		need(t, err)
		made[name] = k
	}
	_, err := h.RevokeKey(t.Context(), made["early"].ID)
	need(t, err)
	h.Shut()
	backup := h.path("backups/sandboxd-20200101T000000Z.db")
	need(t, os.MkdirAll(h.path("backups"), 0o700))
	b, err := os.ReadFile(h.path("sandboxd.db"))
	need(t, err)
	need(t, os.WriteFile(backup, b, 0o600))
	h.Up()
	_, err = h.RevokeKey(t.Context(), made["revoked"].ID)
	need(t, err)
	yes := true
	_, err = h.SetOwner(t.Context(), "of-off", api.OwnerChange{Disabled: &yes})
	need(t, err)
	need(t, h.RemoveOwner(t.Context(), "of-gone"))
	h.Crash() // its log alone knows
	out, err := h.offline(t, "restore", backup)
	need(t, err)
	for _, want := range []string{
		"'sandbox key revoke " + made["revoked"].ID + "'", "laptop-revoked", "'sandbox owner set of-off --disable'",
		"'sandbox key revoke " + made["gone"].ID + "'", "'sandbox owner set of-gone --disable'",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("restore does not tell of %s:\n%s", want, out)
		}
	}
	for _, not := range []string{"stays", "early", "key revoke " + made["off"].ID} {
		if strings.Contains(out, not) {
			t.Errorf("restore tells of %s:\n%s", not, out)
		}
	}
	need(t, os.WriteFile(h.path("sandboxd.db"), []byte("scribbled over"), 0o600))
	out, err = h.offline(t, "restore", backup)
	if err != nil || !strings.Contains(out, "'sandbox key ls'") {
		t.Errorf("restore in the place of what cannot be read: %v\n%s", err, out)
	}
	if out, err := h.offline(t, "recover", "--remove", "all", "--yes"); err != nil {
		t.Errorf("recover: %v\n%s", err, out)
	}
	start(t, h, "")
	keys, err := h.Keys(t.Context(), "")
	need(t, err)
	for _, k := range keys { // what was told is so
		if k.ID == made["revoked"].ID && k.RevokedAt != nil {
			t.Errorf("key %s is revoked", k.ID)
		}
	}
}
