package state

import (
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestCounts(t *testing.T) {
	d := open(t)
	empty, err := d.Counts(t.Context())
	if err != nil || empty != (Counts{}) {
		t.Fatalf("of an empty database: %+v, %v", empty, err)
	}
	create(t, d, "one")
	before, err := d.Counts(t.Context())
	if err != nil || before.LastEvent == 0 || before.Ended != 0 {
		t.Fatalf("with one sandbox: %+v, %v", before, err)
	}
	for range 3 {
		if _, err := d.AppendEvent(t.Context(), sandbox.Event{Type: "net.denied"}); err != nil {
			t.Fatal(err)
		}
	}
	after, err := d.Counts(t.Context())
	if err != nil || after.LastEvent != before.LastEvent+3 {
		t.Fatalf("after three events: %+v, %v; before %+v", after, err, before)
	}
	types, err := d.EventTypes(t.Context(), before.LastEvent, after.LastEvent)
	if err != nil || len(types) != 1 || types["net.denied"] != 3 {
		t.Errorf("the three by type: %v, %v", types, err)
	}
	if types, err = d.EventTypes(t.Context(), 0, before.LastEvent); err != nil || types["net.denied"] != 0 || len(types) == 0 {
		t.Errorf("those before, by type: %v, %v", types, err)
	}
}
