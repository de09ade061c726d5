//go:build root

package integration

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// nameServer is the internet's, at port 53 of this network namespace's
// loopback, where only the daemon can ask it.
type nameServer struct {
	mu    sync.Mutex
	zone  map[string]string // name -> record
	asked map[string]int
}

func startNameServer(t *testing.T, zone map[string]string) *nameServer {
	t.Helper()
	s := &nameServer{zone: zone, asked: map[string]int{}}
	conn, err := net.ListenPacket("udp4", "127.0.0.1:53")
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	server := &dns.Server{PacketConn: conn, Handler: s, NotifyStartedFunc: func() { close(started) }}
	go func() { _ = server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() { _ = server.Shutdown() })
	return s
}

func (s *nameServer) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	s.mu.Lock()
	defer s.mu.Unlock()
	resp := new(dns.Msg)
	resp.SetReply(req)
	q := req.Question[0]
	s.asked[q.Name]++
	name := q.Name
	for range 10 {
		text, exists := s.zone[name]
		if !exists {
			resp.Rcode = dns.RcodeNameError
			break
		}
		rr, err := dns.NewRR(name + " " + text)
		if err != nil {
			resp.Rcode = dns.RcodeServerFailure
			break
		}
		alias, isAlias := rr.(*dns.CNAME)
		if isAlias || rr.Header().Rrtype == q.Qtype {
			resp.Answer = append(resp.Answer, rr)
		}
		if !isAlias {
			break
		}
		name = alias.Target
	}
	_ = w.WriteMsg(resp)
}

func (s *nameServer) count(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[name]
}

const namesConfig = "network: {resolvers: [127.0.0.1]}\n"

// TestNames connects by name: what policy names is reached, what it does not
// name has no address, and an address is reached because of its name alone.
func TestNames(t *testing.T) {
	neighbours(t)
	internet := startNameServer(t, map[string]string{
		"www.example.com.": "0 IN A " + publicAddr, "alias.example.com.": "60 IN CNAME far.example.net.", "far.example.net.": "60 IN A " + publicAddr,
		"inside.example.com.": "60 IN A " + privateAddr, "meta.example.com.": "60 IN A " + metadataAddr, "host.example.com.": "60 IN A " + hostAddr,
		"me.example.com.": "60 IN A 127.0.0.1", "evil.example.com.": "60 IN A " + publicAddr, "detour.example.com.": "60 IN CNAME evil.example.com.",
		"www.example.org.": "60 IN A " + publicAddr,
	})
	d := install(t, namesConfig)
	narrow := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"*.example.com:8080"}, Deny: []string{"evil.example.com"}}
	d.create(t, sandbox.Spec{Name: "narrow", Network: narrow})
	d.create(t, sandbox.Spec{Name: "open", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	d.create(t, sandbox.Spec{Name: "off"})
	probes := map[string]string{}
	for _, name := range []string{"narrow", "open", "off"} {
		probes[name] = d.give(t, name)
	}
	dial := func(in, host string) string {
		t.Helper()
		target := "tcp/" + net.JoinHostPort(host, "8080")
		return d.inside(t, in, "root", probes[in], "dial", target)[target]
	}
	if got := dial("narrow", publicAddr); got == "ok" {
		t.Error("an address no rule names is open before anybody asked for its name")
	}
	for _, name := range []string{"www.example.com", "WWW.Example.COM.", "alias.example.com"} {
		if got := dial("narrow", name); got != "ok" {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got := dial("narrow", publicAddr); got != "ok" {
		t.Errorf("the address of a name that was answered: %s", got)
	}
	if got := dial("open", "www.example.org"); got != "ok" {
		t.Errorf("open: %s", got)
	}
	for in, names := range map[string][]string{
		"narrow": {"inside.example.com", "meta.example.com", "host.example.com", "me.example.com", "evil.example.com", "detour.example.com", "www.example.org", "nosuch.example.com"},
		"open":   {"inside.example.com", "meta.example.com", "host.example.com", "me.example.com", "nosuch.example.com", "single", "printer.local"},
		"off":    {"www.example.com"},
	} {
		for _, name := range names {
			if got := dial(in, name); got == "ok" || (in != "off" && !strings.Contains(got, "no such host")) || strings.Contains(got, "timeout") {
				t.Errorf("%s: %s: %s", in, name, got)
			}
		}
	}
	for _, name := range []string{"evil.example.com.", "single.", "printer.local."} {
		if n := internet.count(name); n != 0 {
			t.Errorf("%s was asked for upstream %d times", name, n)
		}
	}
	if internet.count("www.example.org.") == 0 {
		t.Error("control: what is permitted is asked for upstream")
	}
	// So it is over TCP.
	d.sh(t, "open", "echo 'options use-vc' >> /etc/resolv.conf")
	if got := dial("open", "www.example.com"); got != "ok" {
		t.Errorf("asking by TCP: %s", got)
	}
	if got := dial("open", "inside.example.com"); !strings.Contains(got, "no such host") {
		t.Errorf("asking by TCP for a private address: %s", got)
	}
	// The C library agrees, and gives up at once.
	if got := d.sh(t, "narrow", "getent ahostsv4 www.example.com | head -1"); !strings.HasPrefix(got, publicAddr) {
		t.Errorf("getent: %q", got)
	}
	if got := d.sh(t, "narrow", "getent ahostsv4 www.example.org; echo $?"); got != "2" {
		t.Errorf("getent of a denied name: %q", got)
	}
}

// TestNamesSurvive: what was answered stays open while the daemon is away, and
// names are answered again after it is back; a change of policy is at once one
// of names.
func TestNamesSurvive(t *testing.T) {
	neighbours(t)
	startNameServer(t, map[string]string{"www.example.com.": "60 IN A " + publicAddr})
	d := install(t, namesConfig)
	narrow := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"www.example.com:8080"}}
	d.create(t, sandbox.Spec{Name: "narrow", Network: narrow})
	probe := d.give(t, "narrow")
	dial := func(host string) string {
		t.Helper()
		target := "tcp/" + net.JoinHostPort(host, "8080")
		return d.inside(t, "narrow", "root", probe, "dial", target)[target]
	}
	if got := dial("www.example.com"); got != "ok" {
		t.Fatal(got)
	}
	d.kill()
	d.start()
	for _, host := range []string{publicAddr, "www.example.com"} {
		if got := dial(host); got != "ok" {
			t.Errorf("after the daemon's crash: %s: %s", host, got)
		}
	}
	if _, err := d.SetNetwork(t.Context(), "narrow", sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"www.example.org"}}); err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{publicAddr, "www.example.com"} {
		if got := dial(host); got == "ok" {
			t.Errorf("after the policy changed: %s is reached", host)
		}
	}
	if _, err := d.SetNetwork(t.Context(), "narrow", narrow); err != nil {
		t.Fatal(err)
	}
	if got := dial("www.example.com"); got != "ok" {
		t.Errorf("after it changed back: %s", got)
	}
	// The audit has it.
	testenv.Eventually(t, 10*time.Second, "the refused name is in the events", func() bool {
		events, _, err := d.Events(t.Context(), client.EventQuery{Sandbox: "narrow", Limit: 500})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			if e.Type == sandbox.EventNetName && e.Data["dest"] == "www.example.com" && e.Data["verdict"] == "denied" {
				return true
			}
		}
		return false
	})
}

// TestNamesUnderFlood: a sandbox that asks without end is answered and passed
// on at its rate; others are answered as before, and the daemon does not grow.
func TestNamesUnderFlood(t *testing.T) {
	neighbours(t)
	internet := startNameServer(t, map[string]string{"www.example.com.": "0 IN A " + publicAddr})
	d := install(t, namesConfig)
	policy := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllow, Allow: []string{"*.example.com:8080"}}
	d.create(t, sandbox.Spec{Name: "noisy", Network: policy})
	d.create(t, sandbox.Spec{Name: "quiet", Network: policy})
	noisy, quiet := d.give(t, "noisy"), d.give(t, "quiet")
	before := residentMiB(t, d.PID())
	const seconds = 5
	began := time.Now()
	flood := make(chan outcomes)
	go func() {
		flood <- d.inside(t, "noisy", "root", noisy, "ask", "flood.example.com", strconv.Itoa(seconds))
	}()
	testenv.Eventually(t, 10*time.Second, "the flood has begun", func() bool { return internet.total() > 100 })
	const target = "tcp/www.example.com:8080"
	var lost []string // a flood may crowd out a packet of another's on its way through the kernel
	for range 10 {
		if got := d.inside(t, "quiet", "root", quiet, "dial", target)[target]; got != "ok" {
			lost = append(lost, got)
		}
	}
	if len(lost) > 2 {
		t.Errorf("another sandbox, meanwhile, was not answered %d times of 10: %q", len(lost), lost)
	}
	sent, err := strconv.Atoi((<-flood)["sent"])
	took := time.Since(began)
	passed := internet.total()
	t.Logf("%d questions sent in %s, %d passed on; the daemon holds %d MiB, before %d", sent, took, passed, residentMiB(t, d.PID()), before)
	if most := 300 + int(100*(took.Seconds()+1)); err != nil || sent < 5*most || passed > most {
		t.Errorf("of %d questions %d were passed on (%v), want at most %d", sent, passed, err, most)
	}
	// All share the resolver's socket: what is too much ends in the kernel.
	spared := uint64(2000 + int(1000*(took.Seconds()+1)))
	if refused := d.usage(t, "noisy").NetDropped; refused+spared < uint64(sent) {
		t.Errorf("of %d questions the kernel refused %d, want all but %d", sent, refused, spared)
	}
	if refused := d.usage(t, "quiet").NetDropped; refused != 0 {
		t.Errorf("the quiet one was refused %d packets", refused)
	}
	if now := residentMiB(t, d.PID()); now > before+64 {
		t.Errorf("the daemon grew from %d to %d MiB", before, now)
	}
	// The one that was refused is answered again once it is calm.
	testenv.Eventually(t, 10*time.Second, "the noisy one is answered again", func() bool {
		return d.inside(t, "noisy", "root", noisy, "dial", target)[target] == "ok"
	})
}

// residentMiB is what a process holds of memory.
func residentMiB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(b))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize() >> 20
}

// total is how many questions it was asked.
func (s *nameServer) total() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.asked {
		n += one
	}
	return n
}
