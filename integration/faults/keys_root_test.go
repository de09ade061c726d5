//go:build root

package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// counts is a command that leaves a line in a file of the sandbox's disk each
// time it runs.
func counts(name, more string) []string {
	return []string{"sh", "-c", "echo ran >>/root/" + name + "; echo out of " + name + "; " + more}
}

// ran is how often a command of counts ran.
func ran(t *testing.T, d *harness.Daemon, ref, name string) int {
	t.Helper()
	return strings.Count(d.Sh(t, ref, "cat /root/"+name+" 2>/dev/null || :"), "ran")
}

// insist repeats a command with a key until somebody answers.
func insist(ctx context.Context, d *harness.Daemon, ref string, spec sandbox.ProcessSpec) (r harness.Result, err error) {
	for ctx.Err() == nil {
		if r, err = d.Try(ctx, ref, spec); !errors.Is(err, sandbox.ErrUnavailable) {
			return r, err
		}
		time.Sleep(5 * time.Millisecond) //nolint:forbidigo // what is waited for is the next try
	}
	return r, errors.Join(ctx.Err(), err)
}

// TestKeyOfExec: a key runs a command once in a sandbox, over restarts and kills
// of the daemon, stop and start of the sandbox, other commands, and repetitions
// at the same time. The control is the command without a key.
func TestKeyOfExec(t *testing.T) {
	d := harness.Install(t, "")
	sb := d.New(t, sandbox.Spec{})
	ref := string(sb.ID)
	spec := func(name, more string) sandbox.ProcessSpec {
		return sandbox.ProcessSpec{Argv: counts(name, more), IdempotencyKey: "key of " + name}
	}
	once := func(t *testing.T, name string) {
		t.Helper()
		if n := ran(t, d, ref, name); n != 1 {
			t.Errorf("%s ran %d times", name, n)
		}
	}
	over := func(t *testing.T, s sandbox.ProcessSpec, says string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // one that runs again may not end
		defer cancel()
		_, err := d.Try(ctx, ref, s)
		if sandbox.CodeOf(err) != "already_run" || !strings.Contains(err.Error(), says) {
			t.Errorf("repeated: %v; want already_run, %q", err, says)
		}
		if _, err := d.StartProcess(t.Context(), ref, s); sandbox.CodeOf(err) != "already_run" {
			t.Errorf("repeated in the background: %v", err)
		}
	}

	t.Run("control", func(t *testing.T) {
		s := spec("control", "")
		s.IdempotencyKey = ""
		for range 2 {
			if _, err := d.Try(t.Context(), ref, s); err != nil {
				t.Fatal(err)
			}
		}
		if n := ran(t, d, ref, "control"); n != 2 {
			t.Errorf("without a key: %d times", n)
		}
	})
	t.Run("at the same time", func(t *testing.T) {
		for _, stdin := range []bool{false, true} {
			s := spec(fmt.Sprint("same", stdin), "sleep 0.3; exit 7")
			s.Stdin = stdin
			var wg sync.WaitGroup
			for range 12 {
				wg.Go(func() {
					r, err := d.Try(t.Context(), ref, s)
					if err != nil || r.Exit.Code != 7 || !strings.HasPrefix(r.Stdout, "out of same") {
						t.Errorf("%+v, %v", r, err)
					}
				})
			}
			wg.Wait()
			once(t, fmt.Sprint("same", stdin))
		}
	})
	t.Run("another command", func(t *testing.T) {
		must(t)(d.Try(t.Context(), ref, spec("first", "")))
		s := spec("second", "")
		s.IdempotencyKey = "key of first"
		if _, err := d.Try(t.Context(), ref, s); sandbox.CodeOf(err) != "idempotency_mismatch" {
			t.Errorf("another command: %v", err)
		}
		if n := ran(t, d, ref, "second"); n != 0 {
			t.Errorf("the other command ran %d times", n)
		}
	})
	t.Run("what cannot start may be repeated", func(t *testing.T) {
		s := sandbox.ProcessSpec{Argv: []string{"/root/later"}, IdempotencyKey: "later"}
		if _, err := d.Try(t.Context(), ref, s); sandbox.CodeOf(err) != "command_not_found" {
			t.Errorf("%v", err)
		}
		d.Sh(t, ref, "printf '#!/bin/sh\necho ran >>/root/late\n' >/root/later; chmod +x /root/later")
		must(t)(d.Try(t.Context(), ref, s))
		once(t, "late")
	})
	t.Run("kills", func(t *testing.T) {
		for i := range harness.Soak(8, 100) {
			name := fmt.Sprint("kill", i)
			type answer struct {
				r   harness.Result
				err error
			}
			all := make(chan answer, 3)
			for range cap(all) {
				go func() {
					r, err := insist(t.Context(), d, ref, spec(name, "sleep 0.05; exit 3"))
					all <- answer{r, err}
				}()
			}
			<-time.After(rand.N(20 * time.Millisecond)) // any moment
			if i%4 == 0 {
				d.Shut()
			} else {
				d.Crash()
			}
			d.Up()
			for range cap(all) {
				if a := <-all; a.err != nil || a.r.Exit.Code != 3 || a.r.Stdout != "out of "+name+"\n" {
					t.Errorf("%s: %+v, %v", name, a.r, a.err)
				}
			}
			once(t, name)
		}
	})
	t.Run("other commands", func(t *testing.T) {
		s := spec("old", "exit 9")
		must(t)(d.Try(t.Context(), ref, s))
		for range harness.Soak(150, 1000) {
			must(t)(d.Try(t.Context(), ref, sandbox.ProcessSpec{Argv: []string{"true"}}))
		}
		over(t, s, "exit code 9")
		once(t, "old")
	})
	t.Run("stop and start", func(t *testing.T) {
		long := spec("long", "exec sleep 1000")
		if _, err := d.StartProcess(t.Context(), ref, long); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, time.Minute, "it runs", func() bool { return ran(t, d, ref, "long") == 1 })
		for i := range harness.Soak(3, 30) {
			name := fmt.Sprint("stopped", i)
			s := spec(name, "exit 4")
			must(t)(d.Try(t.Context(), ref, s))
			stopped := make(chan error, 1)
			go func() {
				_, err := d.Stop(t.Context(), ref)
				stopped <- err
			}()
			if i > 0 { // in the middle
				<-time.After(rand.N(60 * time.Millisecond))
				d.Crash()
				d.Up()
			}
			<-stopped
			testenv.Eventually(t, time.Minute, "it is stopped, or runs on", func() bool {
				now, err := d.Sandbox(t.Context(), ref)
				if err == nil && now.Status == sandbox.StatusRunning { // nobody heard of the stop
					_, err = d.Stop(t.Context(), ref)
				}
				return err == nil && now.Status == sandbox.StatusStopped
			})
			must(t)(d.Start(t.Context(), ref))
			over(t, s, "exit code 4")
			once(t, name)
		}
		over(t, long, "p")
		once(t, "long")
		over(t, spec("old", "exit 9"), "exit code 9") // of a shell before others
		once(t, "old")
		must(t)(d.Reset(t.Context(), ref))
		if _, err := d.Try(t.Context(), ref, long); sandbox.CodeOf(err) != "already_run" {
			t.Errorf("repeated after a reset: %v", err)
		}
	})
}

// aCommand is a command line that has one effect.
type aCommand struct {
	name   string
	args   func(round string) []string
	stdin  string
	out    func(round string) string // what it prints; empty: an id
	code   int
	effect func(t *testing.T, round string) int
}

// TestCommandLineRetries: a command line whose daemon is killed under it, and
// comes back, has its one effect, its output and its exit code. The control is
// that rounds were cut off in the middle at all.
func TestCommandLineRetries(t *testing.T) {
	d := harness.Install(t, "")
	base := d.New(t, sandbox.Spec{Name: "base"})
	named := func(name string) func(*testing.T, string) int {
		return func(t *testing.T, round string) int {
			n := 0
			for _, err := range d.All(t.Context(), sandbox.Filter{Labels: map[string]string{name: round}}) {
				if n++; err != nil {
					t.Error(err)
				}
			}
			return n
		}
	}
	inBase := func(name string) func(*testing.T, string) int {
		return func(t *testing.T, round string) int { return ran(t, d, "base", name+round) }
	}
	out := func(name string) func(string) string {
		return func(round string) string { return "out of " + name + round + "\n" }
	}
	id := func(string) string { return "" }
	commands := []aCommand{
		{"create", func(r string) []string { return []string{"create", "-l", "create=" + r} }, "", id, 0, named("create")},
		{"exec", func(r string) []string {
			return append([]string{"exec", "base", "--"}, counts("exec"+r, "sleep 0.05; exit 3")...)
		}, "", out("exec"), 3, inBase("exec")},
		{"exec -i", func(r string) []string {
			return append([]string{"exec", "-i", "base", "--"}, counts("input"+r, "cat")...)
		}, "in and out", func(r string) string { return out("input")(r) + "in and out" }, 0, inBase("input")},
		{"exec -d", func(r string) []string {
			return append([]string{"exec", "-d", "base", "--"}, counts("bg"+r, "")...)
		}, "", id, 0, inBase("bg")},
		{"run", func(r string) []string {
			return append([]string{"run", "-l", "run=" + r, "--"}, counts("run"+r, "sleep 0.05; exit 4")...)
		}, "", out("run"), 4, func(t *testing.T, r string) int {
			n := named("run")(t, r)
			for sb := range d.All(t.Context(), sandbox.Filter{Labels: map[string]string{"run": r}}) {
				n *= ran(t, d, string(sb.ID), "run"+r)
			}
			return n
		}},
		{"run --rm", func(r string) []string {
			return append([]string{"run", "--rm", "-l", "rm=" + r, "--"}, counts("rm"+r, "sleep 0.05; exit 5")...)
		}, "", out("rm"), 5, func(t *testing.T, r string) int {
			testenv.Eventually(t, time.Minute, "the sandbox ends with its command", func() bool { return named("rm")(t, r) == 0 })
			n := 0
			for sb, err := range d.All(t.Context(), sandbox.Filter{Labels: map[string]string{"rm": r}, All: true}) {
				if err == nil && sb.StartedAt != nil && sb.Reason != sandbox.ReasonCreateFailed {
					n++
				}
			}
			return n
		}},
		{"fork", func(r string) []string { return []string{"fork", "base", "-l", "fork=" + r} }, "", id, 0, named("fork")},
		{"snapshot", func(r string) []string { return []string{"snapshot", "create", "base", "-m", "round " + r} }, "", id, 0, func(t *testing.T, r string) int {
			all, err := d.Snapshots(t.Context(), string(base.ID))
			if err != nil {
				t.Error(err)
			}
			n := 0
			for _, s := range all {
				if s.Comment == "round "+r {
					n++
				}
			}
			return n
		}},
	}
	cut := 0
	for _, c := range commands {
		t.Run(c.name, func(t *testing.T) {
			for i := range harness.Soak(3, 60) {
				round := fmt.Sprint(i)
				type result struct {
					out, errs string
					code      int
				}
				done := make(chan result, 1)
				go func() {
					out, errs, code := d.CLI(t, nil, c.stdin, c.args(round)...)
					done <- result{out, errs, code}
				}()
				<-time.After(rand.N(100 * time.Millisecond)) // any moment
				d.Crash()
				d.Up()
				got := <-done
				if strings.Contains(got.errs, "--idempotency-key") {
					cut++
				}
				want := c.out(round)
				if got.code != c.code || want != "" && got.out != want || want == "" && len(strings.Fields(got.out)) != 1 {
					t.Errorf("round %d: exit %d, %q, %q", i, got.code, got.out, got.errs)
				}
				if n := c.effect(t, round); n != 1 {
					t.Errorf("round %d: %d effects; exit %d, %q, %q", i, n, got.code, got.out, got.errs)
				}
				for sb := range d.All(t.Context(), sandbox.Filter{}) { // room for the next
					if sb.ID != base.ID {
						must(t)(d.Remove(t.Context(), string(sb.ID)))
					}
				}
			}
		})
	}
	if cut == 0 {
		t.Error("no round was cut off before its answer: nothing was tried")
	}
}
