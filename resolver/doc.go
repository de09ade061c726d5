// Package resolver is the domain name server of sandboxes: the only one they
// can ask. The daemon opens it on the address sandboxes route through; the
// rules of netns lead every question there and refuse port 53 anywhere else.
// The web gate looks names up here too, under the same rules.
//
// It does not decide which packets pass, holds no zones, validates no DNSSEC
// signatures, and gives no stale answers. What it knows of sandboxes it asks of
// an interface, by the source address of a question; netns drops forged ones
// before they arrive.
//
// # A question
//
//	packet ── who sends from this address? ─ nobody ──────────────► REFUSED
//	            │ rate, questions at one time ─ over ─────────────► REFUSED, beyond that silence
//	            │ form: one question, class IN, type we serve ────► FORMERR, NOTIMP, REFUSED
//	            │ name: labels of letters, digits, - and _ ───────► NXDOMAIN
//	            │ deny rules, allow rules, names of the group ────► NXDOMAIN, or the answer
//	            │ cache, upstreams, chain of CNAMEs ──────────────► SERVFAIL, NXDOMAIN, empty
//	            │ addresses that are not public fall out ─────────► NXDOMAIN if none is left
//	            │ is the policy still the same? ─ no ─────────────► once more
//	            │ Pin: the addresses open before anyone knows them
//	            ▼
//	          answer
//
// A name that policy forbids does not exist (NXDOMAIN): programs give up at
// once, where REFUSED makes the C library try again. Clients that speak EDNS
// are told the reason as an extended error (RFC 8914): Blocked and a sentence.
//
// # Rebinding
//
// Whoever owns a name decides what it stands for, so an answer is not to be
// trusted: private, loopback, link-local, multicast and reserved addresses, the
// pool of sandboxes and the host's own addresses are taken out of it, unless
// the operator admits the range and an allow rule names it as a prefix.
//
// A chain of CNAMEs is followed here. Its links need no allow rule, or no
// delivery network would work; one that a deny rule means, or that has no
// place in the public tree, breaks the chain.
//
// # Bounds
//
// All memory is bounded: the cache by bytes and entries, questions in work by
// sandbox and in total, TCP connections by sandbox and in total, and what is
// kept of each sandbox by a sweep of those that went quiet.
package resolver
