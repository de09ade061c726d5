package initd

import "testing"

func TestNumbersGoOnAfter(t *testing.T) {
	tab := newTable()
	if got := tab.numberAfter(0); got != 0 {
		t.Errorf("before any process: %d", got)
	}
	if got := tab.newID(); got != "p1" {
		t.Errorf("first: %s", got)
	}
	if got := tab.numberAfter(7); got != 7 {
		t.Errorf("after the processes of an earlier PID 1: %d", got)
	}
	if got := tab.newID(); got != "p8" {
		t.Errorf("next: %s", got)
	}
	if got := tab.numberAfter(7); got != 8 {
		t.Errorf("a lower number took it back: %d", got)
	}
}
