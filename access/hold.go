package access

import (
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// holds are the requests that callers have in flight, to be cut when what
// lets them in goes away.
type holds struct {
	mu  sync.Mutex
	all map[*hold]bool
}

type hold struct {
	caller Caller
	cut    func(why error)
	timer  *time.Timer
}

// Hold has cut called when a caller's key is revoked or expires, or its owner
// is disabled, given a lower role or removed; release ends it and may be called
// twice. cut must not wait. It is called at once where that has come already.
// why is an error of ByKey, or ErrForbidden with code role_too_low.
func (o *Office) Hold(c Caller, cut func(why error)) (release func()) {
	h := &hold{caller: c, cut: cut}
	o.holds.mu.Lock()
	if o.holds.all == nil {
		o.holds.all = map[*hold]bool{}
	}
	o.holds.all[h] = true
	o.holds.mu.Unlock()
	// Only now: what is revoked from here on finds it.
	expires, why := o.stands(c)
	switch {
	case why != nil:
		cut(why)
	case !expires.IsZero():
		o.holds.mu.Lock()
		h.timer = time.AfterFunc(expires.Sub(o.now()), func() { cut(errExpired(expires)) })
		o.holds.mu.Unlock()
	}
	return func() {
		o.holds.mu.Lock()
		defer o.holds.mu.Unlock()
		delete(o.holds.all, h)
		if h.timer != nil {
			h.timer.Stop()
		}
	}
}

// stands returns why a caller would no longer be let in so, else until when.
func (o *Office) stands(c Caller) (expires time.Time, why error) {
	var now Caller
	if c.Key == "" {
		now, why = o.Standing(c.Owner)
	} else {
		now, why = o.ByKeyID(c.Key)
	}
	if why == nil && c.Role != "" && !now.Role.AtLeast(c.Role) {
		why = sandbox.Errorf(sandbox.ErrForbidden, "role_too_low", "the role of %s was lowered from %s to %s while the request was under way: send it again if %s may do it", c.Owner, c.Role, now.Role, now.Role)
	}
	if why != nil {
		return expires, why
	}
	o.mu.RLock()
	defer o.mu.RUnlock()
	if k := o.byID[c.Key]; k != nil && k.ExpiresAt != nil {
		expires = *k.ExpiresAt
	}
	return expires, nil
}

// cutAll cuts the requests of callers that match and have lost their right.
func (o *Office) cutAll(match func(Caller) bool) {
	o.holds.mu.Lock()
	var found []*hold
	for h := range o.holds.all {
		if match(h.caller) {
			found = append(found, h)
		}
	}
	o.holds.mu.Unlock()
	for _, h := range found {
		if _, why := o.stands(h.caller); why != nil {
			h.cut(why)
		}
	}
}
