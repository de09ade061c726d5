package runtime

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestLooksAreShared has many ask at once: few look, and nobody gets what was
// read before they asked.
func TestLooksAreShared(t *testing.T) {
	var l looks
	var clock, read atomic.Uint64
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			for range 20 {
				asked := clock.Add(1)
				u := l.share(func() *sandbox.Usage {
					read.Add(1)
					begun := clock.Add(1)
					<-time.After(100 * time.Microsecond) // as long as a look takes
					return &sandbox.Usage{CPUMicros: begun}
				})
				if u.CPUMicros <= asked {
					t.Errorf("asked at %d, read at %d", asked, u.CPUMicros)
				}
			}
		})
	}
	wg.Wait()
	if n := read.Load(); n == 0 || n > 2000 {
		t.Errorf("%d looks for 4,000 questions", n)
	}
	// Alone, each looks for itself.
	before := read.Load()
	for range 3 {
		l.share(func() *sandbox.Usage { read.Add(1); return nil })
	}
	if read.Load() != before+3 {
		t.Errorf("%d looks for 3 questions one after another", read.Load()-before)
	}
}

// TestLookThatPanics leaves nobody waiting.
func TestLookThatPanics(t *testing.T) {
	var l looks
	func() {
		defer func() { _ = recover() }()
		l.share(func() *sandbox.Usage { panic("at the disco") })
	}()
	done := make(chan struct{})
	go func() { defer close(done); l.share(func() *sandbox.Usage { return nil }) }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("the next one waits")
	}
}
