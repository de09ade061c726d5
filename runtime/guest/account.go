package guest

import (
	"context"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of what answers take at a time.
const (
	accountTotal   = 72 << 20
	accountOwner   = 48 << 20
	accountSandbox = 24 << 20
	// accountPatience is how long an operation waits for room.
	accountPatience = 5 * time.Second
	// listCharge is what a listing counts for. Its entries pass through one at
	// a time; what it costs besides is work, in PID 1 and here.
	listCharge = 6 << 20
	// itemFactor is how many bytes an item of a gathered list takes decoded and
	// encoded again, for each byte of it.
	itemFactor = 3
	// largePiece is what a stream of output is charged for where it works in
	// pieces of initproto.MaxData: here, and in what passes them on.
	largePiece = 2 * initproto.MaxData
	smallPiece = 32 << 10 // what it works in without a charge
)

// Account bounds the memory that answers of all sandboxes' PID 1 take in the
// daemon at a time: together, for one owner, and for one sandbox. What is
// passed on piece by piece through a small buffer counts for nothing. It is
// safe for concurrent use.
type Account struct {
	total, owner, sandbox int64
	patience              time.Duration

	mu       sync.Mutex
	used     int64                // guarded by mu
	owners   map[string]int64     // guarded by mu
	boxes    map[sandbox.ID]int64 // guarded by mu
	released chan struct{}        // guarded by mu; closed at the next release; nil while nobody waits
}

// NewAccount returns an empty account. One is for the whole daemon.
func NewAccount() *Account {
	return &Account{
		total: accountTotal, owner: accountOwner, sandbox: accountSandbox, patience: accountPatience,
		owners: map[string]int64{}, boxes: map[sandbox.ID]int64{},
	}
}

// tab is whom an operation's answers are charged to.
type tab struct {
	a     *Account
	box   sandbox.ID
	owner string
}

type tabKey struct{}

// Charge returns a context whose operations are charged to a sandbox and its
// owner. Without it they are charged to nobody.
func (a *Account) Charge(ctx context.Context, box sandbox.ID, owner string) context.Context {
	return context.WithValue(ctx, tabKey{}, &tab{a: a, box: box, owner: owner})
}

// tabOf returns the tab of a context, or nil, which takes everything.
func tabOf(ctx context.Context) *tab {
	t, _ := ctx.Value(tabKey{}).(*tab) // nil where there is none
	return t
}

// full says whose share n more bytes would exceed, or "", where shares are
// divided by part. a.mu is held.
func (t *tab) full(n, part int64) string {
	switch {
	case t.a.used+n > t.a.total/part:
		return "all sandboxes together have"
	case t.a.owners[t.owner]+n > t.a.owner/part:
		return "the sandbox's owner has"
	case t.a.boxes[t.box]+n > t.a.sandbox/part:
		return "the sandbox has"
	}
	return ""
}

// try charges n bytes if there is room for them.
func (t *tab) try(n int64) bool { return t.charge(n, 1) }

// spare is try for what can do without: half of each share is not for it.
func (t *tab) spare(n int64) bool { return t.charge(n, 2) }

func (t *tab) charge(n, part int64) bool {
	if t == nil {
		return true
	}
	t.a.mu.Lock()
	defer t.a.mu.Unlock()
	if t.full(n, part) != "" {
		return false
	}
	t.a.used += n
	t.a.owners[t.owner] += n
	t.a.boxes[t.box] += n
	return true
}

// take charges n bytes, and waits a while for room. ErrExhausted with code
// answers_full: there was none.
func (t *tab) take(ctx context.Context, n int64) error {
	if t.try(n) {
		return nil
	}
	late := time.NewTimer(t.a.patience)
	defer late.Stop()
	for {
		t.a.mu.Lock()
		if t.a.released == nil {
			t.a.released = make(chan struct{})
		}
		released, who := t.a.released, t.full(n, 1)
		t.a.mu.Unlock()
		if t.try(n) {
			return nil
		}
		select {
		case <-released:
		case <-late.C:
			return sandbox.Errorf(sandbox.ErrExhausted, "answers_full", "%s as many large answers under way as may be at a time: read or end those, then try again", who)
		case <-ctx.Done():
			return ctxError(ctx)
		}
	}
}

// give takes n bytes back off.
func (t *tab) give(n int64) {
	if t == nil || n == 0 {
		return
	}
	t.a.mu.Lock()
	defer t.a.mu.Unlock()
	t.a.used -= n
	if t.a.owners[t.owner] -= n; t.a.owners[t.owner] == 0 {
		delete(t.a.owners, t.owner)
	}
	if t.a.boxes[t.box] -= n; t.a.boxes[t.box] == 0 {
		delete(t.a.boxes, t.box)
	}
	if t.a.released != nil {
		close(t.a.released)
		t.a.released = nil
	}
}
