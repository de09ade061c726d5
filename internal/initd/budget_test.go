package initd

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestRingsShareABudget: many running processes cannot make PID 1 promise
// more memory than it has; ended ones give theirs back.
func TestRingsShareABudget(t *testing.T) {
	tab := newTable()
	if got := tab.ringSize(0); got != sandbox.DefaultOutput {
		t.Errorf("the first process keeps %d bytes, want the default", got)
	}
	if got := tab.ringSize(sandbox.MaxOutput); got != sandbox.MaxOutput {
		t.Errorf("a process that asks for much alone keeps %d bytes", got)
	}
	total := int64(0)
	for range 4096 {
		p := &process{out: newRing(tab.ringSize(0))}
		tab.order = append(tab.order, p)
		total += p.out.size
	}
	if total > 400<<20 {
		t.Errorf("4096 running processes may keep %d MiB", total>>20)
	}
	if got := tab.ringSize(sandbox.MaxOutput); got != smallRing {
		t.Errorf("a process beyond the budget keeps %d bytes, want %d", got, smallRing)
	}
	for _, p := range tab.order {
		p.exit = &sandbox.ExitStatus{}
	}
	if got := tab.ringSize(0); got != sandbox.DefaultOutput {
		t.Errorf("after all have ended a new one keeps %d bytes, want the default", got)
	}
}

// TestTrimDropsWhatEndedFirst: one that began first and ends last is still
// there for who waits for its end, and so is the main process.
func TestTrimDropsWhatEndedFirst(t *testing.T) {
	tab := newTable()
	tab.keep = 2
	began := time.Now()
	for i, id := range []sandbox.ProcessID{"p1", "p2", "p3", "p4"} {
		at := began.Add(time.Duration(i) * time.Second)
		if id == "p1" {
			at = began.Add(time.Minute)
		}
		p := &process{rec: sandbox.Process{ID: id, Main: id == "p2"}, out: newRing(64), exit: &sandbox.ExitStatus{At: at}}
		tab.order = append(tab.order, p)
		tab.all[id] = p
	}
	tab.trim()
	if len(tab.order) != 3 || tab.all["p1"] == nil || tab.all["p2"] == nil || tab.all["p4"] == nil {
		t.Errorf("kept: %v", tab.all)
	}
}
