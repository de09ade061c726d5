package main

import (
	"net/netip"
	"strings"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/resolver"
	"github.com/sandboxd/sandboxd/runtime"
	"github.com/sandboxd/sandboxd/sandbox"
)

// newsDesk takes what the packages of the network tell of sandboxes to the
// manager, which is made after them. What comes before is not told.
type newsDesk struct {
	to  atomic.Pointer[runtime.Manager]
	far atomic.Pointer[runtime.Manager] // of production; nil until that is open
	own func(sandbox.ID) bool           // tells production's sandboxes
}

// tell never waits.
func (d *newsDesk) tell(n sandbox.NetworkNews) {
	m := d.to.Load()
	if far := d.far.Load(); far != nil && d.own(n.Sandbox) {
		m = far
	}
	if m != nil {
		m.NetworkNews(n)
	}
}

// toldAddrs is how many addresses of an answer are told.
const toldAddrs = 8

// nameNews tells a sandbox's questions on.
func nameNews(tell func(sandbox.NetworkNews)) func(resolver.NameEvent) {
	return func(e resolver.NameEvent) {
		n := sandbox.NetworkNews{
			Sandbox: e.Sandbox, Type: sandbox.EventNetName, Protocol: "dns", Dest: e.Name, Why: e.Rule, Addrs: e.Addrs,
			Detail: map[string]string{"verdict": string(e.Verdict), "type": e.Type},
		}
		if e.Verdict != resolver.Allowed {
			n.Why, n.Addrs = e.Reason, nil
			if e.Rule != "" {
				n.Detail["rule"] = e.Rule
			}
		}
		if len(n.Addrs) > 0 {
			n.Detail["addresses"] = addrWords(n.Addrs)
		}
		tell(n)
	}
}

func addrWords(addrs []netip.Addr) string {
	var words []string
	for _, a := range addrs[:min(len(addrs), toldAddrs)] {
		words = append(words, a.String())
	}
	return strings.Join(words, " ")
}
