package runtime

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// echoing starts a server here, which is what fakeNetwork takes for the inside
// of a sandbox, and returns its port.
func echoing(t *testing.T) int {
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
				_, _ = io.Copy(c, c)
				c.Close()
			}()
		}
	}()
	return ln.Addr().(*net.TCPAddr).Port
}

// carry sends n bytes there and back over a connection.
func carry(t *testing.T, c net.Conn, n int) {
	t.Helper()
	if _, err := io.WriteString(c, strings.Repeat("x", n)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
}

func TestDialPort(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "dev", IdleTimeoutSeconds: 3600})
	port := echoing(t)
	c, err := h.DialPort(t.Context(), "dev", port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	carry(t, c, 1000)
	b := h.box(sb.ID)
	calls := func() int {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.idle.calls
	}
	if n := calls(); n != 1 {
		t.Errorf("an open connection counts as %d calls", n)
	}
	c.Close()
	c.Close()
	if n := calls(); n != 0 {
		t.Errorf("a closed connection counts as %d calls", n)
	}
	if c, err = h.DialPort(t.Context(), string(sb.ID), port); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, bad := range []int{-1, 0, 65536} {
		if _, err := h.DialPort(t.Context(), "dev", bad); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("port %d: %v", bad, err)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := ln.Addr().(*net.TCPAddr).Port
	ln.Close()
	if _, err := h.DialPort(t.Context(), "dev", free); sandbox.CodeOf(err) != codePortClosed || !errors.Is(err, sandbox.ErrUnavailable) {
		t.Errorf("a closed port: %v", err)
	}
	if _, err := h.Pause(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.DialPort(t.Context(), "dev", port); sandbox.CodeOf(err) != "sandbox_paused" {
		t.Errorf("of a paused sandbox: %v", err)
	}
	if _, err := h.Resume(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	carry(t, c, 10) // a pause breaks nothing
	breaks := func(what string) {
		t.Helper()
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err == nil {
			if _, err = c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	if _, err := h.Reset(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	breaks("a connection outlives the reset of its sandbox")
	if c, err = h.DialPort(t.Context(), "dev", port); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	carry(t, c, 10)
	if _, err := h.Stop(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	breaks("a connection outlives the stop of its sandbox")
	if n := calls(); n != 0 {
		t.Errorf("after the stop: %d calls", n)
	}
	if _, err := h.DialPort(t.Context(), "dev", port); sandbox.CodeOf(err) != "sandbox_stopped" {
		t.Errorf("of a stopped sandbox: %v", err)
	}
	if _, err := h.Remove(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.DialPort(t.Context(), "dev", port); sandbox.CodeOf(err) != "sandbox_ended" {
		t.Errorf("of a sandbox that ended: %v", err)
	}
}

// TestCarriedIsCountedOnce: what the daemon carried stands in the usage once,
// over a crash, a stop and the end. fakeNetwork counts 1 in and 2 out for
// each shell.
func TestCarriedIsCountedOnce(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	port := echoing(t)
	sb := create(t, h, sandbox.Spec{})
	is := func(when string, rx, tx uint64) {
		t.Helper()
		u, err := h.Usage(t.Context(), string(sb.ID))
		if err != nil || u.NetRxBytes != rx || u.NetTxBytes != tx {
			t.Errorf("%s: %d in, %d out, %v; want %d and %d", when, u.NetRxBytes, u.NetTxBytes, err, rx, tx)
		}
	}
	c, err := h.DialPort(t.Context(), string(sb.ID), port)
	if err != nil {
		t.Fatal(err)
	}
	carry(t, c, 1000)
	is("at first", 1001, 1002)
	written := func() bool {
		all, err := h.db.Carried(t.Context())
		return err == nil && all[sb.ID].Rx == 1000
	}
	testenv.Eventually(t, 10*time.Second, "it is written down", written)
	c.Close()
	h.crash()
	h = open(t, k, dir)
	is("after a crash", 1001, 1002)
	if c, err = h.DialPort(t.Context(), string(sb.ID), port); err != nil {
		t.Fatal(err)
	}
	carry(t, c, 500)
	is("and more", 1501, 1502)
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	is("stopped", 1501, 1502)
	h.crash()
	h = open(t, k, dir)
	is("stopped, after a crash", 1501, 1502)
	if _, err := h.Start(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	is("started again", 1502, 1504)
	if c, err = h.DialPort(t.Context(), string(sb.ID), port); err != nil {
		t.Fatal(err)
	}
	carry(t, c, 100)
	is("in the next shell", 1602, 1604)
	if gone, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil || gone.Usage.NetRxBytes != 1602 || gone.Usage.NetTxBytes != 1604 {
		t.Errorf("at the end: %+v, %v", gone.Usage, err)
	}
}

// TestPortRowsGoWithTheirSandbox: when a sandbox ends somebody is told, and
// its ports and token are forgotten, by the next daemon at the latest.
func TestPortRowsGoWithTheirSandbox(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	var ended []sandbox.ID
	h.OnEnd(func(id sandbox.ID) { ended = append(ended, id) })
	sb := create(t, h, sandbox.Spec{})
	p := sandbox.Port{ID: sandbox.NewPortID(), Sandbox: sb.ID, Protocol: "tcp", HostPort: 1, Port: 2}
	if err := h.PutPort(t.Context(), p, "uid:7"); err != nil {
		t.Fatal(err)
	}
	if err := h.SetPortToken(t.Context(), sb.ID, []byte("hash"), ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Stop(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if all, err := h.Ports(t.Context(), ""); err != nil || len(all) != 1 || all[0].ID != p.ID || len(ended) != 0 {
		t.Errorf("of a stopped sandbox: %+v, %v, ended %v", all, err, ended)
	}
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	if all, err := h.Ports(t.Context(), ""); err != nil || len(all) != 0 || len(ended) != 1 || ended[0] != sb.ID {
		t.Errorf("at the end: %+v, %v, ended %v", all, err, ended)
	}
	testenv.Eventually(t, 10*time.Second, "rows are gone", func() bool {
		all, err := h.db.Ports(t.Context(), "")
		tokens, terr := h.db.PortTokens(t.Context())
		return err == nil && terr == nil && len(all) == 0 && len(tokens) == 0
	})
	if err := h.PutPort(t.Context(), p, ""); sandbox.CodeOf(err) != "sandbox_ended" {
		t.Errorf("a port of a sandbox that ended: %v", err)
	}
}

// TestDialPortAfterRestart: who waited while a sandbox was started anew gets to
// its address of now; that of before may be another sandbox's.
func TestDialPortAfterRestart(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "dev", Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}})
	servers := map[string]netip.Addr{"before": netip.MustParseAddr("127.0.0.2"), "now": netip.MustParseAddr("127.0.0.3")}
	port := 0
	for name, addr := range servers {
		ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, uint16(port))))
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		port = ln.Addr().(*net.TCPAddr).Port
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, name)
				c.Close()
			}
		}()
	}
	move := func(name string) {
		addr := servers[name]
		if err := h.state.Update(t.Context(), sb.ID, state.Change{Address: &addr}); err != nil {
			t.Fatal(err)
		}
	}
	dial := func() string {
		c, err := h.DialPort(t.Context(), "dev", port)
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		return string(b)
	}
	move("before")
	if got := dial(); got != "before" { // the control
		t.Fatalf("reached %q", got)
	}
	b := h.box(sb.ID)
	if err := b.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.setStatus(sandbox.StatusCreating, "")
	got := make(chan string, 1)
	go func() { got <- dial() }()
	select {
	case early := <-got:
		t.Fatalf("did not wait: %q", early)
	case <-time.After(300 * time.Millisecond): // it has read the row by then
	}
	move("now")
	b.setStatus(sandbox.StatusRunning, "")
	b.unlock()
	if got := <-got; got != "now" {
		t.Errorf("reached %q", got)
	}
}
