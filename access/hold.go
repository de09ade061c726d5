package access

import (
	"sync"
	"time"
)

// holds are the requests that callers have in flight, to be cut when what
// lets them in goes away.
type holds struct {
	mu  sync.Mutex
	all map[*hold]bool
}

type hold struct {
	caller Caller
	cut    func()
	timer  *time.Timer
}

// Hold has cut called when a caller's key is revoked or expires, or its owner
// is disabled, changed or removed; release ends it and may be called twice.
// cut must not wait. It is called at once where that has come already.
func (o *Office) Hold(c Caller, cut func()) (release func()) {
	h := &hold{caller: c, cut: cut}
	o.holds.mu.Lock()
	if o.holds.all == nil {
		o.holds.all = map[*hold]bool{}
	}
	o.holds.all[h] = true
	o.holds.mu.Unlock()
	// Only now: what is revoked from here on finds it.
	expires, good := o.stands(c)
	switch {
	case !good:
		cut()
	case !expires.IsZero():
		o.holds.mu.Lock()
		h.timer = time.AfterFunc(expires.Sub(o.now()), cut)
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

// stands reports whether a caller would still be let in so, and until when.
func (o *Office) stands(c Caller) (expires time.Time, good bool) {
	var now Caller
	var err error
	if c.Key == "" {
		now, err = o.Standing(c.Owner)
	} else {
		now, err = o.ByKeyID(c.Key)
	}
	if err != nil || c.Role != "" && now.Role != c.Role {
		return expires, false
	}
	o.mu.RLock()
	defer o.mu.RUnlock()
	if k := o.byID[c.Key]; k != nil && k.ExpiresAt != nil {
		expires = *k.ExpiresAt
	}
	return expires, true
}

// cutAll cuts the requests of callers that match.
func (o *Office) cutAll(match func(Caller) bool) {
	o.holds.mu.Lock()
	var cuts []func()
	for h := range o.holds.all {
		if match(h.caller) {
			cuts = append(cuts, h.cut)
		}
	}
	o.holds.mu.Unlock()
	for _, cut := range cuts {
		cut()
	}
}
