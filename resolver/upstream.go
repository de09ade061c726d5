package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Times and sizes of asking upstream.
const (
	tryTimeout    = 2 * time.Second // one server, one transport
	totalTimeout  = 5 * time.Second // as long as the C library waits for its first try
	udpSize       = 1232            // fits the smallest IPv6 path unfragmented (DNS flag day 2020)
	downAfter     = 2               // failures in a row
	downFor       = 10 * time.Second
	healthForgets = 10 * time.Minute
	healthMost    = 4096
)

// errNoServer means that there is nobody to ask.
var errNoServer = errors.New("no resolver is configured, and the host's resolv.conf names none")

// upstreams asks servers and remembers which of them answer.
type upstreams struct {
	mu     sync.Mutex
	health map[netip.AddrPort]*health
	failed func() // is called for each failed try
}

// health is what is known of one server.
type health struct {
	failures  int
	downUntil time.Time
	used      time.Time
}

// order returns the servers, those that answer first.
func (u *upstreams) order(servers []netip.AddrPort, now time.Time) []netip.AddrPort {
	u.mu.Lock()
	defer u.mu.Unlock()
	var up, down []netip.AddrPort
	for _, s := range servers {
		if h := u.health[s]; h != nil && now.Before(h.downUntil) {
			down = append(down, s)
		} else {
			up = append(up, s)
		}
	}
	return append(up, down...)
}

// note remembers how a try went.
func (u *upstreams) note(server netip.AddrPort, ok bool, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if ok {
		delete(u.health, server)
		return
	}
	h := u.health[server]
	if h == nil {
		if len(u.health) >= healthMost {
			for s, old := range u.health {
				if now.Sub(old.used) > healthForgets || len(u.health) >= healthMost {
					delete(u.health, s)
				}
			}
		}
		h = &health{}
		u.health[server] = h
	}
	h.used = now
	if h.failures++; h.failures >= downAfter {
		h.downUntil = now.Add(downFor)
	}
}

// ask puts one question to the servers in turn until one of them knows: an
// answer, or that there is none. It keeps to the context's deadline.
func (u *upstreams) ask(ctx context.Context, servers []netip.AddrPort, name string, qtype uint16) (*dns.Msg, error) {
	if len(servers) == 0 {
		return nil, errNoServer
	}
	var errs []error
	for _, server := range u.order(servers, time.Now()) {
		if ctx.Err() != nil {
			errs = append(errs, ctx.Err())
			break
		}
		msg, err := try(ctx, server, name, qtype)
		u.note(server, err == nil, time.Now())
		if err == nil {
			if msg.Rcode == dns.RcodeSuccess || msg.Rcode == dns.RcodeNameError {
				return msg, nil
			}
			err = fmt.Errorf("answers %s", dns.RcodeToString[msg.Rcode])
		}
		u.failed()
		errs = append(errs, fmt.Errorf("ask %s: %w", server, err))
	}
	return nil, errors.Join(errs...)
}

// try asks one server, by UDP and, where the answer does not fit, by TCP. A
// server that does not know EDNS is asked without.
func try(ctx context.Context, server netip.AddrPort, name string, qtype uint16) (*dns.Msg, error) {
	msg, err := exchange(ctx, "udp", server, name, qtype, true)
	if err == nil && (msg.Rcode == dns.RcodeFormatError || msg.Rcode == dns.RcodeNotImplemented) {
		msg, err = exchange(ctx, "udp", server, name, qtype, false)
	}
	if err == nil && msg.Truncated {
		msg, err = exchange(ctx, "tcp", server, name, qtype, true)
	}
	return msg, err
}

// exchange sends a fresh question, with nothing of the sandbox's in it but the
// name and the type: no client subnet, no cookie. Port and id are random.
func exchange(ctx context.Context, network string, server netip.AddrPort, name string, qtype uint16, edns bool) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(name), qtype)
	client := dns.Client{Net: network, Timeout: tryTimeout, UDPSize: udpSize}
	if edns {
		q.SetEdns0(udpSize, false)
	}
	r, _, err := client.ExchangeContext(ctx, q, server.String())
	if err != nil {
		return nil, err
	}
	if !answers(r, q) {
		return nil, errors.New("what came back answers another question")
	}
	return r, nil
}

// answers reports whether r is a response to q.
func answers(r, q *dns.Msg) bool {
	return r.Response && r.Id == q.Id && r.Opcode == dns.OpcodeQuery && len(r.Question) == 1 &&
		r.Question[0].Qtype == q.Question[0].Qtype && r.Question[0].Qclass == q.Question[0].Qclass &&
		strings.EqualFold(r.Question[0].Name, q.Question[0].Name)
}
