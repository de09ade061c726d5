//go:build root

package netns

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// deniedWait is how long a probe that must not be answered waits; a permitted
// one answers in well under a millisecond, and every probe has its control.
// On a busy machine it may take longer: permittedWait is for what must succeed.
const deniedWait, permittedWait = 250 * time.Millisecond, 10 * time.Second

const insideEnv = "SANDBOXD_TEST_OWN_NETNS"

// TestMain runs every test in a network namespace of the test's own, so that
// the machine's firewall and interfaces stay as they are.
func TestMain(m *testing.M) {
	if os.Getenv(insideEnv) != "" || os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // or the death signal comes with the thread's end
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, "running the tests in a network namespace of their own:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// The test's world: the host (the namespace the tests run in) with one uplink,
// and one namespace that plays the whole internet and the private networks
// that a real host could reach beyond it.
const (
	hostAddr     = "93.184.216.1"
	internetAddr = "93.184.216.34"
	publicAddr   = "8.8.4.4"
	metadataAddr = "169.254.169.254"
	privateAddr  = "192.168.7.7"
	resolverAddr = "10.99.0.53"
	uplink       = "up0"
)

// beyond are the addresses a sandbox must not reach in any policy, though the
// host routes them all.
var beyond = []string{
	metadataAddr, privateAddr, resolverAddr, "10.0.0.1", "172.16.5.5", "172.31.255.254", "100.64.1.1", "100.127.255.254",
	"198.18.0.1", "192.0.0.9", "192.0.2.1", "198.51.100.1", "203.0.113.1", "169.254.1.1", "192.168.255.255",
}

type world struct {
	internet *os.File
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newNetNS makes an empty network namespace owned by the current user one.
func newNetNS(t testing.TB) *os.File {
	t.Helper()
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // thrown away with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- result{nil, err}
			return
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		done <- result{f, err}
	}()
	r := <-done
	must(t, r.err)
	t.Cleanup(func() { r.f.Close() })
	return r.f
}

// newWorld builds the uplink and the internet, and removes the uplink at the end.
func newWorld(t testing.TB) *world {
	t.Helper()
	testenv.Need(t, testenv.Root, testenv.Userns, testenv.NFT)
	if os.Getenv(insideEnv) == "" {
		t.Fatal("these tests change firewall and links: they run only in a network namespace of their own")
	}
	eventually(t, "the links of the test before gone with their namespaces", func() bool {
		links, err := listing(netlink.LinkList)
		must(t, err)
		return !slices.ContainsFunc(links, func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Name, linkPrefix) })
	})
	w := &world{internet: newNetNS(t)}
	lo, err := netlink.LinkByName("lo")
	must(t, err)
	must(t, netlink.LinkSetUp(lo))
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: uplink, TxQLen: -1}, PeerName: "net0", PeerTxQLen: -1, PeerNamespace: netlink.NsFd(int(w.internet.Fd()))}
	must(t, netlink.LinkAdd(pair))
	t.Cleanup(func() {
		if l, err := netlink.LinkByName(uplink); err == nil {
			must(t, netlink.LinkDel(l))
		}
	})
	addAddr(t, uplink, hostAddr+"/24")
	must(t, linux.InNetNS(w.internet, func() error {
		for _, a := range append([]string{publicAddr}, beyond...) {
			addAddr(t, "lo", a+"/32")
		}
		addAddr(t, "net0", internetAddr+"/24")
		for _, port := range []string{"80", "53"} {
			l, err := net.Listen("tcp4", "0.0.0.0:"+port)
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			go serveTCP(l)
		}
		for _, a := range append([]string{publicAddr, internetAddr}, beyond...) {
			for _, port := range []string{"53", "99"} {
				c, err := net.ListenPacket("udp4", a+":"+port)
				if err != nil {
					return err
				}
				t.Cleanup(func() { c.Close() })
				go serveUDP(c)
			}
		}
		return nil
	}))
	must(t, netlink.RouteAdd(&netlink.Route{LinkIndex: linkIndex(t, uplink), Gw: net.ParseIP(internetAddr)}))
	eventually(t, "the uplink up", func() bool {
		l, err := netlink.LinkByName(uplink)
		must(t, err)
		return l.Attrs().OperState == netlink.OperUp
	})
	return w
}

// serveTCP tells each caller its own address as seen from here.
func serveTCP(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			fmt.Fprintln(c, c.RemoteAddr())
			// Rules that change meanwhile may swallow the other's end.
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			_, _ = io.Copy(io.Discard, c)
			resetOnClose(c)
		}()
	}
}

// resetOnClose keeps a closed connection from lingering in its namespace.
func resetOnClose(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}

// serveUDP echoes, and answers "?" with the caller's address.
func serveUDP(c net.PacketConn) {
	buf := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		answer := buf[:n]
		if string(answer) == "?" {
			answer = []byte(from.String())
		}
		_, _ = c.WriteTo(answer, from)
	}
}

func linkIndex(t testing.TB, name string) int {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must(t, err)
	return l.Attrs().Index
}

func addAddr(t testing.TB, link, cidr string) {
	t.Helper()
	l, err := netlink.LinkByName(link)
	must(t, err)
	must(t, netlink.LinkSetUp(l))
	a, err := netlink.ParseAddr(cidr)
	must(t, err)
	must(t, netlink.AddrReplace(l, a))
}

// box is a sandbox's network namespace as production makes it: inside a user
// namespace of its own, held by a process.
type box struct {
	Attachment
	cmd *exec.Cmd
}

func newBox(t testing.TB, slot int, mode sandbox.NetworkMode) *box {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	base := 0x20000000 + slot*65536
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: ids, GidMappings: ids,
	}
	must(t, cmd.Start())
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
	must(t, err)
	b := &box{cmd: cmd, Attachment: Attachment{ID: sandbox.NewID(), Slot: slot, NetNS: ns, Policy: sandbox.NetworkPolicy{Mode: mode}}}
	t.Cleanup(b.kill)
	return b
}

// kill ends the namespace's last user.
func (b *box) kill() {
	if b.NetNS == nil {
		return
	}
	b.NetNS.Close()
	b.NetNS = nil
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait()
}

// dial connects from ns and returns what the other side said within wait.
func dial(ns *os.File, network, addr string, wait time.Duration) (string, error) {
	var said string
	err := linux.InNetNS(ns, func() error {
		c, err := (&net.Dialer{Timeout: wait}).Dial(network, addr)
		if err != nil {
			return err
		}
		defer c.Close()
		resetOnClose(c)
		if strings.HasPrefix(network, "udp") {
			if _, err := c.Write([]byte("?")); err != nil {
				return err
			}
		}
		if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		buf := make([]byte, 200)
		n, err := c.Read(buf)
		said = strings.TrimSpace(string(buf[:n]))
		return err
	})
	return said, err
}

func reaches(t testing.TB, b *box, network, addr string) string {
	t.Helper()
	said, err := dial(b.NetNS, network, addr, 5*time.Second)
	if err != nil {
		t.Errorf("%s %s from the sandbox: %v; want an answer", network, addr, err)
	}
	return said
}

func denied(t testing.TB, b *box, network, addr string) {
	t.Helper()
	if said, err := dial(b.NetNS, network, addr, deniedWait); err == nil {
		t.Errorf("%s %s from the sandbox answered %q; want it denied", network, addr, said)
	}
}

// openHost opens a Host and removes at the end what it leaves by design.
func openHost(t testing.TB, cfg Config) *Host {
	t.Helper()
	if testing.Verbose() {
		cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	h, err := Open(t.Context(), cfg)
	must(t, err)
	t.Cleanup(func() {
		flush(t, h, func() { h.table.conn.DelTable(kernelTable()) })
		must(t, h.Close())
	})
	return h
}

// flush does something to the table that Host never does.
func flush(t testing.TB, h *Host, queue func()) {
	t.Helper()
	h.table.mu.Lock()
	defer h.table.mu.Unlock()
	queue()
	must(t, h.table.conn.Flush())
}

func attach(t testing.TB, h *Host, b *box) netip.Addr {
	t.Helper()
	must(t, h.Attach(t.Context(), b.Attachment))
	a, err := h.Address(b.Slot)
	must(t, err)
	return a
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !ok(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
	}
}

func readSysctl(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	must(t, err)
	return strings.TrimSpace(string(b))
}
