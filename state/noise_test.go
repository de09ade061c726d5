package state

import (
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestPruneSparesOthers: who makes events without end loses its own, not those
// that tell of others, nor what tells of itself besides.
func TestPruneSparesOthers(t *testing.T) {
	d := open(t)
	quiet, noisy := sandbox.NewID(), sandbox.NewID()
	const keep, own = 160, 15 // events of neither's network flood, 5 of them the noisy one's
	write := func(id sandbox.ID, kind string, n int) {
		t.Helper()
		all := make([]sandbox.Event, n)
		for i := range all {
			all[i] = sandbox.Event{Sandbox: id, Type: kind, Actor: "daemon"}
		}
		if err := d.AppendEvents(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	count := func(id sandbox.ID, kind string) (n int) {
		t.Helper()
		all, err := d.Events(t.Context(), 0, id, 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if e.Type == kind {
				n++
			}
		}
		return n
	}
	prune := func() {
		t.Helper()
		if err := d.Prune(t.Context(), 0, keep); err != nil {
			t.Fatal(err)
		}
	}
	write(quiet, sandbox.EventNetDenied, 6)
	write(quiet, "sandbox.created", 4)
	write(noisy, "sandbox.created", 5)
	write(noisy, sandbox.EventNetDenied, 300)
	prune()
	if n := count(quiet, sandbox.EventNetDenied) + count(quiet, "sandbox.created"); n != own-5 {
		t.Errorf("%d events of another sandbox are left, want all %d", n, own-5)
	}
	if n := count(noisy, "sandbox.created"); n != 5 {
		t.Errorf("%d of the noisy one's other events are left, want 5", n)
	}
	if n := count(noisy, sandbox.EventNetDenied); n != keep-own {
		t.Errorf("%d of the noisy one's events are left, want the %d that there is room for", n, keep-own)
	}
	// Control: where nobody has too many, the oldest go.
	for range 2 * noisyShare {
		write(sandbox.NewID(), sandbox.EventNetDenied, keep/noisyShare)
	}
	prune()
	if n := count(quiet, "sandbox.created"); n != 0 {
		t.Errorf("%d of the oldest events are left", n)
	}
	all, err := d.Events(t.Context(), 0, "", 1000)
	if err != nil || len(all) != keep {
		t.Errorf("%d events are left, %v; want %d", len(all), err, keep)
	}
}
