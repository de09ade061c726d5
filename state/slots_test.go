package state

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func reserve(t *testing.T, d *DB, slots, spare int) int {
	t.Helper()
	slot, err := d.ReserveSlot(t.Context(), slots, spare)
	if err != nil {
		t.Fatal(err)
	}
	return slot
}

// createOn makes a sandbox of a reserved slot, or of any for a negative one.
func createOn(t *testing.T, d *DB, slots, slot int) (sandbox.Sandbox, error) {
	t.Helper()
	p := params("")
	if p.Slots = slots; slot >= 0 {
		p.Slot = &slot
	}
	sb, _, err := d.CreateSandbox(t.Context(), p)
	return sb, err
}

func TestReservedSlotBecomesTheLease(t *testing.T) {
	d := open(t)
	a, b := reserve(t, d, 3, 0), reserve(t, d, 3, 0)
	if a != 0 || b != 1 {
		t.Fatalf("reserved %d and %d, want 0 and 1", a, b)
	}
	// What is reserved is not chosen.
	if sb, err := createOn(t, d, 3, -1); err != nil || sb.Slot != 2 {
		t.Fatalf("slot %d, error %v; want 2", sb.Slot, err)
	}
	_, err := createOn(t, d, 3, -1)
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
	sb, err := createOn(t, d, 3, b)
	if err != nil || sb.Slot != b || sb.UIDBase != testUIDBase+1<<16 || leases(t, d) != 2 {
		t.Fatalf("%+v, error %v, %d leases; want slot %d leased", sb, err, leases(t, d), b)
	}
	for _, taken := range []int{b, 2, 7} { // leased as reserved, leased as chosen, unknown
		_, err = createOn(t, d, 3, taken)
		want(t, err, sandbox.ErrConflict, "slot_not_reserved")
	}
	if living, err := d.Living(t.Context()); err != nil || len(living) != 2 {
		t.Fatalf("%d living, error %v; a refused create leaves none", len(living), err)
	}
	bring(t, d, sb, sandbox.StatusFailed)
	_, err = createOn(t, d, 3, b) // free, but not reserved
	want(t, err, sandbox.ErrConflict, "slot_not_reserved")
	if sb, err := createOn(t, d, 3, -1); err != nil || sb.Slot != b {
		t.Fatalf("slot %d, error %v; want the freed %d", sb.Slot, err, b)
	}
}

// TestRefusedCreateKeepsTheReservation: the shell is still there, for another.
func TestRefusedCreateKeepsTheReservation(t *testing.T) {
	d := open(t)
	create(t, d, "taken")
	slot := reserve(t, d, 9, 0)
	p := params("taken")
	p.Slot = &slot
	_, _, err := d.CreateSandbox(t.Context(), p)
	want(t, err, sandbox.ErrConflict, "name_taken")

	p = params("")
	p.IdempotencyKey, p.RequestHash = "k", "h"
	if _, _, err := d.CreateSandbox(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	p.Sandbox.ID, p.Slot = sandbox.NewID(), &slot
	if _, existed, err := d.CreateSandbox(t.Context(), p); err != nil || !existed {
		t.Fatalf("existed %v, error %v", existed, err)
	}
	if _, err := createOn(t, d, 9, slot); err != nil {
		t.Fatalf("the reserved slot after two refusals: %v", err)
	}
}

func TestReserveLeavesSpareSlots(t *testing.T) {
	const slots = 4
	// used of the slots had a sandbox once; the rest were never used.
	for used := range slots + 1 {
		for spare := range slots + 2 {
			t.Run(fmt.Sprintf("used %d spare %d", used, spare), func(t *testing.T) {
				d := open(t)
				var all []sandbox.Sandbox
				for range used {
					sb, err := createOn(t, d, slots, -1)
					if err != nil {
						t.Fatal(err)
					}
					all = append(all, sb)
				}
				for _, sb := range all {
					bring(t, d, sb, sandbox.StatusFailed)
				}
				for free := slots; free > spare; free-- {
					reserve(t, d, slots, spare)
				}
				_, err := d.ReserveSlot(t.Context(), slots, spare)
				want(t, err, sandbox.ErrExhausted, "slots_exhausted")
				for range min(spare, slots) {
					if _, err := createOn(t, d, slots, -1); err != nil {
						t.Fatalf("a spare slot: %v", err)
					}
				}
				_, err = createOn(t, d, slots, -1)
				want(t, err, sandbox.ErrExhausted, "slots_exhausted")
			})
		}
	}
	// Slots beyond a smaller configuration are not spare ones.
	d := open(t)
	for range 3 {
		bring(t, d, create(t, d, ""), sandbox.StatusFailed)
	}
	_, err := d.ReserveSlot(t.Context(), 2, 2)
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
	reserve(t, d, 2, 1)
}

func TestReleaseSlot(t *testing.T) {
	d := open(t)
	a, b := reserve(t, d, 3, 0), reserve(t, d, 3, 0)
	sb, err := createOn(t, d, 3, a)
	if err != nil {
		t.Fatal(err)
	}
	c := reserve(t, d, 3, 0)
	for range 2 {
		for _, slot := range []int{a, b, 99} { // a is leased
			if err := d.ReleaseSlot(t.Context(), slot); err != nil {
				t.Fatal(err)
			}
		}
	}
	if leases(t, d) != 1 {
		t.Fatal("releasing a leased slot took the lease away")
	}
	if err := d.ReleaseSlot(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	bring(t, d, sb, sandbox.StatusFailed)
	for _, slot := range []int{b, c, a} { // in the order of the releases
		if got := reserve(t, d, 3, 0); got != slot {
			t.Fatalf("slot %d, want %d, freed the longest", got, slot)
		}
	}
}

// TestReleaseReserved: after a restart only the living have their slots, and
// those that end from then on keep theirs until they are freed.
func TestReleaseReserved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	before := openAt(t, path)
	living := create(t, before, "")
	endKeeping(t, before, bring(t, before, create(t, before, ""), sandbox.StatusCompleting))
	reserve(t, before, 4, 0)

	d := openAt(t, path)
	endKeeping(t, d, bring(t, d, create(t, d, ""), sandbox.StatusCompleting))
	_, err := d.ReserveSlot(t.Context(), 4, 0)
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
	for range 2 {
		if err := d.ReleaseReserved(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if a, b := reserve(t, d, 4, 0), reserve(t, d, 4, 0); a != 1 || b != 2 || leases(t, d) != 2 {
		t.Fatalf("slots %d and %d, %d leases; want 1 and 2, and the leases of slots %d and 3", a, b, leases(t, d), living.Slot)
	}
	_, err = d.ReserveSlot(t.Context(), 4, 0)
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
}

// endKeeping ends a completing sandbox and leaves it its slot.
func endKeeping(t *testing.T, d *DB, sb sandbox.Sandbox) {
	t.Helper()
	end, err := d.Move(t.Context(), sb.ID, []sandbox.Status{sandbox.StatusCompleting}, sandbox.StatusFailed, Change{KeepSlot: true})
	if err != nil || end.EndedAt == nil {
		t.Fatal(end, err)
	}
}

func TestKeptSlotIsFreedByItsSandbox(t *testing.T) {
	d := open(t)
	sb := bring(t, d, create(t, d, "n"), sandbox.StatusCompleting)
	endKeeping(t, d, sb)
	_, err := createOn(t, d, 1, -1)
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
	create(t, d, "n") // the name is free
	// The record stays while the lease refers to it.
	if err := d.Prune(t.Context(), 0, 1000); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Sandbox(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if err := d.FreeEnded(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	next, err := createOn(t, d, 1, -1)
	if err != nil || next.Slot != sb.Slot {
		t.Fatalf("slot %d, error %v; want %d", next.Slot, err, sb.Slot)
	}
	// Neither the late release nor one of the living takes the slot away.
	for _, id := range []sandbox.ID{sb.ID, next.ID} {
		if err := d.FreeEnded(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	_, err = createOn(t, d, 1, -1)
	want(t, err, sandbox.ErrExhausted, "slots_exhausted")
	if err := d.Prune(t.Context(), 0, 1000); err != nil {
		t.Fatal(err)
	}
	_, err = d.Sandbox(t.Context(), sb.ID)
	want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
}
