package runtime

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// ledger is an audit with a clock of the test's own.
type ledger struct {
	*audit
	at     time.Time
	events []sandbox.Event
}

func newLedger() *ledger {
	l := &ledger{at: time.Unix(1e9, 0)}
	l.audit = newAudit(func(_ context.Context, e []sandbox.Event) error {
		l.events = append(l.events, e...)
		return nil
	})
	l.now = func() time.Time { return l.at }
	return l
}

// after lets time pass and returns what was written then.
func (l *ledger) after(t *testing.T, d time.Duration) []sandbox.Event {
	t.Helper()
	l.at, l.events = l.at.Add(d), nil
	if err := l.flush(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	return l.events
}

func denied(id sandbox.ID, dest string, port uint16) sandbox.NetworkNews {
	return sandbox.NetworkNews{Sandbox: id, Type: sandbox.EventNetDenied, Protocol: "tcp", Dest: dest, Port: port}
}

func TestAuditMerges(t *testing.T) {
	l := newLedger()
	id := sandbox.NewID()
	for range 5 {
		l.hear(denied(id, "10.0.0.1", 80))
	}
	l.hear(denied(id, "10.0.0.1", 81))
	got := l.after(t, auditEvery)
	if len(got) != 2 {
		t.Fatalf("%d events, want one for each port: %v", len(got), got)
	}
	slices.SortFunc(got, func(a, b sandbox.Event) int { return len(b.Data["count"]) - len(a.Data["count"]) })
	if e := got[0]; e.Data["count"] != "5" || e.Data["dest"] != "10.0.0.1" || e.Data["port"] != "80" || e.Type != sandbox.EventNetDenied || e.Sandbox != id {
		t.Errorf("%+v", e)
	}
	if got[1].Data["count"] != "" {
		t.Errorf("one packet is told with a count: %+v", got[1])
	}
	// Repetitions wait for the window's end, and are one event.
	for range 3 {
		l.hear(denied(id, "10.0.0.1", 80))
		if got := l.after(t, time.Second); len(got) != 0 {
			t.Fatalf("within the window: %v", got)
		}
	}
	if got := l.after(t, auditWindow); len(got) != 1 || got[0].Data["count"] != "3" {
		t.Fatalf("after the window: %v, want 3 together", got)
	}
	if got := l.after(t, auditWindow); len(got) != 0 || l.open != 0 {
		t.Fatalf("quiet: %v, %d entries open", got, l.open)
	}
	l.hear(denied(id, "10.0.0.1", 80)) // news again
	if got := l.after(t, 0); len(got) != 1 || got[0].Data["count"] != "" {
		t.Fatalf("once more: %v", got)
	}
	l.after(t, time.Hour)
	l.after(t, 0)
	if len(l.boxes) != 0 {
		t.Errorf("%d sandboxes remembered for nothing", len(l.boxes))
	}
}

// TestAuditIsBounded: whatever one sandbox does, every packet is in an event
// or in the number untold, and its neighbour's news are told.
func TestAuditIsBounded(t *testing.T) {
	l := newLedger()
	loud, quiet := sandbox.NewID(), sandbox.NewID()
	var sent, told, untold uint64
	tally := func(events []sandbox.Event) {
		for _, e := range events {
			if e.Sandbox == quiet {
				continue
			}
			n := uint64(1)
			if c := e.Data["count"]; c != "" {
				n, _ = strconv.ParseUint(c, 10, 64)
			}
			if e.Type == sandbox.EventNetUntold {
				n, _ = strconv.ParseUint(e.Data[sandbox.EventNetDenied], 10, 64)
				untold += n
				continue
			}
			told += n
		}
	}
	events := 0
	for i := range 2000 {
		for j := range 50 {
			l.hear(denied(loud, fmt.Sprintf("10.%d.%d.1", i%250, j), uint16(i)))
			sent++
		}
		if len(l.boxes[loud].entries) > auditPerBox {
			t.Fatalf("%d entries", len(l.boxes[loud].entries))
		}
		got := l.after(t, 100*time.Millisecond)
		events += len(got)
		tally(got)
	}
	if limit := auditBurst + 200*(auditRate+1) + 100; events > limit {
		t.Errorf("%d events in 200 s, want at most %d", events, limit)
	}
	l.hear(denied(quiet, "10.0.0.9", 80))
	if got := l.after(t, 0); !slices.ContainsFunc(got, func(e sandbox.Event) bool { return e.Sandbox == quiet }) {
		t.Error("the quiet neighbour's news are lost")
	} else {
		tally(got)
	}
	l.events = nil
	if err := l.flush(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	tally(l.events)
	if told+untold != sent || told == 0 || untold == 0 {
		t.Errorf("%d told and %d untold of %d", told, untold, sent)
	}
}

// TestAuditInAll bounds what many sandboxes together keep in memory.
func TestAuditInAll(t *testing.T) {
	l := newLedger()
	for range 2 * auditAll / auditPerBox {
		id := sandbox.NewID()
		for p := range auditPerBox {
			l.hear(denied(id, "10.0.0.1", uint16(p+1)))
		}
	}
	n := 0
	for _, b := range l.boxes {
		n += len(b.entries)
	}
	if n != auditAll || l.open != n {
		t.Errorf("%d entries, %d counted, want %d", n, l.open, auditAll)
	}
}

// TestAuditNames: a flow is told with the name its address was answered for.
func TestAuditNames(t *testing.T) {
	l := newLedger()
	id, other := sandbox.NewID(), sandbox.NewID()
	l.hear(sandbox.NetworkNews{Sandbox: id, Type: sandbox.EventNetName, Protocol: "dns", Dest: "example.com", Addrs: []netip.Addr{netip.MustParseAddr("93.184.216.34")}})
	for _, to := range []sandbox.ID{id, other} {
		l.hear(sandbox.NetworkNews{Sandbox: to, Type: sandbox.EventNetAllowed, Protocol: "tcp", Dest: "93.184.216.34", Port: 443})
	}
	names := map[sandbox.ID]string{}
	for _, e := range l.after(t, 0) {
		if e.Type == sandbox.EventNetAllowed {
			names[e.Sandbox] = e.Data["name"]
		}
	}
	if names[id] != "example.com" || names[other] != "" {
		t.Errorf("told with the names %v", names)
	}
	for i := range 10 * auditNames {
		l.hear(sandbox.NetworkNews{Sandbox: id, Type: sandbox.EventNetName, Dest: "x.example", Addrs: []netip.Addr{netip.AddrFrom4([4]byte{9, 9, byte(i >> 8), byte(i)})}})
	}
	if n := len(l.boxes[id].names); n > auditNames {
		t.Errorf("%d names kept", n)
	}
}
