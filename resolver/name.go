package resolver

import (
	"net/netip"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// normalize returns a name of the wire, as the dns library presents it, in the
// form rules are written in. It refuses names with anything else in their
// labels than letters, digits, hyphens and underscores: what is escaped could
// look like another name to a rule than to a server. IDNA names pass in their
// ASCII form, the only one that is on the wire.
func normalize(wire string) (string, bool) {
	if strings.ContainsAny(wire, `\*`) {
		return "", false
	}
	name, err := sandbox.NormalizeDomain(wire)
	if err != nil || strings.HasSuffix(name, ".") {
		return "", false
	}
	return name, true
}

// place is where in the tree of names a name stands.
type place int

const (
	public    place = iota // asked upstream
	loopback               // this machine, whoever asks (RFC 6761, 6.3)
	reverse                // of an address, judged by that address
	peers                  // a single label or below internal: the group's, never asked upstream
	nowhere                // exists for nobody (RFC 6761, 6762, 7686, 8375, 9476)
	withdrawn              // public, but it must not exist here
)

// nowhereZones never go upstream: they mean nothing outside a home, a link or
// another protocol, and asking would show the world what a sandbox looks for.
var nowhereZones = []string{"local", "invalid", "onion", "alt", "home.arpa", "ip6.arpa", "resolver.arpa"}

// canary tells browsers, by not existing, to keep using this resolver instead
// of one over HTTPS.
const canary = "use-application-dns.net"

// internalZone is for private use (reserved by ICANN in 2024); groups use it.
const internalZone = "internal"

// placeOf classifies a normalised name.
func placeOf(name string) place {
	switch {
	case within(name, "localhost"):
		return loopback
	case within(name, canary):
		return withdrawn
	case within(name, "in-addr.arpa"):
		return reverse
	case within(name, internalZone):
		return peers
	}
	for _, zone := range nowhereZones {
		if within(name, zone) {
			return nowhere
		}
	}
	dot := strings.LastIndexByte(name, '.')
	switch {
	case strings.Trim(name[dot+1:], "0123456789") == "": // an address, or part of one
		return nowhere
	case dot < 0:
		return peers
	}
	return public
}

// within reports whether name is zone or lies below it.
func within(name, zone string) bool {
	return name == zone || (strings.HasSuffix(name, zone) && name[len(name)-len(zone)-1] == '.')
}

// reverseAddr returns the address whose reverse name this is; invalid for
// zones above one address.
func reverseAddr(name string) netip.Addr {
	labels := strings.Split(strings.TrimSuffix(name, ".in-addr.arpa"), ".")
	if len(labels) != 4 {
		return netip.Addr{}
	}
	addr, err := netip.ParseAddr(labels[3] + "." + labels[2] + "." + labels[1] + "." + labels[0])
	if err != nil {
		return netip.Addr{}
	}
	return addr
}

// peerName returns the name by which a group's member may be meant: a single
// label, or what stands before ".GROUP.internal", as the owner says it or as it
// is kept. Never a public name, or a
// member could take it over.
func peerName(name, group string) (string, bool) {
	if group == "" {
		return "", false
	}
	if !strings.Contains(name, ".") {
		return name, true
	}
	for _, said := range []string{group, sandbox.Unmarked(group)} {
		if peer, ok := strings.CutSuffix(name, "."+said+"."+internalZone); ok && peer != "" {
			return peer, true
		}
	}
	return "", false
}
