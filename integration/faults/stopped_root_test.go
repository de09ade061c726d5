//go:build root

package faults

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestSignalToStoppedCommand ends a foreground command that stopped itself, by
// a signal to the command line, as timeout(1) does: the command takes it, and the
// command line ends with 128 and its number. The controls: a command that is not
// stopped, and one that ignores the signal, which the second one kills.
func TestSignalToStoppedCommand(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	ref := string(sb.ID)
	for name, c := range map[string]struct {
		script string
		pause  bool
		sigs   []syscall.Signal
		code   int
	}{
		"runs":        {"echo begun; exec sleep 1000", false, []syscall.Signal{syscall.SIGTERM}, 143},
		"stopped":     {"echo begun; kill -STOP $$; exec sleep 1000", false, []syscall.Signal{syscall.SIGTERM}, 143},
		"interrupted": {"echo begun; kill -STOP $$; exec sleep 1000", false, []syscall.Signal{syscall.SIGINT}, 130},
		"hung up":     {"echo begun; kill -STOP $$; exec sleep 1000", false, []syscall.Signal{syscall.SIGHUP}, 129},
		"heeds it":    {"trap 'exit 7' TERM; echo begun; kill -STOP $$; while :; do sleep 0.1; done", false, []syscall.Signal{syscall.SIGTERM}, 7},
		"deaf":        {"trap '' TERM; echo begun; kill -STOP $$; while :; do sleep 0.1; done", false, []syscall.Signal{syscall.SIGTERM, syscall.SIGTERM}, 137},
		"paused":      {"echo begun; exec sleep 1000", true, []syscall.Signal{syscall.SIGTERM, syscall.SIGTERM}, 137},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandbox"), "exec", ref, "--", "sh", "-c", c.script)
			cmd.Env = append(os.Environ(), "SANDBOX_HOST="+d.Host())
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var errs strings.Builder
			cmd.Stderr = &errs
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			buf := make([]byte, 6)
			if _, err := out.Read(buf); err != nil {
				t.Fatal(err)
			}
			go func() { ended <- cmd.Wait() }()
			if strings.Contains(c.script, "STOP") {
				testenv.Eventually(t, time.Minute, "it is stopped", func() bool { return d.Sh(t, ref, "grep -l '^State:.T' /proc/[0-9]*/status || true") != "" })
			}
			if c.pause {
				if _, err := d.Pause(t.Context(), ref); err != nil {
					t.Fatal(err)
				}
				defer d.Resume(t.Context(), ref)
			}
			for i, sig := range c.sigs {
				if i > 0 {
					<-time.After(500 * time.Millisecond) // or both count as the first
				}
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
			}
			select {
			case err := <-ended:
				exit, _ := errors.AsType[*exec.ExitError](err)
				if exit == nil || exit.ExitCode() != c.code {
					t.Errorf("it ended with %v, want %d: %s", err, c.code, &errs)
				}
			case <-time.After(30 * time.Second):
				t.Error("it does not end")
				_ = cmd.Process.Kill()
				<-ended
			}
		})
	}
}
