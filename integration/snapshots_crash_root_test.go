//go:build root

package integration

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestKillDaemonInSnapshots kills the daemon while clients write, freeze, roll
// back, fork and undo. What was acknowledged holds afterwards; what was under
// way happened or did not.
func TestKillDaemonInSnapshots(t *testing.T) {
	d := install(t, "")
	var clients []*keeper
	for i, spec := range []sandbox.Spec{{}, {}, {AutoSnapshot: true}, {}, {AutoSnapshot: true}} {
		spec.Name = fmt.Sprint("keeper", i)
		d.create(t, spec)
		k := &keeper{d: d, name: spec.Name, auto: spec.AutoSnapshot, live: i%2 == 1, may: map[string]bool{"": true}, snaps: map[string]string{}, maybe: map[string]map[string]bool{}}
		k.seen = map[string]bool{"": true}
		clients = append(clients, k)
	}
	acked := 0
	pace := paceOf(t, clients[0])
	for round := range soak(2, 50) {
		load, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, k := range clients {
			wg.Go(func() { k.run(load) })
		}
		<-time.After(pace + time.Duration(rand.Int64N(int64(20*pace)))) // the kill comes at a random moment
		d.kill()
		stop()
		wg.Wait()
		d.start()
		d.agree(t)
		for _, k := range clients {
			k.verify(t, false)
			acked += len(k.snaps)
			k.thin(t)
		}
		d.removeForks(t)
		d.agree(t)
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
	if acked == 0 {
		t.Error("no client ever got to a snapshot")
	}
	done := map[string]int{}
	for _, k := range clients {
		k.verify(t, true)
		for what, n := range k.done {
			done[what] += n
		}
	}
	t.Logf("acknowledged: %v", done)
	d.RemoveAll(t.Context())
	d.removeSnapshots(t)
	d.noUpperLayers(t)
	d.agree(t)
	d.noProjects(t)
}

// paceOf is how long a snapshot takes here.
func paceOf(t *testing.T, k *keeper) time.Duration {
	t.Helper()
	began := time.Now()
	k.d.sh(t, k.name, "echo x >/root/x")
	k.d.snapshot(t, k.name, "")
	return time.Since(began)
}

// thin removes snapshots, so that a long run stays quick.
func (k *keeper) thin(t *testing.T) {
	t.Helper()
	for name := range k.snaps {
		if len(k.snaps) <= 12 {
			return
		}
		if _, err := k.d.RemoveSnapshot(t.Context(), name); err != nil {
			t.Errorf("remove snapshot %s: %v", name, err)
		}
		delete(k.snaps, name)
	}
}

// keeper is a client that knows what its sandbox should hold. A file says one
// value many times over, so that a part of it is not taken for the whole.
type keeper struct {
	d    *daemon
	name string
	auto bool // the daemon takes snapshots by itself
	live bool // something always runs in the sandbox

	next  int
	may   map[string]bool            // what the file may say now
	seen  map[string]bool            // all it ever said
	snaps map[string]string          // what acknowledged snapshots hold, by name
	maybe map[string]map[string]bool // what those may hold that were not acknowledged
	forks map[string]map[string]bool // and sandboxes made
	done  map[string]int
}

const (
	keeperWrite = `v=$1; yes "$v" | head -c 60000 >/root/f.new && mv /root/f.new /root/f`
	keeperRead  = `[ -e /root/f ] || exit 0; [ "$(wc -c </root/f)" = 60000 ] || echo "torn: $(wc -c </root/f)"; head -c 59000 /root/f | uniq`
)

func (k *keeper) is(v string) { k.may = map[string]bool{v: true}; k.seen[v] = true }

// run does things until one fails: the daemon is gone.
func (k *keeper) run(ctx context.Context) {
	c, err := client.New(k.d.host(), client.WithPatience(0))
	if err != nil {
		return
	}
	if k.done == nil {
		k.done = map[string]int{}
	}
	k.forks = map[string]map[string]bool{}
	if k.live {
		if _, err := c.StartProcess(ctx, k.name, sandbox.ProcessSpec{Argv: []string{"sleep", "1000"}}); err != nil {
			return
		}
	}
	for ctx.Err() == nil {
		what, err := k.step(ctx, c)
		if err != nil {
			return
		}
		k.done[what]++
	}
}

func (k *keeper) step(ctx context.Context, c *client.Client) (what string, err error) {
	k.next++
	name := fmt.Sprintf("%s-%d", k.name, k.next)
	switch roll := rand.IntN(10); {
	case roll < 4:
		v := strconv.Itoa(k.next)
		k.seen[v], k.may[v] = true, true
		if err := k.sh(ctx, c, keeperWrite, v); err != nil {
			return "", err
		}
		k.is(v)
		return "write", nil
	case roll < 7:
		k.maybe[name] = maps.Clone(k.may)
		if _, err := c.Snapshot(ctx, k.name, sandbox.SnapshotRequest{Name: name}); err != nil {
			return "", err
		}
		k.snaps[name] = slices.Collect(maps.Keys(k.maybe[name]))[0]
		delete(k.maybe, name)
		return "snapshot", nil
	case roll < 8 && len(k.snaps) > 0:
		to := slices.Collect(maps.Keys(k.snaps))[rand.IntN(len(k.snaps))]
		k.may[k.snaps[to]] = true
		if _, err := c.Rollback(ctx, k.name, to); err != nil {
			return "", err
		}
		k.is(k.snaps[to])
		return "rollback", nil
	case roll < 9:
		k.forks[name] = maps.Clone(k.may)
		if _, err := c.Fork(ctx, k.name, sandbox.ForkRequest{Name: name}); err != nil {
			return "", err
		}
		return "fork", nil
	}
	was := k.may
	k.may = maps.Clone(k.seen) // where it leads depends on what was taken meanwhile
	if _, err := c.Undo(ctx, k.name, 1); sandbox.CodeOf(err) == "nothing_to_undo" {
		k.may = was
	} else if err != nil {
		return "", err
	}
	r, err := tryWith(ctx, c, k.name, keeperRead)
	if err != nil {
		return "", err
	}
	if !k.may[r] {
		return "", nil // verify finds it again
	}
	k.is(r)
	return "undo", nil
}

// sh runs a script and wants it to succeed.
func (k *keeper) sh(ctx context.Context, c *client.Client, script string, args ...string) error {
	_, err := tryWith(ctx, c, k.name, script, args...)
	return err
}

func tryWith(ctx context.Context, c *client.Client, ref, script string, args ...string) (string, error) {
	p, err := c.Exec(ctx, ref, sandbox.ProcessSpec{Argv: append([]string{"sh", "-c", script, "sh"}, args...)})
	if err != nil {
		return "", err
	}
	defer p.Close()
	r, err := collect(p)
	if err == nil && r.exit.Code != 0 {
		err = fmt.Errorf("%q: %+v: %s", script, r.exit, r.stderr)
	}
	return strings.TrimSuffix(r.stdout, "\n"), err
}

// verify compares the sandbox, its snapshots and its forks with what they may
// hold, and from then on knows which it was.
func (k *keeper) verify(t *testing.T, all bool) {
	t.Helper()
	sb, err := k.d.Sandbox(t.Context(), k.name)
	if err != nil {
		t.Errorf("%s: %v", k.name, err)
		return
	}
	if sb.Status == sandbox.StatusStopped {
		if _, err := k.d.Start(t.Context(), k.name); err != nil {
			t.Errorf("start %s: %v", k.name, err)
			return
		}
	}
	k.settle(t)
	got := k.d.sh(t, k.name, keeperRead)
	if !k.may[got] {
		t.Errorf("%s says %q, want one of %v", k.name, got, slices.Collect(maps.Keys(k.may)))
	}
	k.is(got)
	present := map[string]bool{}
	listed, err := k.d.Snapshots(t.Context(), k.name)
	if err != nil {
		t.Error(err)
	}
	for _, s := range listed {
		present[s.Name] = true
		if s.Name == "" && rand.IntN(16) == 0 || all && s.Kind == sandbox.SnapshotAuto {
			k.look(t, string(s.ID), k.seen)
		}
	}
	for name, may := range k.maybe {
		if present[name] {
			k.snaps[name] = k.look(t, name, may)
		}
	}
	k.maybe = map[string]map[string]bool{}
	for name, want := range k.snaps {
		if !present[name] {
			t.Errorf("snapshot %s was acknowledged and is gone", name)
		} else if all || rand.IntN(4) == 0 {
			k.look(t, name, map[string]bool{want: true})
		}
	}
	for name, may := range k.forks {
		f, err := k.d.Sandbox(t.Context(), name)
		if errors.Is(err, sandbox.ErrNotFound) || err == nil && f.Status != sandbox.StatusRunning {
			continue // it was not acknowledged, or is gone as one half made
		}
		if err != nil {
			t.Error(err)
			continue
		}
		if got := k.d.sh(t, name, keeperRead); !may[got] {
			t.Errorf("fork %s says %q, want one of %v", name, got, slices.Collect(maps.Keys(may)))
		}
	}
}

// settle waits until no command that writes is under way, nor the snapshot
// that follows it.
func (k *keeper) settle(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, "commands end", func() bool {
		all, err := k.d.Processes(t.Context(), k.name)
		if err != nil {
			t.Fatal(err)
		}
		return !slices.ContainsFunc(all, func(p sandbox.Process) bool { return p.Exit == nil && p.Argv[0] != "sleep" })
	})
}

// look reads what a snapshot holds, by a fork of it.
func (k *keeper) look(t *testing.T, snapshot string, may map[string]bool) string {
	t.Helper()
	none := []sandbox.VolumeMount{}
	made, err := k.d.Fork(t.Context(), snapshot, sandbox.ForkRequest{Name: "look-" + k.name, Volumes: &none})
	if err != nil {
		t.Errorf("fork snapshot %s: %v", snapshot, err)
		return ""
	}
	defer func() {
		if _, err := k.d.Remove(t.Context(), string(made[0].Sandbox.ID)); err != nil {
			t.Error(err)
		}
	}()
	got := k.d.sh(t, string(made[0].Sandbox.ID), keeperRead)
	if !may[got] {
		t.Errorf("snapshot %s says %q, want one of %v", snapshot, got, slices.Collect(maps.Keys(may)))
	}
	return got
}

// removeForks ends every sandbox that no keeper keeps.
func (d *daemon) removeForks(t *testing.T) {
	t.Helper()
	for sb, err := range d.All(t.Context(), sandbox.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if sb.Spec.Snapshot == "" {
			continue
		}
		if _, err := d.Remove(t.Context(), string(sb.ID)); err != nil {
			t.Errorf("remove %s: %v", sb.ID, err)
		}
	}
}

func (d *daemon) removeSnapshots(t *testing.T) {
	t.Helper()
	all, err := d.Snapshots(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if _, err := d.RemoveSnapshot(t.Context(), string(s.ID)); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			t.Error(err) // the daemon removes those of sandboxes that are gone
		}
	}
}

// noProjects waits until no quota counts anything any more, beside what the
// pool has ready.
func (d *daemon) noProjects(t testing.TB) {
	t.Helper()
	if testenv.Quota.Missing() != nil {
		return // nothing counts here
	}
	var left []string
	ready := 0 // those have a quota each
	if !testenv.Within(20*time.Second, func() bool {
		left = d.projects(t)
		pool, err := d.Pool(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ready = pool.Ready
		return len(left) <= ready
	}) {
		t.Errorf("the quota still counts, with %d sandboxes ready: %v", ready, left)
	}
}

// projects lists the project quotas that count files.
func (d *daemon) projects(t testing.TB) (out []string) {
	t.Helper()
	volume := filepath.Join(d.Dir, "state/volume")
	b, err := exec.Command("nsenter", "-t", strconv.Itoa(d.PID()), "-m", "xfs_quota", "-x", "-c", "report -p -i -n -N", volume).CombinedOutput()
	if err != nil {
		t.Fatalf("report quotas: %v: %s", err, b)
	}
	for line := range strings.Lines(string(b)) {
		words := strings.Fields(line)
		if len(words) > 1 && words[0] != "#0" && words[1] != "0" {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

// TestForkHistoryEndsAtItsBeginning: what a fork was made of has a history,
// which is none of the fork's, also once the snapshot between them is gone.
func TestForkHistoryEndsAtItsBeginning(t *testing.T) {
	d := install(t, "")
	d.create(t, sandbox.Spec{Name: "dev"})
	d.sh(t, "dev", "echo one >/root/f")
	d.snapshot(t, "dev", "one")
	d.sh(t, "dev", "echo two >/root/f")
	if _, err := d.Fork(t.Context(), "dev", sandbox.ForkRequest{Name: "fork"}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Remove(t.Context(), "dev"); err != nil { // and with it the snapshot the fork was made of
		t.Fatal(err)
	}
	testenv.Eventually(t, 20*time.Second, "the fork's snapshot goes with its sandbox", func() bool { return len(d.snapshots(t, "")) == 1 })
	h, err := d.History(t.Context(), "fork")
	if err != nil || len(h.Points) != 0 || h.Changed {
		t.Errorf("history of a fork nothing was done to: %+v, %v", h, err)
	}
	d.sh(t, "fork", "echo three >/root/f")
	if _, err := d.Undo(t.Context(), "fork", 1); err != nil {
		t.Fatal(err)
	}
	if got := d.sh(t, "fork", "cat /root/f"); got != "two" {
		t.Errorf("undone: %q, want what the fork began with", got)
	}
}
