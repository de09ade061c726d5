package runtime

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// quiet is how long nothing somebody waits for must have been under way
	// before what nobody waits for takes the processors, and politeness the
	// longest it waits for that.
	quiet      = 10 * time.Millisecond
	politeness = 100 * time.Millisecond
	quietPoll  = 2 * time.Millisecond
)

// hurry knows whether somebody waits for a sandbox or for a command's first
// word: on a machine of few processors the refill of the pool would take them
// from it.
type hurry struct {
	now  atomic.Int64 // creations and commands under way
	last atomic.Int64 // when one of them was over, nanoseconds since 1970
}

// begin is called when somebody begins to wait, and what it returns when that
// is over, once or more often. Nobody is taken to wait longer than politeness.
func (h *hurry) begin() (over func()) {
	h.now.Add(1)
	end := sync.OnceFunc(func() {
		h.last.Store(time.Now().UnixNano())
		h.now.Add(-1)
	})
	timer := time.AfterFunc(politeness, end)
	return func() {
		timer.Stop()
		end()
	}
}

// on reports whether somebody waits, or did a moment ago.
func (h *hurry) on() bool {
	return h.now.Load() > 0 || time.Since(time.Unix(0, h.last.Load())) < quiet
}

// letPass waits until nobody is in a hurry, while it can wait and no longer
// than politeness.
func (h *hurry) letPass(ctx context.Context, can func() bool) {
	for began := time.Now(); time.Since(began) < politeness && ctx.Err() == nil && can() && h.on(); {
		pause(ctx, quietPoll)
	}
}
