package access

import (
	"context"
	"math"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Later is an error that goes away by itself.
type Later struct {
	After time.Duration
	err   error
}

// Error returns the message for people.
func (l *Later) Error() string { return l.err.Error() }

// Unwrap returns the error it stands for.
func (l *Later) Unwrap() error { return l.err }

// seconds rounds up to whole ones, at least 1.
func seconds(d time.Duration) int { return max(1, int(math.Ceil(d.Seconds()))) }

// Seconds is what the header Retry-After says.
func (l *Later) Seconds() int { return seconds(l.After) }

// paces are limiters of each owner.
type paces struct {
	mu  sync.Mutex
	all map[string]*rate.Limiter
}

// burst is how many seconds' worth of requests may come at once.
const burst = 10

// Pace counts a request of an owner. The error, of class ErrExhausted with
// code too_many_requests, is a *Later.
func (o *Office) Pace(c Caller) error {
	perMinute := o.quotaOf(c.Owner).PerMinute
	if perMinute <= 0 {
		return nil
	}
	now := o.now()
	perSecond := float64(perMinute) / 60
	r := o.paces.of(c.Owner, rate.Limit(perSecond), max(1, int(burst*perSecond))).ReserveN(now, 1)
	wait := r.DelayFrom(now)
	if wait == 0 {
		return nil
	}
	r.CancelAt(now)
	return &Later{After: wait, err: sandbox.Errorf(sandbox.ErrExhausted, "too_many_requests",
		"owner %s may send %d requests a minute: wait %d s, or have the bound raised with 'sandbox owner set %s --requests-per-minute N'", c.Owner, perMinute, seconds(wait), c.Owner)}
}

// of returns the limiter of an owner. There are as many as owners that were
// seen since the daemon began: those with keys, and users of this machine.
func (p *paces) of(owner string, perSecond rate.Limit, atOnce int) *rate.Limiter {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.all == nil {
		p.all = map[string]*rate.Limiter{}
	}
	l := p.all[owner]
	if l == nil || l.Limit() != perSecond {
		l = rate.NewLimiter(perSecond, atOnce)
		p.all[owner] = l
	}
	return l
}

// have reports whether an owner that has a pace called since the daemon began.
func (p *paces) have(owner string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all[owner] != nil
}

// Bounds of refusals that an owner is answered at once.
const (
	refusalsNow  = 50
	refusalsRate = 10 // a second, beyond those
	longestHold  = time.Second
)

// HoldBack counts a refused request of an owner, and where there were many
// waits before its answer may begin: who repeats what is refused waits for it,
// and does not keep the daemon busy with it. Root and the daemon's own user are
// answered at once.
func (o *Office) HoldBack(ctx context.Context, c Caller) {
	if o.always(c.Owner) {
		return
	}
	r := o.refused.of(c.Owner, refusalsRate, refusalsNow).Reserve()
	wait := r.Delay()
	if wait > longestHold {
		r.Cancel() // later ones do not wait for it
		wait = longestHold
	}
	if wait == 0 {
		return
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// Bounds of wrong keys from one address.
const (
	failuresAtOnce = 20
	failureEvery   = 3 * time.Second
	mostAddresses  = 4096
)

// failures remembers which addresses sent wrong keys. A good key is taken
// from all of them: people share addresses.
type failures struct {
	mu  sync.Mutex
	all map[netip.Prefix]*rate.Limiter
}

// add counts a failure and returns how long to wait; 0 where there were few.
func (f *failures) add(from string, now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.all == nil {
		f.all = map[netip.Prefix]*rate.Limiter{}
	}
	at := network(from)
	l := f.all[at]
	if l == nil {
		if len(f.all) >= mostAddresses {
			f.forget(now)
		}
		l = rate.NewLimiter(rate.Every(failureEvery), failuresAtOnce)
		f.all[at] = l
	}
	if l.AllowN(now, 1) {
		return 0
	}
	return failureEvery
}

// forget makes room: of those who have been quiet, else of anybody.
func (f *failures) forget(now time.Time) {
	for at, l := range f.all {
		if l.TokensAt(now) >= failuresAtOnce {
			delete(f.all, at)
		}
	}
	for at := range f.all {
		if len(f.all) < mostAddresses*3/4 { // not for each new one again
			return
		}
		delete(f.all, at)
	}
}

// network is what one client can choose its address from: an IPv4 address or
// an IPv6 /64.
func network(from string) netip.Prefix {
	var a netip.Addr
	if ap, err := netip.ParseAddrPort(from); err == nil {
		a = ap.Addr()
	} else if a, err = netip.ParseAddr(from); err != nil {
		return netip.Prefix{} // all unknown ones together
	}
	a = a.Unmap().WithZone("")
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
