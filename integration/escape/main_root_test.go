//go:build root

package escape

import (
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
}
