package ingress

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// answering starts a server that reads to the end of the client's half and
// says back what it read.
func answering(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b, _ := io.ReadAll(c)
				_, _ = c.Write(b)
			}()
		}
	}()
	return ln.Addr().String()
}

func talk(t *testing.T, to netip.AddrPort, words string) (string, error) {
	t.Helper()
	c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(to))
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, words); err != nil {
		return "", err
	}
	if err := c.CloseWrite(); err != nil && !errors.Is(err, unix.ENOTCONN) { // reset meanwhile, which the reading tells
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

func TestPublish(t *testing.T) {
	h := newHouse("dev")
	h.servers[80] = answering(t)
	in := open(t, h)
	p, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 80}, "uid:0")
	if err != nil || p.HostPort == 0 || p.Address.String() != "127.0.0.1" || p.Protocol != "tcp" {
		t.Fatalf("%+v, %v", p, err)
	}
	if got, err := talk(t, p.Where(), "hello"); err != nil || got != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	_, err = in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 81, HostPort: p.HostPort}, "")
	if !errors.Is(err, sandbox.ErrConflict) || sandbox.CodeOf(err) != "port_taken" {
		t.Errorf("a port of the host twice: %v", err)
	}
	h.set("dev", sandbox.StatusStopped)
	if got, err := talk(t, p.Where(), "hello"); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("of a stopped sandbox: %q, %v, want a reset", got, err)
	}
	h.set("dev", sandbox.StatusRunning)
	if got, err := talk(t, p.Where(), "again"); err != nil || got != "again" {
		t.Errorf("after it was stopped: %q, %v", got, err)
	}
	in.Close()
	in = open(t, h) // the next daemon
	if got, err := talk(t, p.Where(), "hello"); err != nil || got != "hello" {
		t.Errorf("after a restart: %q, %v", got, err)
	}
	if _, err := in.Unpublish(t.Context(), p.ID, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := talk(t, p.Where(), "hello"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("unpublished: %v", err)
	}
	if _, err := in.Unpublish(t.Context(), p.ID, ""); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("unpublished twice: %v", err)
	}
}

// TestPublishThatComesToNothing: where the row cannot be written, or the
// sandbox ends meanwhile, nothing is listened for.
func TestPublishThatComesToNothing(t *testing.T) {
	h := newHouse("dev", "other")
	h.servers[80] = answering(t)
	in := open(t, h)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := addrOf(ln.Addr())
	ln.Close()
	refused := errors.New("refused")
	h.failPut = refused
	if _, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 80, HostPort: free.Port()}, ""); !errors.Is(err, refused) {
		t.Errorf("without a row: %v", err)
	}
	h.failPut = nil
	h.midPut = func() { in.Ended(h.sandboxes[0].ID) }
	if _, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 80, HostPort: free.Port()}, ""); sandbox.CodeOf(err) != "sandbox_ended" {
		t.Errorf("ended meanwhile: %v", err)
	}
	h.midPut = nil
	if all := in.list(""); len(all) != 0 {
		t.Errorf("listed: %+v", all)
	}
	p, err := in.Publish(t.Context(), "other", sandbox.PortRequest{Port: 80, HostPort: free.Port()}, "")
	if err != nil {
		t.Fatalf("the same port, to something: %v", err)
	}
	c, err := net.Dial("tcp", p.Where().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	in.Ended(h.sandboxes[1].ID)
	if _, err := net.Dial("tcp", p.Where().String()); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("of a sandbox that ended: %v", err)
	}
}

func TestTooManyPorts(t *testing.T) {
	in := open(t, newHouse("dev"))
	for i := range maxPortsEach + 1 {
		_, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 80}, "")
		if (i < maxPortsEach) != (err == nil) || err != nil && !errors.Is(err, sandbox.ErrExhausted) {
			t.Fatalf("port %d: %v", i+1, err)
		}
	}
}

// TestTooManyConnections: beyond the bound connections are reset, and there is
// room again once one is gone.
func TestTooManyConnections(t *testing.T) {
	h := newHouse("dev")
	h.servers[80] = answering(t)
	in := open(t, h)
	p, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: 80}, "")
	if err != nil {
		t.Fatal(err)
	}
	var held []net.Conn
	for range maxConnsEach {
		c, err := net.Dial("tcp", p.Where().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		held = append(held, c)
	}
	testenv.Eventually(t, 20*time.Second, "one too many is reset", func() bool {
		_, err := talk(t, p.Where(), "x")
		return errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE)
	})
	for _, c := range held[:10] {
		c.Close()
	}
	testenv.Eventually(t, 20*time.Second, "there is room again", func() bool {
		got, err := talk(t, p.Where(), "x")
		return err == nil && got == "x"
	})
}

// echoing starts a server that says datagrams back.
func echoing(t *testing.T) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(buf[:n], from)
		}
	}()
	return c.LocalAddr().String()
}

// TestPublishUDP: peers are told apart, and where nobody listens on the
// address of the sandbox its loopback is tried, with the datagram that was
// lost.
func TestPublishUDP(t *testing.T) {
	gone, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := gone.LocalAddr().String()
	gone.Close()
	h := newHouse("dev")
	h.udp[53] = map[bool]string{false: echoing(t), true: nobody}
	h.udp[54] = map[bool]string{false: nobody, true: echoing(t)}
	in := open(t, h)
	for _, port := range []uint16{53, 54} {
		p, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Port: port, Protocol: "udp"}, "")
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range []string{"a", "b", "c"} {
			c, err := net.Dial("udp", p.Where().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := io.WriteString(c, word); err != nil {
				t.Fatal(err)
			}
			if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 10)
			if n, err := c.Read(buf); err != nil || string(buf[:n]) != word {
				t.Errorf("port %d: %q, %v, want %q", port, buf[:n], err, word)
			}
		}
	}
}

// TestAnswersComeFromTheAddressAsked: on all addresses each client hears from
// the one it spoke to, and IPv4 is not IPv6.
func TestAnswersComeFromTheAddressAsked(t *testing.T) {
	h := newHouse("dev")
	h.udp[53] = map[bool]string{false: echoing(t)}
	h.servers[80] = answering(t)
	in := open(t, h)
	for at, clients := range map[string][]string{"0.0.0.0": {"127.0.0.1", "127.0.0.2", "127.1.2.3"}, "::": {"::1"}} {
		p, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Address: netip.MustParseAddr(at), Port: 53, Protocol: "udp"}, "")
		if err != nil {
			t.Fatal(err)
		}
		for _, to := range clients {
			c, err := net.Dial("udp", netip.AddrPortFrom(netip.MustParseAddr(to), p.HostPort).String()) // takes answers of that address alone
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := io.WriteString(c, to); err != nil {
				t.Fatal(err)
			}
			if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 50)
			if n, err := c.Read(buf); err != nil || string(buf[:n]) != to {
				t.Errorf("%s on %s: %q, %v", to, at, buf[:n], err)
			}
		}
	}
	p, err := in.Publish(t.Context(), "dev", sandbox.PortRequest{Address: netip.IPv4Unspecified(), Port: 80}, "")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := talk(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.9"), p.HostPort), "x"); err != nil || got != "x" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := talk(t, netip.AddrPortFrom(netip.IPv6Loopback(), p.HostPort), "x"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("0.0.0.0 listens on IPv6: %v", err)
	}
}

func FuzzLocalOf(f *testing.F) {
	f.Add(comeFrom(netip.MustParseAddr("192.0.2.1")))
	f.Add(comeFrom(netip.MustParseAddr("2001:db8::1")))
	f.Fuzz(func(t *testing.T, b []byte) {
		if a := localOf(b); a.IsValid() && localOf(comeFrom(a)) != a {
			t.Errorf("%x: %s", b, a)
		}
	})
}

// TestEndDuringStart: of a sandbox that ends while its ports are taken up
// again, none stays.
func TestEndDuringStart(t *testing.T) {
	h := newHouse("dev", "other")
	first := open(t, h)
	for _, name := range []string{"dev", "other"} {
		if _, err := first.Publish(t.Context(), name, sandbox.PortRequest{Port: 80}, ""); err != nil {
			t.Fatal(err)
		}
		if _, err := first.NewToken(t.Context(), name, ""); err != nil {
			t.Fatal(err)
		}
	}
	first.Close()
	in := New(Config{Sandboxes: h})
	t.Cleanup(in.Close)
	h.midList = func() { in.Ended(h.sandboxes[0].ID) }
	if err := in.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.midList = nil
	ports := in.list("")
	hash, _ := in.access(h.sandboxes[0].ID, 80)
	if len(ports) != 1 || ports[0].Sandbox != h.sandboxes[1].ID || ports[0].Error != "" || hash != nil {
		t.Errorf("left: %+v, token %x", ports, hash)
	}
	if hash, _ := in.access(h.sandboxes[1].ID, 80); hash == nil { // the control
		t.Error("the other's token is lost")
	}
}
