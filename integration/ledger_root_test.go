//go:build root

package integration

import (
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

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// cpuOf reads usage_usec of an open cpu.stat.
func cpuOf(f *os.File) (int64, error) {
	b := make([]byte, 4096)
	n, err := unix.Pread(int(f.Fd()), b, 0)
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(b[:n]), "\n")
	return strconv.ParseInt(strings.TrimPrefix(first, "usage_usec "), 10, 64)
}

// meterReader reads the counters of cgroups until they are gone, and keeps what
// they said last.
type meterReader struct {
	mu   sync.Mutex
	last map[sandbox.ID]int64 // of cgroups before, and of the one there is
	late map[sandbox.ID]bool  // it was kept from looking just before one went
	all  sync.WaitGroup
}

// lateAfter is how long after a look a cgroup may go for that look to have seen
// its last count: between the daemon's own and the removal there is more.
const lateAfter = 300 * time.Microsecond

// follow reads the present cgroup of a sandbox, by a file that is open now.
func (m *meterReader) follow(t *testing.T, d *daemon, id sandbox.ID) {
	t.Helper()
	f, err := os.Open(filepath.Join(cgroupRoot()+d.Parent, string(id), "cpu.stat"))
	if err != nil {
		t.Fatal(err)
	}
	m.all.Go(func() {
		defer f.Close()
		var last int64
		looked := time.Now()
		for ; ; <-time.After(100 * time.Microsecond) { // as often as can be: what counts is the last answer
			began := time.Now()
			n, err := cpuOf(f)
			if errors.Is(err, unix.ENODEV) {
				break
			}
			if err != nil {
				t.Errorf("cpu.stat of %s: %v", id, err)
				break
			}
			last, looked = n, began
		}
		late := time.Since(looked) > lateAfter
		m.mu.Lock()
		defer m.mu.Unlock()
		m.last[id] += last
		m.late[id] = m.late[id] || late
	})
}

// TestLedgerRecount: processor time of the ledger is, to the microsecond, what
// the cgroups had counted when they went, over lives with stops, starts and a
// daemon that is killed anywhere.
func TestLedgerRecount(t *testing.T) {
	lives := 40
	if os.Getenv("SANDBOXD_SOAK") != "" {
		lives = 2000
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	// Without a pool there is nothing in the cgroup above but sandboxes.
	d := install(t, "usage:\n  interval: 100ms\npool:\n  size: 0\n")
	above, err := os.Open(filepath.Join(cgroupRoot()+d.Parent, "cpu.stat"))
	if err != nil {
		t.Fatal(err)
	}
	defer above.Close()
	began, err := cpuOf(above)
	if err != nil {
		t.Fatal(err)
	}
	m := &meterReader{last: map[sandbox.ID]int64{}, late: map[sandbox.ID]bool{}}
	var ids []sandbox.ID
	cgroups := 0
	for range lives {
		sb := d.create(t, sandbox.Spec{})
		ids = append(ids, sb.ID)
		m.follow(t, d, sb.ID)
		cgroups++
		d.sh(t, string(sb.ID), fmt.Sprintf("i=0; while [ $i -lt %d ]; do i=$((i+1)); done", rng.IntN(20000)))
		switch rng.IntN(5) {
		case 0:
			d.kill()
			d.start()
		case 1:
			if _, err := d.Stop(t.Context(), string(sb.ID)); err != nil {
				t.Fatal(err)
			}
			if _, err := d.Start(t.Context(), string(sb.ID)); err != nil {
				t.Fatal(err)
			}
			m.follow(t, d, sb.ID)
			cgroups++
			d.sh(t, string(sb.ID), "echo again")
		}
		d.removeSomehow(t, rng, sb.ID)
	}
	m.all.Wait() // for the last cgroup to go
	r, err := d.UsageReport(t.Context(), "", sandbox.UsageQuery{By: "sandbox"})
	if err != nil {
		t.Fatal(err)
	}
	cpu := map[sandbox.ID]int64{}
	for _, l := range r.Lines {
		cpu[sandbox.ID(l.Key)] = l.Meters.CPU
	}
	differ, late := 0, 0
	for _, id := range ids {
		if m.late[id] && cpu[id] > m.last[id] { // the cgroup above tells of it
			late++
			continue
		}
		if cpu[id] != m.last[id] || cpu[id] == 0 {
			differ++
			t.Errorf("%s: the ledger has %d µs, its cgroups had %d", id, cpu[id], m.last[id])
		}
	}
	// The cgroup above keeps what its children counted, each rounded by itself.
	ended, err := cpuOf(above)
	if err != nil {
		t.Fatal(err)
	}
	if d := ended - began - r.Total.Meters.CPU; d < 0 || d > int64(cgroups)+1 {
		t.Errorf("the ledger is %d µs short of what the cgroup above counted, of %d cgroups", d, cgroups)
	}
	t.Logf("%d lives, %d cgroups, %d µs: %d differ, of %d the last look came late", lives, cgroups, r.Total.Meters.CPU, differ, late)
	if late > lives/2 {
		t.Errorf("%d of %d last looks came late: this host is too busy to count again", late, lives)
	}
	for range 2 { // recovery once more changes no sum
		d.kill()
		d.start()
		again, err := d.UsageReport(t.Context(), "", sandbox.UsageQuery{})
		if err != nil || again.Total.Meters != r.Total.Meters {
			t.Errorf("after another start: %+v, %v; before: %+v", again.Total.Meters, err, r.Total.Meters)
		}
	}
}

// removeSomehow removes a sandbox, now and then with a daemon that is killed
// meanwhile.
func (d *daemon) removeSomehow(t *testing.T, rng *rand.Rand, id sandbox.ID) {
	t.Helper()
	if rng.IntN(4) > 0 {
		if _, err := d.Remove(t.Context(), string(id)); err != nil {
			t.Fatal(err)
		}
		return
	}
	answered := make(chan struct{})
	go func() { defer close(answered); _, _ = d.Remove(t.Context(), string(id)) }()
	<-time.After(time.Duration(rng.IntN(15000)) * time.Microsecond) // anywhere in it
	d.kill()
	<-answered
	d.start()
	if _, err := d.Remove(t.Context(), string(id)); err != nil {
		t.Fatal(err)
	}
}
