package resolver

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/sandbox"
)

// client1 is the address of the sandbox that asks in these tests.
var client1 = netip.MustParseAddr("10.213.0.2")

const id1 = sandbox.ID("sbaaaaaaaaaaaa")

// pinned is one call of Pin.
type pinned struct {
	name  string
	addrs []netip.Addr
	ttl   time.Duration
}

// network is a network of sandboxes in memory.
type network struct {
	mu      sync.Mutex
	tenants map[netip.Addr]Tenant
	pins    []pinned
	refuse  error // of Pin
	discard bool  // do not remember pins
	pinHook func()
}

func (n *network) Tenant(addr netip.Addr) (Tenant, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t, ok := n.tenants[addr]
	return t, ok
}

func (n *network) Peer(id sandbox.ID, name string) (netip.Addr, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var group string
	for _, t := range n.tenants {
		if t.ID == id {
			group = t.Policy.Group
		}
	}
	for addr, t := range n.tenants {
		if group != "" && t.ID != id && t.Policy.Group == group && (t.Name == name || string(t.ID) == name) {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

func (n *network) Pin(_ context.Context, _ sandbox.ID, name string, addrs []netip.Addr, ttl time.Duration) error {
	if n.pinHook != nil {
		n.pinHook()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refuse != nil {
		return n.refuse
	}
	if !n.discard {
		n.pins = append(n.pins, pinned{name, addrs, ttl})
	}
	return nil
}

// set gives the asking sandbox a policy.
func (n *network) set(p sandbox.NetworkPolicy) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tenants[client1] = Tenant{ID: id1, Name: "asker", Policy: p}
}

func (n *network) pinnedNow() []pinned {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]pinned(nil), n.pins...)
}

// upstream is a name server on loopback that answers from a list of records.
type upstream struct {
	addr netip.AddrPort

	mu    sync.Mutex
	zone  map[string][]string // name and type -> records; none: the name does not exist
	asked map[string]int
	last  *dns.Msg
	hook  func(q dns.Question) // before the answer
	rcode int
}

// startUpstream answers until the test ends. Records are kept under their
// owner and type; an owner with other records only has an empty answer.
func startUpstream(t testing.TB, records ...string) *upstream {
	t.Helper()
	u := &upstream{zone: map[string][]string{}, asked: map[string]int{}}
	for _, text := range records {
		u.add(t, text)
	}
	udp, tcp, err := listen(netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	u.addr = netip.MustParseAddrPort(tcp.Addr().String())
	for _, s := range []*dns.Server{{PacketConn: udp}, {Listener: tcp}} {
		s.Handler = u
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { _ = s.ActivateAndServe() }()
		<-started
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return u
}

func (u *upstream) add(t testing.TB, text string) {
	t.Helper()
	rr, err := dns.NewRR(text)
	if err != nil || rr == nil {
		t.Fatalf("record %q: %v", text, err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	h := rr.Header()
	key := h.Name + dns.TypeToString[h.Rrtype]
	u.zone[key] = append(u.zone[key], text)
	u.zone[h.Name] = nil
}

func (u *upstream) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	q := req.Question[0]
	u.mu.Lock()
	hook := u.hook
	u.mu.Unlock()
	if hook != nil {
		hook(q)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.asked[q.Name+dns.TypeToString[q.Qtype]]++
	u.last = req.Copy()
	resp := new(dns.Msg)
	resp.SetReply(req)
	resp.Rcode = u.rcode
	name := q.Name
	for range 20 { // as a recursive server follows aliases
		for _, text := range u.zone[name+dns.TypeToString[q.Qtype]] {
			rr, _ := dns.NewRR(text)
			resp.Answer = append(resp.Answer, rr)
		}
		alias := u.zone[name+"CNAME"]
		if len(alias) == 0 || q.Qtype == dns.TypeCNAME {
			break
		}
		rr, _ := dns.NewRR(alias[0])
		resp.Answer = append(resp.Answer, rr)
		name = rr.(*dns.CNAME).Target
	}
	if _, exists := u.zone[name]; !exists && resp.Rcode == 0 {
		resp.Rcode = dns.RcodeNameError
	}
	if len(resp.Answer) == 0 && resp.Rcode != dns.RcodeServerFailure {
		soa, _ := dns.NewRR("example. 60 IN SOA ns.example. root.example. 1 2 3 4 20")
		resp.Ns = append(resp.Ns, soa)
	}
	if w.LocalAddr().Network() == "udp" {
		size := dns.MinMsgSize
		if opt := req.IsEdns0(); opt != nil {
			size = int(opt.UDPSize())
		}
		resp.Truncate(size)
	}
	_ = w.WriteMsg(resp)
}

func (u *upstream) count(key string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.asked[key]
}

// bench is a server under test, its sandboxes and its upstream.
type bench struct {
	*Server
	net    *network
	up     *upstream
	events chan NameEvent
}

func newBench(t testing.TB, p sandbox.NetworkPolicy, records ...string) *bench {
	t.Helper()
	b := &bench{net: &network{tenants: map[netip.Addr]Tenant{}}, up: startUpstream(t, records...), events: make(chan NameEvent, 1000)}
	b.net.set(p)
	b.Server = newServer(Config{
		Upstreams: []netip.AddrPort{b.up.addr}, Pool: netip.MustParsePrefix("10.213.0.0/16"), Sandboxes: b.net,
		Admit: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("127.0.0.0/8")},
		Tell: func(e NameEvent) {
			select {
			case b.events <- e:
			default:
			}
		},
	})
	b.reach.own = func() []netip.Addr { return []netip.Addr{netip.MustParseAddr("93.184.215.1")} }
	t.Cleanup(func() { _ = b.Close() })
	return b
}

// question is a message with EDNS.
func question(name string, qtype uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.SetEdns0(udpSize, false)
	return m
}

// get asks as the first sandbox.
func (b *bench) get(t *testing.T, name string, qtype uint16) *dns.Msg {
	t.Helper()
	r := b.respond(t.Context(), client1, question(name, qtype))
	if r == nil {
		t.Fatalf("%s: no response", name)
	}
	return r
}

// addrsOf returns the addresses in a response.
func addrsOf(m *dns.Msg) []string {
	out := []string{}
	for _, rr := range m.Answer {
		if a, ok := rr.(*dns.A); ok {
			out = append(out, net.IP(a.A).String())
		}
	}
	return out
}

// extended returns the extended error of a response.
func extended(m *dns.Msg) (code uint16, text string) {
	if opt := m.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return e.InfoCode, e.ExtraText
			}
		}
	}
	return 0, ""
}

func allow(rules ...string) sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: rules}
}

// answer makes it answer everything with one code.
func (u *upstream) answer(rcode int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.rcode = rcode
}

// before sets what happens before each answer.
func (u *upstream) before(hook func(dns.Question)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.hook = hook
}

// total is how many questions it was asked.
func (u *upstream) total() (n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, one := range u.asked {
		n += one
	}
	return n
}
