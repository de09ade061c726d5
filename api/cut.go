package api

import (
	"context"
	"sync"
	"time"
)

// lastWord is how long a request that is cut may take to say so.
const lastWord = 200 * time.Millisecond

// WithCut returns a context that cut ends, with the reason as its cause. Soon
// after it calls hangUp, for clients that do not listen, unless end was called
// before: the connection's next request may be another caller's. hangUp must
// not wait; cut and end may be called repeatedly.
func WithCut(ctx context.Context, hangUp func()) (held context.Context, cut func(why error), end func()) {
	held, cancel := context.WithCancelCause(ctx)
	var mu sync.Mutex
	var timer *time.Timer
	over := false
	cut = func(why error) {
		cancel(why)
		mu.Lock()
		defer mu.Unlock()
		if over || timer != nil {
			return
		}
		timer = time.AfterFunc(lastWord, func() {
			mu.Lock()
			defer mu.Unlock()
			if !over {
				hangUp()
			}
		})
	}
	return held, cut, func() {
		cancel(nil)
		mu.Lock()
		defer mu.Unlock()
		over = true
		if timer != nil {
			timer.Stop()
		}
	}
}
