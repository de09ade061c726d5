//go:build root

package integration

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestKillDaemonUnderLoad kills the daemon in the middle of concurrent
// creates, execs and removes, starts it again, and compares kernel and
// database both ways; a witness process counts on through all of it.
func TestKillDaemonUnderLoad(t *testing.T) {
	d := install(t, "")
	witness := d.create(t, sandbox.Spec{Name: "witness"})
	counter, err := d.StartProcess(t.Context(), "witness", sandbox.ProcessSpec{
		Argv: []string{"sh", "-c", "i=0; while :; do echo $i; i=$((i+1)); sleep 0.005; done"}, OutputBytes: 8 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	read := &reader{}
	rounds := soak(3, 50)
	for round := range rounds {
		load, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for worker := range 20 {
			wg.Go(func() { churn(load, d, worker) })
		}
		<-time.After(time.Duration(100+rand.IntN(400)) * time.Millisecond) // the kill comes at a random moment
		d.kill()
		stop()
		wg.Wait()
		d.start()
		d.agree(t)
		read.catchUp(t, d, counter.ID)
		if sb, err := d.Sandbox(t.Context(), "witness"); err != nil || sb.InitPID != witness.InitPID {
			t.Fatalf("round %d: the witness has PID 1 %d, %v; had %d", round, sb.InitPID, err, witness.InitPID)
		}
		if p, err := d.Process(t.Context(), "witness", counter.ID); err != nil || p.PID != counter.PID || p.Exit != nil {
			t.Fatalf("round %d: the witness's process: %+v, %v", round, p, err)
		}
		d.removeOthers(t, "witness")
		d.agree(t)
	}
	if read.next < 10*rounds {
		t.Errorf("the witness counted to %d only", read.next)
	}
}

// reader follows the witness's numbers over restarts: each once, none missed.
type reader struct {
	offset int64
	next   int
	rest   string
}

func (r *reader) catchUp(t *testing.T, d *daemon, id sandbox.ProcessID) {
	t.Helper()
	p, err := d.Process(t.Context(), "witness", id)
	if err != nil {
		t.Fatal(err)
	}
	io, err := d.Attach(t.Context(), "witness", id, r.offset)
	if err != nil {
		t.Fatal(err)
	}
	defer io.Close()
	for r.offset < p.Output.End {
		o, err := io.Next()
		if err != nil {
			t.Fatal(err)
		}
		if o.Dropped != 0 || o.Offset != r.offset {
			t.Fatalf("output at offset %d with %d dropped, want offset %d with none", o.Offset, o.Dropped, r.offset)
		}
		r.offset += int64(len(o.Data))
		r.rest += string(o.Data)
	}
	for {
		line, rest, ok := strings.Cut(r.rest, "\n")
		if !ok {
			return
		}
		if line != strconv.Itoa(r.next) {
			t.Fatalf("the witness's line %q, want %d", line, r.next)
		}
		r.rest, r.next = rest, r.next+1
	}
}

// churn creates, uses and removes sandboxes until its time is over. Errors
// are expected: the daemon is being killed.
func churn(ctx context.Context, d *daemon, worker int) {
	impatient, err := client.New(d.host(), client.WithPatience(0))
	if err != nil {
		return
	}
	for ctx.Err() == nil {
		sb, err := impatient.Create(ctx, sandbox.Spec{Labels: map[string]string{"worker": strconv.Itoa(worker)}}, "")
		if err != nil {
			continue
		}
		if worker%3 == 0 {
			_, _ = impatient.Stop(ctx, string(sb.ID))
			_, _ = impatient.Start(ctx, string(sb.ID))
		}
		if p, err := impatient.Exec(ctx, string(sb.ID), sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo hi; sleep 0.02"}}); err == nil {
			_, _ = collect(p)
			p.Close()
		}
		if worker%4 != 0 { // some are left to be found running
			_, _ = impatient.Remove(ctx, string(sb.ID))
		}
	}
}

// removeOthers ends every living sandbox but the named one.
func (d *daemon) removeOthers(t testing.TB, name string) {
	t.Helper()
	for sb, err := range d.All(t.Context(), sandbox.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if sb.Spec.Name == name {
			continue
		}
		if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil && !errors.Is(err, sandbox.ErrConflict) {
			t.Errorf("remove %s: %v", sb.ID, err)
		}
	}
}

// TestNothingLeaksOverCycles runs many whole lives and counts what the
// daemon and the kernel hold before and after.
func TestNothingLeaksOverCycles(t *testing.T) {
	d := install(t, "pool:\n  size: 2\n")
	cycle := func(n int) {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range n / 4 {
					sb, err := d.Create(t.Context(), sandbox.Spec{}, "")
					if err != nil {
						t.Error(err)
						return
					}
					if r, err := d.try(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"echo", "x"}}); err != nil || r.stdout != "x\n" {
						t.Errorf("exec: %q, %v", r.stdout, err)
					}
					if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
	}
	cycle(24) // caches and statements reach their working size
	d.calm(t)
	before := d.count(t)
	cycle(soak(32, 1000))
	d.calm(t)
	var after counts
	testenv.Eventually(t, 60*time.Second, "what ended goes", func() bool {
		after = d.count(t)
		return after.within(before, 5)
	})
	t.Logf("before %+v, after %+v", before, after)
}

// calm waits until the pool is as it is in quiet times.
func (d *daemon) calm(t testing.TB) {
	t.Helper()
	var p sandbox.PoolStats
	testenv.Eventually(t, 2*time.Minute, "the pool comes to rest", func() bool {
		var err error
		if p, err = d.Pool(t.Context()); err != nil {
			t.Fatal(err)
		}
		return p.Ready == p.Size && p.Target == p.Size
	})
	t.Logf("pool: %+v", p)
}

// counts is what must not grow.
type counts struct{ goroutines, fds, threads, mounts, cgroups, namespaces, links, hostMounts int }

func (c counts) within(o counts, slack int) bool {
	for _, p := range [][2]int{
		{c.goroutines, o.goroutines},
		{c.fds, o.fds},
		{c.threads, o.threads},
		{c.mounts, o.mounts},
		{c.cgroups, o.cgroups},
		{c.namespaces, o.namespaces},
		{c.links, o.links},
		{c.hostMounts, o.hostMounts},
	} {
		if p[0] > p[1]+slack {
			return false
		}
	}
	return true
}

func (d *daemon) count(t testing.TB) counts {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d", d.PID())
	entries := func(dir string) int {
		e, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(e)
	}
	lines := func(file string) int {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "\n")
	}
	spaces := map[string]bool{}
	links, err := filepath.Glob("/proc/[0-9]*/ns/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil {
			spaces[target] = true
		}
	}
	checks, err := d.Doctor(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	goroutines := 0
	for _, c := range checks {
		if c.Name == "daemon" {
			if _, err := fmt.Sscanf(c.Detail, "%d goroutines", &goroutines); err != nil {
				t.Fatalf("doctor on the daemon: %q: %v", c.Detail, err)
			}
		}
	}
	if goroutines == 0 {
		t.Fatalf("doctor does not tell of the daemon: %+v", checks)
	}
	return counts{
		goroutines: goroutines, fds: entries(proc + "/fd"), threads: entries(proc + "/task"), mounts: lines(proc + "/mountinfo"),
		cgroups: len(names(t, cgroupRoot()+d.Parent)), namespaces: len(spaces), links: entries("/sys/class/net"),
		hostMounts: lines("/proc/self/mountinfo"),
	}
}
