//go:build root

package escape

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Addresses that look public, in the tests' own network namespace: one on an
// interface of the host, one in a namespace beside it.
const (
	ownAddress    = "11.22.33.7"
	strangeOne    = "11.22.44.7"
	strangersGate = "11.22.44.1"
	routedOne     = "203.0.114.9" // the host's by a route alone (ip-route(8), local)
)

// beside is the namespace's name, which all of this machine see.
var beside = fmt.Sprintf("sandboxd-beside-%d", os.Getpid())

// TestOwnAddressIsNotDialed: nobody has the daemon call the host's own
// addresses, by whatever form of name or in whatever role.
func TestOwnAddressIsNotDialed(t *testing.T) {
	network(t)
	var hits, strange atomic.Int64
	port := serve(t, ownAddress+":0", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { hits.Add(1) }))
	serve(t, routedOne+":"+port, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { hits.Add(1) }))
	if resp, err := http.Get("http://" + routedOne + ":" + port); err != nil {
		t.Fatalf("the control: what the route leads to this host does not answer: %v", err)
	} else if resp.Body.Close(); hits.Swap(0) != 1 {
		t.Fatal("the control was not served")
	}
	far := serveIn(t, beside, strangeOne+":0", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		strange.Add(1)
		if strings.HasPrefix(r.URL.Path, "/v2/") { // a registry that names a token server
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s:%s/token",service="x"`, ownAddress, port))
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	hostName(t, ownAddress, "own.example.org")
	d := harness.Install(t, "")

	for _, host := range []string{ownAddress, "[::ffff:" + ownAddress + "]", "own.example.org", routedOne, "[::ffff:" + routedOne + "]"} {
		w, err := d.CreateWebhook(t.Context(), sandbox.WebhookRequest{URL: "http://" + host + ":" + port})
		if err == nil {
			var del sandbox.Delivery
			del, err = d.TestWebhook(t.Context(), w.ID)
			if err == nil && del.Status != 0 {
				t.Errorf("webhook to %s: %+v", host, del)
			}
		}
		t.Logf("webhook to %s: %v", host, err)
	}
	if n := hits.Swap(0); n != 0 {
		t.Errorf("webhooks called the host's own address %d times", n)
	}
	pull := func(host string) error {
		_, err := d.PullImage(t.Context(), sandbox.PullRequest{Reference: host + "/some/thing:1", PlainHTTP: true}, nil)
		return err
	}
	for _, host := range []string{ownAddress + ":" + port, routedOne + ":" + port, "own.example.org:" + port, strangeOne + ":" + far} {
		t.Logf("pull from %s: %v", host, pull(host))
	}
	if n := hits.Swap(0); n != 0 {
		t.Errorf("pulls called the host's own address %d times", n)
	}
	// Positive controls: a stranger's address is called, and the host's own
	// where the operator says so.
	if strange.Load() == 0 {
		t.Error("the registry beside was not asked")
	}
	strange.Store(0)
	w, err := d.CreateWebhook(t.Context(), sandbox.WebhookRequest{URL: "http://" + strangeOne + ":" + far})
	if err == nil {
		_, err = d.TestWebhook(t.Context(), w.ID)
	}
	if err != nil || strange.Load() == 0 {
		t.Errorf("a webhook beside got %d calls: %v", strange.Load(), err)
	}
	d.Shut() // one network namespace has one daemon
	open := harness.Install(t, fmt.Sprintf("webhooks: {allow_private: [%s/32]}\nregistries: {%q: {plain_http: true}}\n", ownAddress, ownAddress+":"+port))
	if w, err = open.CreateWebhook(t.Context(), sandbox.WebhookRequest{URL: "http://" + ownAddress + ":" + port}); err == nil {
		_, err = open.TestWebhook(t.Context(), w.ID)
	}
	if n := hits.Swap(0); err != nil || n == 0 {
		t.Errorf("a permitted webhook got %d calls: %v", n, err)
	}
	_, err = open.PullImage(t.Context(), sandbox.PullRequest{Reference: ownAddress + ":" + port + "/some/thing:1"}, nil)
	if hits.Load() == 0 {
		t.Errorf("a registry of the configuration was not asked: %v", err)
	}
}

// network gives the tests' namespace the addresses above.
func network(t *testing.T) {
	t.Helper()
	for _, line := range []string{
		"ip link add own0 type veth peer name own1", "ip addr add " + ownAddress + "/32 dev own0", "ip link set own0 up", "ip link set own1 up", "ip route add local 203.0.114.0/24 dev lo",
		"ip netns add " + beside, "ip link add beside0 type veth peer name eth0 netns " + beside,
		"ip addr add " + strangersGate + "/24 dev beside0", "ip link set beside0 up",
		"ip -n " + beside + " addr add " + strangeOne + "/24 dev eth0", "ip -n " + beside + " link set eth0 up", "ip -n " + beside + " route add default via " + strangersGate,
	} {
		words := strings.Fields(line)
		if err := harness.HostRun(words[0], words[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		_ = exec.Command("ip", "link", "del", "own0").Run()
		_ = exec.Command("ip", "link", "del", "beside0").Run()
		_ = exec.Command("ip", "netns", "del", beside).Run()
	})
}

func serve(t *testing.T, at string, h http.Handler) (port string) {
	t.Helper()
	ln, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h} //nolint:gosec // of a test
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	_, port, _ = net.SplitHostPort(ln.Addr().String())
	return port
}

// serveIn is serve in a network namespace.
func serveIn(t *testing.T, ns, at string, h http.Handler) string {
	t.Helper()
	got := make(chan string)
	go func() {
		defer close(got)
		runtime.LockOSThread() // and never unlocked: the thread ends there
		f, err := os.Open("/run/netns/" + ns)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		got <- serve(t, at, h)
	}()
	return <-got
}

// hostName makes a name known to this machine's resolver, in our mount
// namespace.
func hostName(t *testing.T, addr, name string) {
	t.Helper()
	b, err := os.ReadFile("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	f := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(f, append(b, []byte("\n"+addr+" "+name+"\n")...), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(f, "/etc/hosts", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount("/etc/hosts", unix.MNT_DETACH) })
}
