//go:build root

package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// packages are the two built for the test, the older one first.
func packages(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(filepath.Dir(program(t, "sandboxd")), "../deb/sandboxd_*.deb"))
	if err != nil || len(found) != 2 {
		t.Fatalf("packages %v, %v: want two beside the programs, as integration/vm/lane.sh makes them", found, err)
	}
	slices.Sort(found)
	return found
}

// must runs a command and returns what it says.
func must(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	t.Logf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	if err != nil {
		journal, _ := exec.Command("journalctl", "-u", "sandboxd", "-n", "50", "--no-pager").CombinedOutput()
		t.Fatalf("%s %s: %v\nthe daemon said:\n%s", name, strings.Join(args, " "), err, journal)
	}
	return strings.TrimSpace(string(out))
}

// dpkg runs dpkg without waiting for the disk after each file.
func dpkg(t *testing.T, args ...string) string {
	t.Helper()
	began := time.Now()
	out := must(t, "dpkg", append([]string{"--force-unsafe-io", "--force-confold"}, args...)...)
	t.Logf("dpkg took %v", time.Since(began))
	return out
}

// TestPackage installs, upgrades, removes and purges the Debian package. What
// runs in a sandbox goes on through a restart and an upgrade, and through
// nothing else.
func TestPackage(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.Systemd, testenv.CgroupControllers)
	debs := packages(t)
	t.Cleanup(func() { // where the test ended early
		_ = exec.Command("dpkg", "--purge", "sandboxd").Run()
		_ = os.RemoveAll("/etc/sandboxd")
	})
	// An administrator's file of before: it is kept.
	const config = "/etc/sandboxd/config.yaml"
	if err := os.MkdirAll(filepath.Dir(config), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte("volume: {size: 400m}\npool: {size: 1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	dpkg(t, "--install", debs[0])
	must(t, "systemctl", "is-active", "sandboxd")
	must(t, "systemctl", "is-enabled", "sandboxd")
	must(t, "getent", "group", "sandbox")
	if got := must(t, "sandbox", "run", "--rm", "--", "echo", "it works"); got != "it works" {
		t.Errorf("sandbox run: %q", got)
	}
	must(t, "sandbox", "create", "--name", "keep")
	must(t, "sandbox", "exec", "-d", "keep", "--", "sleep", "98765")
	sleeper := func() string {
		out, _ := exec.Command("pgrep", "-fx", "sleep 98765").Output() // exits with 1 where there is none
		return strings.TrimSpace(string(out))
	}
	pid := sleeper()
	if pid == "" {
		t.Fatal("nothing runs in the sandbox")
	}
	daemon := func() string { return must(t, "systemctl", "show", "-P", "MainPID", "sandboxd") }
	first := daemon()

	must(t, "systemctl", "restart", "sandboxd")
	second := daemon()
	if got := sleeper(); got != pid || second == first {
		t.Errorf("after a restart of daemon %s, now %s, the process is %q, want %s", first, second, got, pid)
	}
	dpkg(t, "--install", debs[1])
	must(t, "systemctl", "is-active", "sandboxd")
	if got := sleeper(); got != pid || daemon() == second {
		t.Errorf("after an upgrade the process is %q, want %s, and the daemon %s, before %s", got, pid, daemon(), second)
	}
	if got := must(t, "sandbox", "exec", "keep", "--", "echo", "still here"); got != "still here" {
		t.Errorf("exec after an upgrade: %q", got)
	}
	if b, err := os.ReadFile(config); err != nil || !strings.HasPrefix(string(b), "volume: {size: 400m}") {
		t.Errorf("the configuration after an upgrade: %q, %v", b, err)
	}
	score := regexp.MustCompile(`Overall exposure level for sandboxd.service: ([0-9.]+)`).FindStringSubmatch(must(t, "systemd-analyze", "security", "--no-pager", "sandboxd"))
	if score == nil {
		t.Error("systemd-analyze does not know the unit")
	}

	dpkg(t, "--remove", "sandboxd")
	if got := sleeper(); got != "" {
		t.Errorf("process %s outlived the package", got)
	}
	if out, _ := exec.Command("nft", "list", "tables").Output(); strings.Contains(string(out), "sandboxd") {
		t.Errorf("the firewall still has: %s", out)
	}
	if out, err := exec.Command("systemctl", "is-active", "sandboxd").Output(); err == nil {
		t.Errorf("the daemon is %s after the removal", out)
	}
	for _, path := range []string{"/var/lib/sandboxd/sandboxd.db", "/var/lib/sandboxd/volume.img", config} {
		if !exists(path) {
			t.Errorf("a removal took %s away", path)
		}
	}
	dpkg(t, "--purge", "sandboxd")
	for _, path := range []string{"/var/lib/sandboxd", "/etc/sandboxd", "/run/sandboxd", "/usr/bin/sandboxd"} {
		if exists(path) {
			t.Errorf("a purge left %s", path)
		}
	}
	if out := must(t, "losetup", "--list", "--noheadings", "--output", "BACK-FILE"); strings.Contains(out, "/var/lib/sandboxd") {
		t.Errorf("loop devices: %s", out)
	}
}
