//go:build root

package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

type nameQuestion struct {
	ID     int      `json:"id"`
	Labels [][]byte `json:"labels"`
	Type   uint16   `json:"type"`
	Class  uint16   `json:"class,omitempty"`
	TCP    bool     `json:"tcp,omitempty"`
	Opcode uint8    `json:"opcode,omitempty"`
}

type nameReply struct {
	ID      int          `json:"id"`
	Rcode   int          `json:"rcode"`
	Answers int          `json:"answers"`
	Addrs   []netip.Addr `json:"addrs"`
	TC      bool         `json:"tc"`
	Error   string       `json:"error"`
}

// asking makes a question of a dotted name.
func asking(name string, kind uint16) nameQuestion {
	q := nameQuestion{Type: kind}
	for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
		q.Labels = append(q.Labels, []byte(label))
	}
	return q
}

// ask asks name servers from inside.
func (d *daemon) ask(t testing.TB, ref, probe, server string, list ...nameQuestion) []nameReply {
	t.Helper()
	for i := range list {
		list[i].ID = i
	}
	b, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Files(ref).Write(t.Context(), "root", "/tmp/names.json", 0o644, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	r := d.exec(t, ref, probe, "names", server, "/tmp/names.json")
	var out []nameReply
	if err := json.Unmarshal([]byte(r.stdout), &out); err != nil || len(out) != len(list) {
		t.Fatalf("the probe: %v\n%.300s%s", err, r.stdout, r.stderr)
	}
	return out
}

// hostile is what the name server of the tests says.
var hostile = map[string]func(int) []string{
	"ok.example.com":               always("60 A 151.101.1.69"),
	"*.wild.example.com":           always("60 A 185.199.108.153"),
	"wild.example.com":             always("60 A 185.199.108.153"),
	"chain.example.com":            always("60 CNAME one.cdn.net"),
	"one.cdn.net":                  always("60 CNAME two.cdn.net"),
	"two.cdn.net":                  always("60 A 142.250.74.36"),
	"badchain.example.com":         always("60 CNAME x.evil.org"),
	"x.evil.org":                   always("60 A 104.16.132.229"),
	"loop.example.com":             always("60 CNAME loop2.example.com"),
	"loop2.example.com":            always("60 CNAME loop.example.com"),
	"self.example.com":             always("60 CNAME self.example.com"),
	"inner.example.com":            always("60 CNAME printer.local"),
	"zero.example.com":             always("0 A 93.184.216.34"),
	"lan.example.com":              always("60 A 10.77.0.5"),
	"lan6.example.com":             always("60 A 10.77.0.6"),
	"mapped.example.com":           always("60 AAAA ::ffff:10.9.8.7", "60 AAAA 2606:2800:220::fe"),
	"mixed.example.com":            always("60 A 10.9.8.7", "60 A 8.8.4.4", "60 A 169.254.169.254"),
	"xn--bcher-kva.example.com":    always("60 A 151.101.65.69"),
	"text.example.com":             always(`60 TXT "hello"`),
	"other.example.com":            always("60 A 1.1.1.1"),
	"flip.example.com":             flipping,
	"big.example.com":              manyAddrs,
	"4.4.8.8.in-addr.arpa":         always("60 PTR dns.google."),
	"5.0.77.10.in-addr.arpa":       always("60 PTR lan.example.com."),
	"254.169.254.169.in-addr.arpa": always("60 PTR metadata."),
}

// rebinds are addresses that no name may stand for.
var rebinds = []string{
	"127.0.0.1", "127.1.2.3", "0.0.0.0", "10.9.8.7", "10.77.0.6", "10.213.0.1", "10.213.0.2", uplinkAddr, lanHostAddr, "169.254.169.254",
	"172.16.5.5", "192.168.7.7", "100.64.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "20.205.243.166",
}

// flipping is public at first and private from then on.
func flipping(nth int) []string {
	if nth == 1 {
		return []string{"0 A 8.8.4.4"}
	}
	return []string{"0 A 169.254.169.254"}
}

// manyAddrs does not fit into a datagram.
func manyAddrs(int) (lines []string) {
	for i := range 120 {
		lines = append(lines, fmt.Sprintf("60 A 44.0.%d.%d", i/100, 1+i%100))
	}
	return lines
}

// named is the policy of the tests of names.
var named = sandbox.NetworkPolicy{
	Mode: sandbox.NetworkAllow,
	Allow: []string{
		"ok.example.com:443", "*.wild.example.com", "chain.example.com:80/tcp", "badchain.example.com", "loop.example.com", "self.example.com",
		"inner.example.com", "zero.example.com", "lan.example.com:80", "lan6.example.com:80", "10.77.0.5:80", "mapped.example.com", "mixed.example.com",
		"xn--bcher-kva.example.com", "text.example.com", "flip.example.com", "big.example.com", "rebind.example.com", "*.rebind.example.com",
	},
	Deny: []string{"no.wild.example.com", "*.evil.org"},
}

// TestNetworkNames asks a hostile name server, through the daemon's, from
// inside, and goes where the answers lead.
func TestNetworkNames(t *testing.T) {
	w := newWorld(t)
	for i, a := range rebinds {
		hostile[fmt.Sprintf("r%d.rebind.example.com", i)] = always("60 A " + a)
	}
	z := serveZones(t, w, hostile)
	d := install(t, networkConfig)
	d.create(t, sandbox.Spec{Name: "s", Network: named})
	probe := d.give(t, "s")
	const server = gatewayAddr + ":53"

	if got := d.sh(t, "s", "grep -c ^nameserver /etc/resolv.conf; grep -o "+gatewayAddr+" /etc/resolv.conf"); got != "1\n"+gatewayAddr {
		t.Errorf("resolv.conf inside names %q", got)
	}
	// Before the question the address is nobody's.
	d.reaches(t, "s", probe, "tcp", "151.101.1.69:443", false)

	d.wantAddrs(t, "s", probe, server, map[string]string{
		"ok.example.com": "151.101.1.69", "OK.exAMple.COM": "151.101.1.69", "ok.example.com.": "151.101.1.69",
		"a.wild.example.com": "185.199.108.153", "a.b.wild.example.com": "", "wild.example.com": "", "no.wild.example.com": "",
		"chain.example.com": "142.250.74.36", "one.cdn.net": "", "two.cdn.net": "",
		"badchain.example.com": "", "x.evil.org": "", "loop.example.com": "", "self.example.com": "", "inner.example.com": "",
		"zero.example.com": "93.184.216.34", "lan.example.com": "10.77.0.5", "lan6.example.com": "", "mixed.example.com": "8.8.4.4",
		"xn--bcher-kva.example.com": "151.101.65.69", "b\xc3\xbccher.example.com": "", "other.example.com": "", "text.example.com": "",
		"okk.example.com": "", "ok.example.com.evil.org": "", "okaexample.com": "", "localhost.example.com": "", "metadata": "", "printer.local": "",
		"nothing.internal": "", "victim": "",
	})
	for i, a := range rebinds {
		d.wantAddrs(t, "s", probe, server, map[string]string{fmt.Sprintf("r%d.rebind.example.com", i): ""})
		if t.Failed() {
			t.Logf("while it stands for %s", a)
			break
		}
	}
	// Where the answers lead, by the ports of their rules, and nowhere else. Asked
	// again, since an answer opens its address for half a minute or a minute.
	d.wantAddrs(t, "s", probe, server, map[string]string{"zero.example.com": "93.184.216.34"})
	d.reaches(t, "s", probe, "tcp", "93.184.216.34:5000", true)
	d.wantAddrs(t, "s", probe, server, map[string]string{
		"ok.example.com": "151.101.1.69", "a.wild.example.com": "185.199.108.153", "chain.example.com": "142.250.74.36",
		"lan.example.com": "10.77.0.5", "mixed.example.com": "8.8.4.4",
	})
	for to, may := range map[string]bool{
		"tcp 151.101.1.69:443": true, "udp 151.101.1.69:443": true, "tcp 151.101.1.69:80": false, "icmp 151.101.1.69:0": false,
		"tcp 185.199.108.153:22": true, "icmp 185.199.108.153:0": true, "tcp 142.250.74.36:80": true, "udp 142.250.74.36:80": false,
		"tcp 10.77.0.5:80": true, "tcp 10.77.0.5:81": false, "tcp 10.77.0.6:80": false,
		"tcp 8.8.4.4:80": true, "tcp 10.9.8.7:80": false, "tcp 169.254.169.254:80": false, "tcp 104.16.132.229:80": false, "tcp 1.1.1.1:443": false,
		"tcp 93.184.216.34:53": false, "udp 93.184.216.34:53": false, "tcp 93.184.216.34:853": false,
	} {
		proto, addr, _ := strings.Cut(to, " ")
		d.reaches(t, "s", probe, proto, addr, may)
	}
	d.oddQuestions(t, "s", probe, server)
	for range 3 {
		for _, r := range d.ask(t, "s", probe, server, asking("flip.example.com", dns.TypeA)) {
			for _, a := range r.Addrs {
				if a.String() != "8.8.4.4" {
					t.Errorf("a name that flips led to %s", a)
				}
			}
		}
	}
	d.reaches(t, "s", probe, "tcp", "169.254.169.254:80", false)
	d.tunnels(t, "s", probe, server, z)
	d.namesLive(t, probe, server)
}

// reaches makes one attempt and wants it to end as said.
func (d *daemon) reaches(t testing.TB, ref, probe, proto, to string, may bool) {
	t.Helper()
	got := d.attempts(t, ref, probe, []netAttempt{{ID: 1, Proto: proto, To: netip.MustParseAddrPort(to)}}, may)
	if o := got[1].Outcome; (o == "ok") != may {
		t.Errorf("%s %s: %s; permitted: %v", proto, to, o, may)
	}
}

// wantAddrs asks for names by UDP and TCP and wants one address, or none.
func (d *daemon) wantAddrs(t testing.TB, ref, probe, server string, want map[string]string) {
	t.Helper()
	var list []nameQuestion
	var names []string
	for name := range want {
		for _, tcp := range []bool{false, true} {
			q := asking(name, dns.TypeA)
			q.TCP = tcp
			list, names = append(list, q), append(names, name)
		}
	}
	for i, r := range d.ask(t, ref, probe, server, list...) {
		var addrs []string
		for _, a := range r.Addrs {
			addrs = append(addrs, a.String())
		}
		if got := strings.Join(addrs, " "); got != want[names[i]] || r.Rcode < 0 {
			t.Errorf("%q: %q, code %d %s; want %q", names[i], got, r.Rcode, r.Error, want[names[i]])
		}
	}
}

// oddQuestions are those that get no address, whatever the name.
func (d *daemon) oddQuestions(t testing.TB, ref, probe, server string) {
	t.Helper()
	with := func(name string, change func(*nameQuestion)) nameQuestion {
		q := asking(name, dns.TypeA)
		change(&q)
		return q
	}
	odd := map[string]nameQuestion{
		"AAAA":            asking("ok.example.com", dns.TypeAAAA),
		"mapped AAAA":     asking("mapped.example.com", dns.TypeAAAA),
		"ANY":             asking("ok.example.com", dns.TypeANY),
		"AXFR":            with("example.com", func(q *nameQuestion) { q.Type, q.TCP = dns.TypeAXFR, true }),
		"class CH":        with("ok.example.com", func(q *nameQuestion) { q.Class = dns.ClassCHAOS }),
		"class ANY":       with("ok.example.com", func(q *nameQuestion) { q.Class = dns.ClassANY }),
		"NOTIFY":          with("ok.example.com", func(q *nameQuestion) { q.Opcode = dns.OpcodeNotify }),
		"UPDATE":          with("ok.example.com", func(q *nameQuestion) { q.Opcode = dns.OpcodeUpdate }),
		"dot in a label":  with("x", func(q *nameQuestion) { q.Labels = [][]byte{[]byte("ok.example"), []byte("com")} }),
		"NUL in a label":  with("x", func(q *nameQuestion) { q.Labels = [][]byte{[]byte("ok\x00"), []byte("example"), []byte("com")} }),
		"escape":          with("x", func(q *nameQuestion) { q.Labels = [][]byte{[]byte(`o\107`), []byte("example"), []byte("com")} }),
		"space":           with("x", func(q *nameQuestion) { q.Labels = [][]byte{[]byte("ok "), []byte("example"), []byte("com")} }),
		"root":            with("x", func(q *nameQuestion) { q.Labels = nil }),
		"private PTR":     asking("5.0.77.10.in-addr.arpa", dns.TypePTR),
		"metadata PTR":    asking("254.169.254.169.in-addr.arpa", dns.TypePTR),
		"text, forbidden": asking("other.example.com", dns.TypeTXT),
	}
	for what, q := range odd {
		r := d.ask(t, ref, probe, server, q)[0]
		if len(r.Addrs) > 0 || r.Answers > 0 {
			t.Errorf("%s: %+v", what, r)
		}
	}
	if r := d.ask(t, ref, probe, server, asking("text.example.com", dns.TypeTXT))[0]; r.Answers != 1 {
		t.Errorf("a text that is permitted: %+v", r)
	}
	big := asking("big.example.com", dns.TypeA)
	bigTCP := big
	bigTCP.TCP = true
	r := d.ask(t, ref, probe, server, big, bigTCP)
	if !r[0].TC || len(r[1].Addrs) == 0 {
		t.Errorf("an answer too big for a datagram: %v addresses, truncated %v; by TCP %d", len(r[0].Addrs), r[0].TC, len(r[1].Addrs))
	}
	for _, a := range []netip.Addr{r[1].Addrs[0], r[1].Addrs[len(r[1].Addrs)-1]} {
		d.reaches(t, ref, probe, "tcp", a.String()+":80", true)
	}
}

// tunnels carries data out in names: it must not even be asked for.
func (d *daemon) tunnels(t testing.TB, ref, probe, server string, z *zones) {
	t.Helper()
	var list []nameQuestion
	for i := range 150 {
		list = append(list, asking(fmt.Sprintf("secret%d.leak.other.example.com", i), []uint16{dns.TypeTXT, dns.TypeA, dns.TypeNULL, dns.TypeCNAME, dns.TypeMX}[i%5]))
	}
	d.ask(t, ref, probe, server, list...)
	// And past the daemon's resolver: to the server itself, to others, over TLS's port.
	for _, other := range []string{resolverAddr + ":53", "8.8.4.4:53", "8.8.4.4:853", "10.77.0.5:53"} {
		for _, tcp := range []bool{false, true} {
			q := asking("secret.leak.ok.example.com", dns.TypeA)
			q.TCP = tcp
			if r := d.ask(t, ref, probe, other, q)[0]; r.Rcode >= 0 {
				t.Errorf("%s answered %+v", other, r)
			}
		}
	}
	if n := z.heard("leak."); n > 0 {
		t.Errorf("%d forbidden names arrived at the name server", n)
	}
	for _, name := range []string{"printer.local", "nothing.internal", "metadata", "victim", "x.evil.org", "other.example.com"} {
		if n := z.heard(name); n > 0 {
			t.Errorf("%s was asked for upstream %d times", name, n)
		}
	}
	if z.heard("ok.example.com") == 0 {
		t.Error("the control was not asked for")
	}
}

// namesLive changes the policy, kills the daemon and lends the address to
// another: what an answer opened is open for its sandbox alone, and only while
// the policy names it.
func (d *daemon) namesLive(t *testing.T, probe, server string) {
	t.Helper()
	const to = "151.101.1.69:443"
	d.create(t, sandbox.Spec{Name: "other", Network: named})
	d.give(t, "other")
	d.reaches(t, "other", probe, "tcp", to, false)
	d.wantAddrs(t, "s", probe, server, map[string]string{"ok.example.com": "151.101.1.69"})
	d.reaches(t, "s", probe, "tcp", to, true)
	d.kill()
	d.start()
	d.reaches(t, "s", probe, "tcp", to, true)
	d.wantAddrs(t, "other", probe, server, map[string]string{"ok.example.com": "151.101.1.69"})
	d.reaches(t, "other", probe, "tcp", to, true)
	less := named.Clone()
	less.Allow = slices.DeleteFunc(less.Allow, func(s string) bool { return strings.HasPrefix(s, "ok.") })
	d.setNetwork(t, "s", less)
	d.reaches(t, "s", probe, "tcp", to, false)
	d.reaches(t, "other", probe, "tcp", to, true)
	d.wantAddrs(t, "s", probe, server, map[string]string{"ok.example.com": "", "zero.example.com": "93.184.216.34"})
	d.setNetwork(t, "s", sandbox.NetworkPolicy{Mode: sandbox.NetworkOff})
	d.wantNothing(t, "s", probe, server)
	d.setNetwork(t, "s", sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Deny: []string{"other.example.com"}})
	d.wantAddrs(t, "s", probe, server, map[string]string{"ok.example.com": "151.101.1.69", "other.example.com": ""})
	testenv.Eventually(t, 5e9, "everything public is reached again", func() bool {
		return d.attempts(t, "s", probe, []netAttempt{{ID: 1, Proto: "tcp", To: netip.MustParseAddrPort(to)}}, true)[1].Outcome == "ok"
	})
}

// wantNothing wants every question to be refused, or not to be heard at all.
func (d *daemon) wantNothing(t testing.TB, ref, probe, server string) {
	t.Helper()
	for _, r := range d.ask(t, ref, probe, server, asking("ok.example.com", dns.TypeA), asking("zero.example.com", dns.TypeA)) {
		if len(r.Addrs) > 0 {
			t.Errorf("with the network off: %+v", r)
		}
	}
}
