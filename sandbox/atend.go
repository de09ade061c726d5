package sandbox

import (
	"context"
	"sync"
)

// ends are what is to be done at the end of a request.
type ends struct {
	mu   sync.Mutex
	todo []func() // guarded by mu
}

type endsKey struct{}

// WithEnd returns a context for the work of one request, and what the server
// calls when the answer is written or given up.
func WithEnd(ctx context.Context) (context.Context, func()) {
	e := &ends{}
	return context.WithValue(ctx, endsKey{}, e), func() {
		e.mu.Lock()
		todo := e.todo
		e.todo = nil
		e.mu.Unlock()
		for _, f := range todo {
			f()
		}
	}
}

// AtEnd has f called at the end of the request a context belongs to. It is
// false, and f is not called, where the context belongs to none.
func AtEnd(ctx context.Context, f func()) bool {
	e, ok := ctx.Value(endsKey{}).(*ends)
	if !ok {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.todo = append(e.todo, f)
	return true
}
