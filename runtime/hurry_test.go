package runtime

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
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
