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
	if !strings.Contains(string(out), "tests ") || strings.Contains(string(out), "tests 0") {
		t.Error("no test ran")
	}
}
