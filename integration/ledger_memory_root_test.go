//go:build root

package integration

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// held adds up the memory of a cgroup over time, by its own means: KiB times
// microseconds, each look counted until the next.
func held(t testing.TB, f *os.File, until <-chan struct{}) (kibMicros int64) {
	t.Helper()
	b := make([]byte, 64)
	last, at := int64(0), time.Now()
	for {
		n, err := unix.Pread(int(f.Fd()), b, 0)
		if err != nil {
			t.Errorf("memory.current: %v", err)
			return kibMicros
		}
		bytes, err := strconv.ParseInt(strings.TrimSpace(string(b[:n])), 10, 64)
		if err != nil {
			t.Errorf("memory.current: %v", err)
			return kibMicros
		}
		now := time.Now()
		kibMicros += last * now.Sub(at).Microseconds()
		last, at = bytes>>10, now
		select {
		case <-until:
			return kibMicros
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// TestLedgerMemory: memory over time is within a percent of what somebody else
// finds who looks ten times as often.
func TestLedgerMemory(t *testing.T) {
	testenv.Need(t, testenv.CgroupControllers)
	d := install(t, smallVolume+"usage:\n  interval: 100ms\n")
	sb := d.create(t, sandbox.Spec{Limits: sandbox.Limits{MemoryBytes: 256 << 20}})
	f, err := os.Open(filepath.Join(cgroupRoot()+d.Parent, string(sb.ID), "work", "memory.current"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	over, sum := make(chan struct{}), make(chan int64)
	go func() { sum <- held(t, f, over) }()
	// Up and down, each level for so long that the way between them matters little.
	const script = `for my $mib (64, 8, 96, 32) { my $x = "x" x ($mib << 20); select(undef, undef, undef, 5); undef $x; }`
	if r := d.exec(t, string(sb.ID), "perl", "-e", script); r.exit.Code != 0 {
		t.Fatalf("%+v", r)
	}
	r, err := d.UsageReport(t.Context(), string(sb.ID), sandbox.UsageQuery{})
	close(over)
	want := <-sum / 1_000_000
	if err != nil {
		t.Fatal(err)
	}
	got := r.Total.Meters.Memory
	t.Logf("%d KiB·s in the ledger, %d by another sampler", got, want)
	if want < 20*16<<10 || got < want-want/100 || got > want+want/100 {
		t.Errorf("the ledger has %d KiB·s, another sampler found %d", got, want)
	}
}
