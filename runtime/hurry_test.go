package runtime

import (
	"errors"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestHurry(t *testing.T) {
	var h hurry
	if h.on() {
		t.Error("in a hurry from the start")
	}
	over := h.begin()
	if !h.on() {
		t.Error("in no hurry while somebody waits")
	}
	asked := 0
	h.letPass(t.Context(), func() bool { asked++; return false })
	if asked != 1 {
		t.Errorf("who could not wait was asked %d times, want once", asked)
	}
	began := time.Now()
	h.letPass(t.Context(), func() bool { asked++; return true })
	if took := time.Since(began); took < politeness || asked < 3 {
		t.Errorf("politely waited for %v, asked %d times; want %v", took, asked, politeness)
	}
	over()
	over()
	if h.now.Load() != 0 {
		t.Errorf("%d wait still", h.now.Load())
	}
	testenv.Eventually(t, 20*time.Second, "quiet", func() bool { return !h.on() })
	// One who waits for very long is forgotten.
	h.begin()
	testenv.Eventually(t, 20*time.Second, "quiet", func() bool { return !h.on() })
}

type closing struct{ sandbox.ProcessIO }

func (closing) Close() error { return nil }

// TestAttachedClosesOnce: who reads from a process and who is told that nobody
// waits any more close its connection in the same moment. Two that left would
// count as two, and one of them found nothing to call.
func TestAttachedClosesOnce(t *testing.T) {
	left := 0
	a := &attached{ProcessIO: closing{}, heard: func() {}}
	a.leave = func() {
		if left++; left == 1 {
			_ = a.Close()
		}
	}
	if err := errors.Join(a.Close(), a.Close()); err != nil || left != 1 {
		t.Errorf("left %d times, %v", left, err)
	}
}
