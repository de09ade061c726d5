//go:build root

package integration

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"
)

// zones is the name server the daemon asks: authoritative for whatever the
// tests need, and hostile.
type zones struct {
	mu      sync.Mutex
	asked   map[string]int // by name and type, as they came
	records map[string]func(nth int) []string
}

// serveZones starts the name server on the internet.
func serveZones(t testing.TB, w *world, records map[string]func(nth int) []string) *zones {
	t.Helper()
	z := &zones{asked: map[string]int{}, records: records}
	err := w.internet.within(func() error {
		if err := run("ip", "addr", "add", resolverAddr+"/32", "dev", "lo"); err != nil {
			return err
		}
		udp, err := net.ListenPacket("udp4", resolverAddr+":53")
		if err != nil {
			return err
		}
		tcp, err := net.Listen("tcp4", resolverAddr+":53")
		if err != nil {
			return errors.Join(err, udp.Close())
		}
		for _, s := range []*dns.Server{{PacketConn: udp, Handler: z}, {Listener: tcp, Handler: z}} {
			started := make(chan struct{})
			s.NotifyStartedFunc = func() { close(started) }
			go func() { _ = s.ActivateAndServe() }()
			<-started
			t.Cleanup(func() { _ = s.Shutdown() })
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return z
}

// ServeDNS answers from the records. A CNAME's target is left to the asker.
func (z *zones) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(req)
	m.Authoritative = true
	q := req.Question[0]
	name := strings.ToLower(strings.TrimSuffix(q.Name, "."))
	z.mu.Lock()
	z.asked[q.Name+" "+dns.TypeToString[q.Qtype]]++
	nth := z.asked[q.Name+" "+dns.TypeToString[q.Qtype]]
	find := z.records[name]
	if _, parent, ok := strings.Cut(name, "."); find == nil && ok {
		find = z.records["*."+parent]
	}
	z.mu.Unlock()
	if find == nil {
		m.Rcode = dns.RcodeNameError
		_ = w.WriteMsg(m)
		return
	}
	for _, line := range find(nth) {
		rr, err := dns.NewRR(fmt.Sprintf("%s %s", q.Name, line))
		if err != nil {
			panic(err)
		}
		if rr.Header().Rrtype == q.Qtype || rr.Header().Rrtype == dns.TypeCNAME {
			m.Answer = append(m.Answer, rr)
		}
	}
	if _, udp := w.RemoteAddr().(*net.UDPAddr); udp {
		size := 512
		if opt := req.IsEdns0(); opt != nil {
			size = int(opt.UDPSize())
		}
		m.Truncate(size)
	}
	_ = w.WriteMsg(m)
}

// heard tells how often something was asked for whose name contains a part.
func (z *zones) heard(part string) (n int) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for name, times := range z.asked {
		if strings.Contains(strings.ToLower(name), part) {
			n += times
		}
	}
	return n
}

// always answers with the same records.
func always(lines ...string) func(int) []string { return func(int) []string { return lines } }
