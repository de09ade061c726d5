package state

import (
	stdcmp "cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestCreateReadsBackWhole(t *testing.T) {
	d := open(t)
	p := params("one")
	p.Sandbox.Spec.Limits.MemoryBytes = 1 << 30
	got, existed, err := d.CreateSandbox(t.Context(), p)
	if err != nil || existed {
		t.Fatal(existed, err)
	}
	exp := p.Sandbox
	exp.Status, exp.UIDBase = sandbox.StatusPending, testUIDBase
	if diff := cmp.Diff(exp, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Fatalf("created (-want +got):\n%s", diff)
	}
	read, err := d.Sandbox(t.Context(), got.ID)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got, read, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Fatalf("read (-created +read):\n%s", diff)
	}
	events, err := d.Events(t.Context(), 0, got.ID, 0)
	if err != nil || len(events) != 1 || events[0].Type != "sandbox.pending" || events[0].Actor != "uid:0" {
		t.Fatalf("events %+v, error %v", events, err)
	}
}

// TestCreateBeginsAnywhere: one write leaves what a create and its moves do.
func TestCreateBeginsAnywhere(t *testing.T) {
	d := open(t)
	at, pid, start, boot, uid := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), 42, uint64(1)<<63+7, "boot-1", uint32(4_000_000_000)
	addr, detail := netip.MustParseAddr("10.1.2.3"), "quick"
	ch := Change{
		Detail: &detail, StartedAt: &at, Deadline: &at, UIDBase: &uid, Address: &addr, InitPID: &pid, InitStart: &start, BootID: &boot,
		Enforcement: []sandbox.Enforcement{{Limit: "cpu", Asked: "2 cpus", Enforced: true}}, Data: map[string]string{"k": "v"},
	}
	opt := cmpopts.EquateComparable(netip.Addr{})
	for _, c := range []struct {
		status sandbox.Status
		ch     Change
		types  []string
	}{
		{"", Change{}, []string{"sandbox.pending"}},
		{sandbox.StatusPending, ch, []string{"sandbox.pending"}},
		{sandbox.StatusCreating, Change{}, []string{"sandbox.pending", "sandbox.creating"}},
		{sandbox.StatusRunning, ch, []string{"sandbox.pending", "sandbox.creating", "sandbox.running"}},
	} {
		p := params("")
		p.Sandbox.CreatedAt = at
		p.Sandbox.Spec.Env = map[string]string{} // reads back as none
		p.Status, p.Change = c.status, c.ch
		begun := time.Now()
		got, _, err := d.CreateSandbox(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		exp := p.Sandbox
		exp.Spec.Env = nil
		exp.Status, exp.Slot, exp.UIDBase = stdcmp.Or(c.status, sandbox.StatusPending), got.Slot, testUIDBase+uint32(got.Slot)<<16
		if c.ch.UIDBase != nil {
			exp.Detail, exp.StartedAt, exp.Deadline, exp.UIDBase, exp.Address = detail, &at, &at, uid, addr
			exp.InitPID, exp.Enforcement = pid, ch.Enforcement
		}
		if diff := cmp.Diff(exp, got, opt); diff != "" {
			t.Errorf("created %q (-want +got):\n%s", c.status, diff)
		}
		rows, err := d.Living(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(rows, func(r Row) bool { return r.ID == got.ID })
		read := Row{Sandbox: exp}
		if c.ch.InitStart != nil {
			read.InitStart, read.BootID = start, boot
		}
		if diff := cmp.Diff(read, rows[i], opt); diff != "" {
			t.Errorf("read %q (-want +got):\n%s", c.status, diff)
		}
		events, err := d.Events(t.Context(), 0, got.ID, 0)
		if err != nil || len(events) != len(c.types) {
			t.Fatalf("%q: events %+v, error %v", c.status, events, err)
		}
		for n, e := range events {
			var data map[string]string
			if n == len(events)-1 && c.ch.Data != nil {
				data = map[string]string{"k": "v", "detail": detail}
			}
			if e.Type != c.types[n] || e.Actor != p.Actor || !cmp.Equal(data, e.Data) || (n == 0) != e.Time.Equal(at) || n > 0 && e.Time.Before(begun) {
				t.Errorf("%q: event %d is %+v", c.status, n, e)
			}
		}
		// What comes after is a move like any other.
		if _, err := d.Move(t.Context(), got.ID, []sandbox.Status{got.Status}, sandbox.StatusCompleting, Change{}); err != nil {
			t.Error(err)
		}
	}
	if found := broken(t, d); found != nil {
		t.Error(found)
	}
	p := params("")
	p.Status = sandbox.StatusStopped
	_, _, err := d.CreateSandbox(t.Context(), p)
	want(t, err, sandbox.ErrInvalid, "illegal_move")
}

func TestNameBelongsToOneLivingSandbox(t *testing.T) {
	d := open(t)
	first := create(t, d, "db")
	_, _, err := d.CreateSandbox(t.Context(), params("db"))
	want(t, err, sandbox.ErrConflict, "name_taken")
	if n := leases(t, d); n != 1 {
		t.Fatalf("%d leases after a refused create, want 1", n)
	}
	create(t, d, "") // no name is not a name
	create(t, d, "")
	bring(t, d, first, sandbox.StatusFailed)
	second := create(t, d, "db")
	if got, err := d.ByName(t.Context(), "db"); err != nil || got.ID != second.ID {
		t.Fatalf("by name %v, error %v; want the living %s", got.ID, err, second.ID)
	}
	bring(t, d, second, sandbox.StatusCompleted)
	if got, err := d.ByName(t.Context(), "db"); err != nil || got.ID != second.ID {
		t.Fatalf("by name %v, error %v; want the newest ended %s", got.ID, err, second.ID)
	}
	_, err = d.ByName(t.Context(), "")
	want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
}

func TestSlotsComeBackAsLateAsPossible(t *testing.T) {
	d := open(t)
	three := func(name string) CreateParams { p := params(name); p.Slots = 3; return p }
	var all []sandbox.Sandbox
	for i := range 3 {
		sb, _, err := d.CreateSandbox(t.Context(), three(""))
		if err != nil || sb.Slot != i || sb.UIDBase != testUIDBase+uint32(i)*65536 {
			t.Fatalf("slot %d, uid base %#x, error %v; want slot %d", sb.Slot, sb.UIDBase, err, i)
		}
		all = append(all, sb)
	}
	_, _, err := d.CreateSandbox(t.Context(), three(""))
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
	for _, i := range []int{2, 0, 1} {
		bring(t, d, all[i], sandbox.StatusFailed)
	}
	for _, slot := range []int{2, 0, 1} { // in the order of the releases
		sb, _, err := d.CreateSandbox(t.Context(), three(""))
		if err != nil || sb.Slot != slot {
			t.Fatalf("slot %d, error %v; want %d, freed the longest", sb.Slot, err, slot)
		}
	}
	// A smaller configuration must not hand out what lies beyond it.
	p := params("")
	p.Slots = 1
	_, _, err = d.CreateSandbox(t.Context(), p)
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
}

func TestConcurrentCreatesNeverShareASlot(t *testing.T) {
	d := open(t)
	const callers, each, slots = 8, 10, 50
	var mu sync.Mutex
	holder := map[int]sandbox.ID{}
	refused := 0
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range each {
				p := params("")
				p.Slots = slots
				sb, _, err := d.CreateSandbox(context.Background(), p)
				mu.Lock()
				switch other, taken := holder[sb.Slot]; {
				case sandbox.CodeOf(err) == "slots_exhausted":
					refused++
				case err != nil:
					t.Error(err)
				case taken:
					t.Errorf("slot %d leased to %s and %s", sb.Slot, other, sb.ID)
				default:
					holder[sb.Slot] = sb.ID
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(holder) != slots || refused != callers*each-slots {
		t.Fatalf("%d leased and %d refused, want %d and %d", len(holder), refused, slots, callers*each-slots)
	}
}

func TestIdempotencyKey(t *testing.T) {
	d := open(t)
	p := params("x")
	p.IdempotencyKey, p.RequestHash = "k1", "h1"
	first, existed, err := d.CreateSandbox(t.Context(), p)
	if err != nil || existed {
		t.Fatal(existed, err)
	}
	p.Sandbox.ID = sandbox.NewID()
	again, existed, err := d.CreateSandbox(t.Context(), p)
	if err != nil || !existed || again.ID != first.ID {
		t.Fatalf("repeated: %s, existed %v, error %v; want %s", again.ID, existed, err, first.ID)
	}
	p.RequestHash = "h2"
	_, _, err = d.CreateSandbox(t.Context(), p)
	want(t, err, sandbox.ErrConflict, "idempotency_mismatch")

	// Another owner's key is another key.
	other := params("y")
	other.Sandbox.Owner, other.IdempotencyKey, other.RequestHash = "uid:1", "k1", "h2"
	if _, existed, err := d.CreateSandbox(t.Context(), other); err != nil || existed {
		t.Fatal(existed, err)
	}
	// One whose sandbox came to nothing makes another.
	never := params("z")
	never.IdempotencyKey = "k2"
	came, _, err := d.CreateSandbox(t.Context(), never)
	if err != nil {
		t.Fatal(err)
	}
	why := sandbox.ReasonCreateFailed
	if _, err := d.Move(t.Context(), came.ID, []sandbox.Status{came.Status}, sandbox.StatusFailed, Change{Reason: &why}); err != nil {
		t.Fatal(err)
	}
	never.Sandbox.ID = sandbox.NewID()
	if _, existed, err := d.CreateSandbox(t.Context(), never); err != nil || existed {
		t.Fatal(existed, err)
	}
	// The key goes with the record of its sandbox.
	bring(t, d, first, sandbox.StatusFailed)
	if err := d.Prune(t.Context(), 0, 1000); err != nil {
		t.Fatal(err)
	}
	if _, existed, err := d.CreateSandbox(t.Context(), p); err != nil || existed {
		t.Fatal(existed, err)
	}
}

// TestEveryMove tries each pair of statuses, and each from where the sandbox
// stands and from where it does not.
func TestEveryMove(t *testing.T) {
	d := open(t)
	for _, from := range sandbox.Statuses() {
		for _, to := range sandbox.Statuses() {
			sb := bring(t, d, create(t, d, ""), from)
			moved, err := d.Move(t.Context(), sb.ID, []sandbox.Status{from}, to, Change{Actor: "daemon"})
			now, readErr := d.Sandbox(t.Context(), sb.ID)
			if readErr != nil {
				t.Fatal(readErr)
			}
			if !from.CanMove(to) {
				want(t, err, sandbox.ErrInvalid, "illegal_move")
				if now.Status != from {
					t.Fatalf("refused move %s to %s left it %s", from, to, now.Status)
				}
				continue
			}
			if err != nil || moved.Status != to || now.Status != to {
				t.Fatalf("move %s to %s: returned %s, stored %s, error %v", from, to, moved.Status, now.Status, err)
			}
			if to.Terminal() != (now.EndedAt != nil) {
				t.Fatalf("move %s to %s: ended at %v", from, to, now.EndedAt)
			}
			// The same move again has lost the race.
			if to != from {
				_, err = d.Move(t.Context(), sb.ID, []sandbox.Status{from}, to, Change{})
				want(t, err, sandbox.ErrConflict, "wrong_state")
			}
		}
	}
	living, err := d.Living(t.Context())
	if err != nil || leases(t, d) != len(living) {
		t.Fatalf("%d leases for %d living sandboxes, error %v", leases(t, d), len(living), err)
	}
}

func TestOnlyOneMoverWins(t *testing.T) {
	d := open(t)
	sb := bring(t, d, create(t, d, ""), sandbox.StatusRunning)
	var wg sync.WaitGroup
	results := make(chan error, 8)
	for range cap(results) {
		wg.Go(func() {
			_, err := d.Move(context.Background(), sb.ID, []sandbox.Status{sandbox.StatusRunning, sandbox.StatusPaused}, sandbox.StatusCompleting, Change{})
			results <- err
		})
	}
	wg.Wait()
	close(results)
	won := 0
	for err := range results {
		if err == nil {
			won++
			continue
		}
		want(t, err, sandbox.ErrConflict, "wrong_state")
	}
	if won != 1 {
		t.Fatalf("%d movers won, want 1", won)
	}
	events, err := d.Events(t.Context(), 0, sb.ID, 0)
	if err != nil || len(events) != 4 {
		t.Fatalf("%d events, error %v; want 4: a lost move leaves none", len(events), err)
	}
}

// TestMoveThroughCompleting: both moves of an end in one, or none.
func TestMoveThroughCompleting(t *testing.T) {
	d := open(t)
	sb := bring(t, d, create(t, d, ""), sandbox.StatusRunning)
	why, detail := sandbox.ReasonCancelled, "removed on request"
	begun := Change{Reason: &why, Detail: &detail, Actor: "uid:7", LastOutput: []byte("bye")}
	ended := Change{Usage: &sandbox.Usage{CPUSeconds: 2}, Actor: "daemon", KeepSlot: true, Completing: &begun}
	move := func(from sandbox.Status) (sandbox.Sandbox, error) {
		return d.Move(t.Context(), sb.ID, []sandbox.Status{from}, sandbox.StatusCompleted, ended)
	}
	if _, err := d.writer.ExecContext(t.Context(), `CREATE TEMP TRIGGER refuse BEFORE UPDATE ON sandboxes WHEN new.status = 'completed'
		BEGIN SELECT RAISE(ABORT, 'injected'); END`); err != nil {
		t.Fatal(err)
	}
	if _, err := move(sandbox.StatusRunning); err == nil {
		t.Fatal("not refused")
	}
	if got, err := d.Sandbox(t.Context(), sb.ID); err != nil || got.Status != sandbox.StatusRunning || got.Reason != sandbox.ReasonNone {
		t.Fatalf("after a refusal: %s %s, %v; want it as it was", got.Status, got.Reason, err)
	}
	if _, err := d.writer.ExecContext(t.Context(), `DROP TRIGGER refuse`); err != nil {
		t.Fatal(err)
	}
	_, err := move(sandbox.StatusPaused)
	want(t, err, sandbox.ErrConflict, "wrong_state")
	got, err := move(sandbox.StatusRunning)
	if err != nil || got.Status != sandbox.StatusCompleted || got.Reason != why || got.Detail != detail || got.Usage.CPUSeconds != 2 || got.EndedAt == nil {
		t.Fatalf("%+v, %v", got, err)
	}
	events, err := d.Events(t.Context(), 0, sb.ID, 0)
	if err != nil || len(events) < 2 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	for i, w := range []struct{ kind, actor string }{{"sandbox.completing", "uid:7"}, {"sandbox.completed", "daemon"}} {
		if e := events[len(events)-2+i]; e.Type != w.kind || e.Actor != w.actor {
			t.Errorf("event %s by %s, want %s by %s", e.Type, e.Actor, w.kind, w.actor)
		}
	}
}

func TestChangeSetsWhatItNames(t *testing.T) {
	d := open(t)
	sb := bring(t, d, create(t, d, ""), sandbox.StatusCreating)
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	pid, start, boot, uid, exit := 42, uint64(1)<<63+7, "boot-1", uint32(4_000_000_000), 3
	addr := netip.MustParseAddr("10.1.2.3")
	reason, detail := sandbox.ReasonOOM, "too much"
	usage := sandbox.Usage{CPUSeconds: 1.5, CPUMicros: 1_500_000, MemoryPeakBytes: 1 << 40, Unknown: []string{"io"}}
	ch := Change{
		Reason: &reason, Detail: &detail, StartedAt: &at, EndedAt: &at, Deadline: &at, ExitCode: &exit, UIDBase: &uid, Address: &addr,
		InitPID: &pid, InitStart: &start, BootID: &boot, Usage: &usage, LastOutput: []byte("bye\x00\xff"),
		Enforcement: []sandbox.Enforcement{{Limit: "cpu", Asked: "2 cpus", Enforced: true}}, Data: map[string]string{"k": "v"},
	}
	got, err := d.Move(t.Context(), sb.ID, []sandbox.Status{sandbox.StatusCreating}, sandbox.StatusRunning, ch)
	if err != nil {
		t.Fatal(err)
	}
	exp := sb
	exp.Status, exp.Reason, exp.Detail, exp.StartedAt, exp.EndedAt, exp.Deadline = sandbox.StatusRunning, reason, detail, &at, &at, &at
	exp.ExitCode, exp.UIDBase, exp.Address, exp.InitPID, exp.Usage = &exit, uid, addr, pid, usage
	exp.LastOutput, exp.Enforcement = []byte("bye\x00\xff"), ch.Enforcement
	opt := cmpopts.EquateComparable(netip.Addr{})
	if diff := cmp.Diff(exp, got, opt); diff != "" {
		t.Fatalf("moved (-want +got):\n%s", diff)
	}
	// An empty change leaves everything as it is.
	if err := d.Update(t.Context(), sb.ID, Change{}); err != nil {
		t.Fatal(err)
	}
	rows, err := d.Living(t.Context())
	if err != nil || len(rows) != 1 {
		t.Fatal(len(rows), err)
	}
	if diff := cmp.Diff(Row{Sandbox: exp, InitStart: start, BootID: boot}, rows[0], opt); diff != "" {
		t.Fatalf("after an empty update (-want +got):\n%s", diff)
	}
	events, err := d.Events(t.Context(), 2, sb.ID, 0)
	if err != nil || len(events) != 1 {
		t.Fatalf("events %v, error %v; an update without a type adds none", events, err)
	}
	if diff := cmp.Diff(map[string]string{"k": "v", "reason": "oom", "detail": "too much"}, events[0].Data); diff != "" {
		t.Fatalf("event (-want +got):\n%s", diff)
	}
	// The zero time takes the deadline away; nothing else does.
	if err := d.Update(t.Context(), sb.ID, Change{Deadline: new(time.Time), EventType: "sandbox.extended"}); err != nil {
		t.Fatal(err)
	}
	now, err := d.Sandbox(t.Context(), sb.ID)
	if err != nil || now.Deadline != nil {
		t.Fatalf("deadline %v, error %v; want none", now.Deadline, err)
	}
	// A terminal move forgets PID 1.
	end := bring(t, d, create(t, d, ""), sandbox.StatusCompleting)
	if err := d.Update(t.Context(), end.ID, Change{InitPID: &pid}); err != nil {
		t.Fatal(err)
	}
	end, err = d.Move(t.Context(), end.ID, []sandbox.Status{sandbox.StatusCompleting}, sandbox.StatusCompleted, Change{})
	if err != nil || end.InitPID != 0 || end.EndedAt == nil {
		t.Fatalf("ended with pid %d at %v, error %v", end.InitPID, end.EndedAt, err)
	}
}

func TestMissingSandbox(t *testing.T) {
	d := open(t)
	id := sandbox.NewID()
	_, err := d.Sandbox(t.Context(), id)
	want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
	want(t, d.Update(t.Context(), id, Change{}), sandbox.ErrNotFound, "sandbox_not_found")
	_, err = d.Move(t.Context(), id, []sandbox.Status{sandbox.StatusPending}, sandbox.StatusFailed, Change{})
	want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
}

func TestByPrefix(t *testing.T) {
	d := open(t)
	for _, id := range []sandbox.ID{"sbaaaaaaaaaaaa", "sbaaaaaaaaaaab", "sbzzzzzzzzzzzz"} {
		p := params("")
		p.Sandbox.ID = id
		if _, _, err := d.CreateSandbox(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	for prefix, id := range map[string]sandbox.ID{"sbz": "sbzzzzzzzzzzzz", "sbzzzzzzzzzzzz": "sbzzzzzzzzzzzz", "sbaaaaaaaaaaab": "sbaaaaaaaaaaab"} {
		if sb, err := d.ByPrefix(t.Context(), prefix); err != nil || sb.ID != id {
			t.Errorf("%s: %s, error %v; want %s", prefix, sb.ID, err, id)
		}
	}
	_, err := d.ByPrefix(t.Context(), "sba")
	want(t, err, sandbox.ErrInvalid, "ambiguous_id")
	for _, none := range []string{"sbb", "sb", "", "%"} {
		_, err := d.ByPrefix(t.Context(), none)
		want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
	}
}

func TestListFiltersAndPages(t *testing.T) {
	d := open(t)
	base := time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)
	var ids []sandbox.ID
	for i := range 10 {
		p := params(fmt.Sprintf("n%d", i))
		p.Sandbox.CreatedAt = base.Add(time.Duration(i/2) * time.Second) // pairs share a time
		p.Sandbox.Spec.Labels = map[string]string{"even": fmt.Sprint(i%2 == 0), `odd "key.`: "x"}
		sb, _, err := d.CreateSandbox(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID)
		if i < 3 {
			bring(t, d, sb, sandbox.StatusFailed)
		}
	}
	count := func(f sandbox.Filter) int {
		t.Helper()
		p, err := d.List(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		return len(p.Items)
	}
	for _, c := range []struct {
		name string
		f    sandbox.Filter
		want int
	}{
		{"living", sandbox.Filter{}, 7},
		{"all", sandbox.Filter{All: true}, 10},
		{"status", sandbox.Filter{Statuses: []sandbox.Status{sandbox.StatusFailed}}, 3},
		{"statuses", sandbox.Filter{Statuses: []sandbox.Status{sandbox.StatusFailed, sandbox.StatusPending}}, 10},
		{"label", sandbox.Filter{All: true, Labels: map[string]string{"even": "true"}}, 5},
		{"label of another value", sandbox.Filter{All: true, Labels: map[string]string{"even": "maybe"}}, 0},
		{"quoted label key", sandbox.Filter{All: true, Labels: map[string]string{`odd "key.`: "x", "even": "false"}}, 5},
		{"name", sandbox.Filter{All: true, Name: "n1"}, 1},
		{"name of an ended one", sandbox.Filter{Name: "n1"}, 0},
	} {
		if n := count(c.f); n != c.want {
			t.Errorf("%s: %d, want %d", c.name, n, c.want)
		}
	}
	seen := map[sandbox.ID]bool{}
	var last time.Time
	f := sandbox.Filter{All: true, Limit: 3}
	for pages := 1; ; pages++ {
		p, err := d.List(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		for _, sb := range p.Items {
			if seen[sb.ID] || !last.IsZero() && sb.CreatedAt.After(last) {
				t.Fatalf("%s is repeated or out of order", sb.ID)
			}
			seen[sb.ID], last = true, sb.CreatedAt
		}
		if f.Cursor = p.Next; f.Cursor == "" {
			if pages != 4 || len(seen) != len(ids) {
				t.Fatalf("%d pages with %d items, want 4 with %d", pages, len(seen), len(ids))
			}
			break
		}
	}
	_, err := d.List(t.Context(), sandbox.Filter{Cursor: "x"})
	want(t, err, sandbox.ErrInvalid, "invalid_cursor")
	_, err = d.List(t.Context(), sandbox.Filter{Statuses: []sandbox.Status{"gone"}})
	want(t, err, sandbox.ErrInvalid, "invalid_status")
}

func FuzzCursor(f *testing.F) {
	f.Add(formatCursor(sandbox.Sandbox{ID: "sbaaaaaaaaaaaa", CreatedAt: time.Unix(0, 5)}))
	f.Add("")
	f.Fuzz(func(t *testing.T, s string) {
		created, id, err := parseCursor(s)
		if err != nil {
			want(t, err, sandbox.ErrInvalid, "invalid_cursor")
			return
		}
		again, id2, err := parseCursor(formatCursor(sandbox.Sandbox{ID: sandbox.ID(id), CreatedAt: time.Unix(0, created)}))
		if err != nil || again != created || id2 != id {
			t.Fatalf("%q: %d %q, again %d %q, error %v", s, created, id, again, id2, err)
		}
	})
}
