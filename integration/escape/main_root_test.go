//go:build root

package escape

import (
	"io"
	"os/exec"
	"syscall"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// background starts a program that ends with the test.
func background(t testing.TB, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Stdout = io.Discard // a pipe: Wait waits for all who have it
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); _ = cmd.Wait() })
}
