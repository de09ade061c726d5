//go:build root

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// ready waits until the pool is full and returns what it says of itself.
func (d *daemon) ready(t testing.TB) (p sandbox.PoolStats) {
	t.Helper()
	testenv.Eventually(t, time.Minute, "the pool is full", func() bool {
		var err error
		if p, err = d.Pool(t.Context()); err != nil {
			t.Fatal(err)
		}
		return p.Ready >= p.Target
	})
	return p
}

// TestPoolServesAndIsSwept: sandboxes get ready shells, the sandboxes outlive
// the daemon, and the shells nobody had asked for do not.
func TestPoolServesAndIsSwept(t *testing.T) {
	d := install(t, "pool: {size: 4}\n")
	before := d.ready(t)
	var wg sync.WaitGroup
	ids := make([]sandbox.ID, 4)
	for i := range ids {
		wg.Go(func() {
			sb, err := d.Create(t.Context(), sandbox.Spec{Name: fmt.Sprint("p", i), Labels: map[string]string{"n": fmt.Sprint(i)}}, "")
			if err != nil {
				t.Error(err)
			}
			ids[i] = sb.ID
		})
	}
	wg.Wait()
	if p, err := d.Pool(t.Context()); err != nil || p.Hits-before.Hits < 4 {
		t.Errorf("four sandboxes from a pool of four: %+v, %v", p, err)
	}
	for i, id := range ids {
		// What a shell is told when it is claimed, not when it was made.
		want := fmt.Sprintf("p%d\np%d", i, i)
		if got := d.sh(t, string(id), "hostname; cat /etc/hostname; grep -q \"$(hostname)\" /etc/hosts || echo not in hosts"); got != want {
			t.Errorf("names of %s: %q, want %q", id, got, want)
		}
	}
	d.ready(t)
	d.kill()
	d.start()
	d.agree(t)
	for _, id := range ids {
		if got := d.sh(t, string(id), "echo alive"); got != "alive" {
			t.Errorf("%s after the daemon was killed: %q", id, got)
		}
	}
}

// TestPooledLimits: a shell is made with the default limits and gets those of
// the sandbox, lower, higher or none.
func TestPooledLimits(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	d := install(t, smallVolume+"pool: {size: 4}\ndefault_limits: {cpus: 0.5, memory: 128m, pids: 100, disk: 64m, inodes: 1000, open_files: 1024}\n")
	for name, c := range map[string]struct {
		limits sandbox.Limits
		want   string // memory.max pids.max cpu.max, then the file limit inside
	}{
		"default": {sandbox.Limits{}, "134217728 100 50000 1024"},
		"lower":   {sandbox.Limits{CPUs: 0.25, MemoryBytes: 64 << 20, PIDs: 50, OpenFiles: 512}, "67108864 50 25000 512"},
		"higher":  {sandbox.Limits{CPUs: 1.5, MemoryBytes: 256 << 20, PIDs: 200, OpenFiles: 2048}, "268435456 200 150000 2048"},
	} {
		t.Run(name, func(t *testing.T) {
			before := d.ready(t)
			sb := d.create(t, sandbox.Spec{Limits: c.limits})
			if p, err := d.Pool(t.Context()); err != nil || p.Hits != before.Hits+1 {
				t.Errorf("it did not come from the pool: %+v, %v", p, err)
			}
			work := filepath.Join(cgroupRoot()+d.Parent, string(sb.ID), "work")
			var got []string
			for _, f := range []string{"memory.max", "pids.max", "cpu.max"} {
				b, err := os.ReadFile(filepath.Join(work, f))
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, strings.Fields(string(b))[0])
			}
			got = append(got, d.sh(t, string(sb.ID), "ulimit -n"))
			if have := strings.Join(got, " "); have != c.want {
				t.Errorf("limits %q, want %q", have, c.want)
			}
		})
	}
}

// TestReset gives a sandbox its first files again and leaves nothing else of
// before, while it stays who it was.
func TestReset(t *testing.T) {
	d := install(t, "")
	sb := d.create(t, sandbox.Spec{Name: "dev"})
	d.sh(t, "dev", "echo mine >/root/file; rm /etc/hostname; echo x >/dev/shm/x")
	if _, err := d.StartProcess(t.Context(), "dev", sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}}); err != nil {
		t.Fatal(err)
	}
	const look = "cat /root/file /etc/hostname /dev/shm/x 2>/dev/null; pgrep -x sleep >/dev/null && echo sleeps; true"
	var got string
	if !testenv.Within(10*time.Second, func() bool { got = d.sh(t, "dev", look); return got == "mine\nx\nsleeps" }) {
		t.Fatalf("before: %q", got)
	}
	after, err := d.Reset(t.Context(), "dev")
	if err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "dev", look); got != "dev" {
		t.Errorf("after: %q, want only the host name's file", got)
	}
	if after.ID != sb.ID || after.InitPID != sb.InitPID || after.Address != sb.Address || after.Status != sandbox.StatusRunning {
		t.Errorf("it was %+v, and is %+v", sb, after)
	}
	d.kill() // and the reset stays
	d.start()
	if got := d.sh(t, "dev", look); got != "dev" {
		t.Errorf("after a restart of the daemon: %q", got)
	}
	d.agree(t)
}

// TestResetUnderLoad resets while commands start and end all the time: each
// reset is whole, and the sandbox outlives all of them.
func TestResetUnderLoad(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "dev"})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default: // one that a reset kills, or that finds none running, is as it must be
					_, _ = d.try(t.Context(), "dev", sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo y >>/root/y; sleep 0.01"}, Main: true})
				}
			}
		})
	}
	whole := 0
	for i := range soak(20, 200) {
		_, err := d.Reset(t.Context(), "dev")
		if err == nil {
			whole++
		}
		if sandbox.CodeOf(err) == "sandbox_ended" { // by a main command that ended by itself, between two resets
			d.create(t, sandbox.Spec{Name: "dev"})
			continue
		}
		if err != nil && sandbox.CodeOf(err) != "wrong_state" {
			t.Fatalf("reset %d: %v", i, err)
		}
	}
	close(stop)
	wg.Wait()
	if whole == 0 {
		t.Error("not one reset went through")
	}
	testenv.Eventually(t, time.Minute, "what its main commands ended is gone", func() bool {
		sb, err := d.Sandbox(t.Context(), "dev")
		return err == nil && sb.Status != sandbox.StatusCompleting
	})
	d.agree(t)
}
