package runtime

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

func TestHurry(t *testing.T) {
	var h hurry
	wait := func(can func() bool) time.Duration {
		began := time.Now()
		h.letPass(t.Context(), can)
		return time.Since(began)
	}
	yes := func() bool { return true }
	if h.on() {
		t.Error("in a hurry from the start")
	}
	over := h.begin()
	if !h.on() {
		t.Error("in no hurry while somebody waits")
	}
	if took := wait(yes); took < politeness {
		t.Errorf("politely waited for %v, want %v", took, politeness)
	}
	if wait(func() bool { return false }); !h.on() { // at once
		t.Error("the hurry was waited for by who could not")
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
