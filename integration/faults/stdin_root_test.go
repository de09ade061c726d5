//go:build root

package faults

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestStdinOverRestarts: standard input comes exactly once, whichever way the
// daemon ends in the middle of it, over several clients at a time.
func TestStdinOverRestarts(t *testing.T) {
	const size, clients = 8 << 20, 4
	block := make([]byte, size)
	for i := range block {
		block[i] = byte(rand.Uint32())
	}
	sum := sha256.Sum256(block)
	want := hex.EncodeToString(sum[:])
	file := filepath.Join(t.TempDir(), "block")
	if err := os.WriteFile(file, block, 0o600); err != nil {
		t.Fatal(err)
	}
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	// It reads in a slow trickle, so that a restart comes in the middle.
	argv := []string{"sh", "-c", `while :; do n=$(head -c 262144 | tee -a /tmp/in.$$ | wc -c); [ "$n" -gt 0 ] || break; sleep 0.02; done; sha256sum < /tmp/in.$$; rm /tmp/in.$$`}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			rounds := harness.Soak(12, 500) / clients
			for round := range rounds {
				heard := make(chan error, clients)
				for i := range clients {
					go func() { heard <- feedBlock(t, d, sb, argv, block, file, want, i%2 == 1) }()
				}
				testenv.Eventually(t, time.Minute, "every command is being fed", func() bool {
					all, err := d.Processes(t.Context(), string(sb.ID))
					fed := 0
					for _, p := range all {
						if p.Exit == nil && p.StdinBytes > 0 {
							fed++
						}
					}
					return err == nil && fed == clients
				})
				<-time.After(time.Duration(rand.IntN(300)) * time.Millisecond)
				d.End(sig)
				d.Up()
				for range clients {
					select {
					case err := <-heard:
						if err != nil {
							t.Errorf("round %d: %v", round, err)
						}
					case <-time.After(3 * time.Minute):
						t.Fatalf("round %d: a command hangs", round)
					}
				}
			}
		})
	}
}

// feedBlock sends a block through a command, by the Go client or the command
// line.
func feedBlock(t *testing.T, d *harness.Daemon, sb sandbox.Sandbox, argv []string, block []byte, file, want string, cli bool) error {
	var out string
	if cli {
		in, err := os.Open(file)
		if err != nil {
			return err
		}
		defer in.Close()
		cmd := exec.CommandContext(t.Context(), harness.Program(t, "sandbox"), append([]string{"exec", "-i", string(sb.ID), "--"}, argv...)...)
		cmd.Env, cmd.Stdin = append(os.Environ(), "SANDBOX_HOST="+d.Host()), in
		b, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("exec -i: %w: %s", err, b)
		}
		out = string(b)
	} else {
		p, err := d.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: argv, Stdin: true})
		if err != nil {
			return err
		}
		defer p.Close()
		go func() {
			if _, err := p.WriteStdin(block); err == nil {
				_ = p.CloseStdin()
			}
		}()
		r, err := harness.Collect(p)
		if err != nil {
			return err
		}
		out = r.Stdout
	}
	if got, _, _ := strings.Cut(out, " "); got != want {
		return fmt.Errorf("sha256 %s, want %s (cli %t)", got, want, cli)
	}
	return nil
}
