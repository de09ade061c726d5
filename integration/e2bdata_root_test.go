//go:build root

package integration

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// baseImage builds the template base by its recipe, of this machine's programs.
func baseImage(t testing.TB, d *daemon) {
	t.Helper()
	recipe, err := os.ReadFile("../images/base/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	sudo, err := os.ReadFile("../images/base/sudo")
	if err != nil {
		t.Fatal(err)
	}
	files := archiveOf(t, file{name: "sudo", data: string(sudo), mode: 0o755})
	d.mustBuild(t, sandbox.BuildRequest{Names: []string{"base"}, Dockerfile: string(recipe)}, files)
}

// freePort returns a port of the loopback nobody listens on.
func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		t.Fatal(l.Addr())
	}
	return addr.Port
}

// bootsAnew wants a boot id that is not the host's, and another one after each start.
func (d *daemon) bootsAnew(t testing.TB) {
	t.Helper()
	const path = "/proc/sys/kernel/random/boot_id"
	host, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	box := string(d.create(t, sandbox.Spec{Image: "base"}).ID)
	first := d.sh(t, box, "cat "+path)
	if again := d.sh(t, box, "cat "+path); again != first {
		t.Errorf("the boot id changed from %s to %s", first, again)
	}
	if out := d.sh(t, box, "echo x > "+path+" || echo refused"); !strings.Contains(out, "refused") {
		t.Error("the boot id can be written")
	}
	if _, err := d.Stop(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Start(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	second := d.sh(t, box, "cat "+path)
	if first == second || first == strings.TrimSpace(string(host)) || len(first) != 36 || len(second) != 36 {
		t.Errorf("boot ids %s and %s, the host's %s", first, second, host)
	}
}

// TestE2BData runs commands, terminals and file work of the published SDK.
func TestE2BData(t *testing.T) {
	port := freePort(t)
	d := install(t, fmt.Sprintf("e2b:\n  listen: 127.0.0.1:%d\n", port))
	baseImage(t, d)
	key, err := os.ReadFile(filepath.Join(d.dir, "state", "e2b.api.key"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	args := []string{"--test", "--test-reporter=spec"}
	if only := os.Getenv("SANDBOXD_TEST_NODE"); only != "" {
		args = append(args, "--test-name-pattern="+only)
	}
	cmd := exec.CommandContext(ctx, "node", append(args, "commands.mjs", "files.mjs", "pty.mjs")...)
	cmd.Dir = "e2b"
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	cmd.Env = append(os.Environ(), "E2B_API_KEY=e2b_"+hex.EncodeToString(key), "E2B_API_URL="+url, "E2B_SANDBOX_URL="+url)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Errorf("node: %v", err)
	}
	d.bootsAnew(t)
	if !strings.Contains(string(out), "tests ") || strings.Contains(string(out), "tests 0") {
		t.Error("no test ran")
	}
}
