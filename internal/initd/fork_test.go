package initd

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// TestForkState: a command that stops itself is told from a child that others stopped
// before it came to be one: that alone is made to go on.
func TestForkState(t *testing.T) {
	c := exec.CommandContext(t.Context(), "sh", "-c", "kill -STOP $$")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Process.Kill(); _ = c.Wait() }()
	testenv.Eventually(t, 10*time.Second, "it is stopped", func() bool {
		state, executed := forkState(c.Process.Pid)
		return state == "T" && executed
	})
	// The shell's child has come through no execve.
	s := exec.CommandContext(t.Context(), "sh", "-c", "(kill -STOP $(exec sh -c 'echo $PPID'); :) & echo $!; wait")
	out, err := s.StdoutPipe()
	if err == nil {
		err = s.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "the child is stopped", func() bool {
		state, executed := forkState(pid)
		return state == "T" && !executed
	})
	_ = unix.Kill(pid, unix.SIGKILL)
	_ = s.Wait()
}
