//go:build root

package integration

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// stubborn ignores TERM, so that a stop takes its full grace.
const stubborn = `trap "" TERM; echo ready; while :; do sleep 0.05; done`

// TestKillDaemonInStop kills the daemon while a stop waits for a process: the
// next one brings the stop to its end, and the files are there.
func TestKillDaemonInStop(t *testing.T) {
	d := install(t, "")
	for _, paused := range []bool{false, true} {
		sb := d.create(t, sandbox.Spec{})
		id := string(sb.ID)
		d.sh(t, id, "echo kept > /root/file")
		if _, err := d.StartProcess(t.Context(), id, sandbox.ProcessSpec{Argv: []string{"sh", "-c", stubborn}}); err != nil {
			t.Fatal(err)
		}
		if paused {
			if _, err := d.Pause(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		stopped := make(chan struct{})
		go func() { defer close(stopped); _, _ = d.Stop(ctx, id) }()
		testenv.Eventually(t, 20*time.Second, "the stop begun", func() bool {
			sb, err := d.Sandbox(t.Context(), id)
			return err == nil && sb.InitPID == 0
		})
		d.kill()
		cancel()
		<-stopped
		d.start()
		got, err := d.Sandbox(t.Context(), id)
		if err != nil || got.Status != sandbox.StatusStopped {
			t.Fatalf("after the crash: %s %s (%s), %v; want stopped", got.Status, got.Reason, got.Detail, err)
		}
		d.agree(t)
		if _, err := d.Start(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if text := d.sh(t, id, "cat /root/file"); text != "kept" {
			t.Errorf("the file holds %q", text)
		}
		// Numbers of processes go on, so kept records stay what they are.
		p, err := d.StartProcess(t.Context(), id, sandbox.ProcessSpec{Argv: []string{"true"}})
		if err != nil || p.ID == "p1" {
			t.Errorf("the next process is %s, %v", p.ID, err)
		}
	}
}

// TestStopOfAMainProcess: a stop makes the main process end, and that is not
// the end of the sandbox. Left alone, it is.
func TestStopOfAMainProcess(t *testing.T) {
	d := install(t, "")
	for range 5 {
		sb := d.create(t, sandbox.Spec{})
		id := string(sb.ID)
		if _, err := d.StartProcess(t.Context(), id, sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}, Main: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Stop(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if got, err := d.Start(t.Context(), id); err != nil || got.Status != sandbox.StatusRunning {
			t.Fatalf("start after the stop: %s %s, %v", got.Status, got.Reason, err)
		}
		if _, err := d.StartProcess(t.Context(), id, sandbox.ProcessSpec{Argv: []string{"sh", "-c", "exit 3"}, Main: true}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 20*time.Second, "the end of the sandbox", func() bool {
			got, err := d.Sandbox(t.Context(), id)
			return err == nil && got.Status == sandbox.StatusCompleted && got.Reason == sandbox.ReasonExited && got.ExitCode != nil && *got.ExitCode == 3
		})
	}
}

// TestFrozenInit stops a PID 1 from outside, which then answers nothing. The
// daemon serves everybody else, restarts, keeps the sandbox, and stops it.
func TestFrozenInit(t *testing.T) {
	d := install(t, "")
	mute, other := d.create(t, sandbox.Spec{}), d.create(t, sandbox.Spec{})
	if err := unix.Kill(mute.InitPID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	within := func(limit time.Duration, what string, f func(ctx context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		if err := f(ctx); err != nil {
			t.Errorf("%s, with an init that does not answer: %v", what, err)
		}
	}
	within(20*time.Second, "exec beside it", func(ctx context.Context) error {
		_, err := d.try(ctx, string(other.ID), sandbox.ProcessSpec{Argv: []string{"true"}})
		return err
	})
	within(20*time.Second, "list", func(ctx context.Context) error { _, err := d.List(ctx, sandbox.Filter{}); return err })
	asked, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _, _ = d.Processes(asked, string(mute.ID)) }() // under way while the daemon ends
	d.stop()
	d.start()
	for _, sb := range []sandbox.Sandbox{mute, other} {
		if got, err := d.Sandbox(t.Context(), string(sb.ID)); err != nil || got.Status != sandbox.StatusRunning || got.InitPID != sb.InitPID {
			t.Errorf("after a restart: %s %s, %v", got.Status, got.Reason, err)
		}
	}
	within(30*time.Second, "stop", func(ctx context.Context) error { _, err := d.Stop(ctx, string(mute.ID)); return err })
	within(30*time.Second, "start", func(ctx context.Context) error { _, err := d.Start(ctx, string(mute.ID)); return err })
	if got := d.sh(t, string(mute.ID), "echo back"); got != "back" {
		t.Errorf("started again: %q", got)
	}
	d.agree(t)
}

// TestEventsOverRestarts: the end of each process is in the log once, however
// often the daemon starts.
func TestEventsOverRestarts(t *testing.T) {
	d := install(t, "")
	sb := d.create(t, sandbox.Spec{})
	ends := func() (all []string) {
		t.Helper()
		for after := int64(0); ; {
			page, _, err := d.Events(t.Context(), client.EventQuery{After: after, Sandbox: string(sb.ID), Limit: 1000})
			if err != nil {
				t.Fatal(err)
			}
			if len(page) == 0 {
				return all
			}
			for _, e := range page {
				after = e.Seq
				if e.Type == "process.exited" {
					all = append(all, e.Data["process"])
				}
			}
		}
	}
	var want []string
	for round := range 3 {
		for range 5 {
			p, err := d.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"true"}})
			if err != nil {
				t.Fatal(err)
			}
			want = append(want, string(p.Process().ID))
			if _, err := collect(p); err != nil {
				t.Fatal(err)
			}
			p.Close()
		}
		testenv.Eventually(t, 20*time.Second, fmt.Sprintf("%d ends in the log", len(want)), func() bool { return len(ends()) >= len(want) })
		if round == 1 { // another shell counts its events from the start
			if _, err := d.Stop(t.Context(), string(sb.ID)); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Start(t.Context(), string(sb.ID)); err != nil {
				t.Fatal(err)
			}
		}
		d.kill()
		d.start()
	}
	if got := ends(); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("ends in the log: %v, want %v", got, want)
	}
}
