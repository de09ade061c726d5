package duplex

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair returns both ends of a TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err = net.DialTCP("tcp", nil, ln.Addr().(*net.TCPAddr))
	if err != nil {
		t.Fatal(err)
	}
	b, err = ln.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*net.TCPConn{a, b} {
		t.Cleanup(func() { c.Close() })
		if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	return a, b
}

func TestJoinPassesHalvesOn(t *testing.T) {
	client, outer := pair(t)
	inner, server := pair(t)
	done := make(chan error, 1)
	go func() { done <- Join(outer, inner) }()
	const request, response = "all of the request", "and the answer to it"
	if _, err := io.WriteString(client, request); err != nil {
		t.Fatal(err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(server); err != nil || string(b) != request {
		t.Fatalf("the server read %q, %v", b, err)
	}
	if _, err := io.WriteString(server, response); err != nil {
		t.Fatal(err)
	}
	server.Close()
	if b, err := io.ReadAll(client); err != nil || string(b) != response {
		t.Fatalf("the client read %q, %v", b, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestJoinEndsBothWays: a connection that breaks takes the other with it,
// though that is silent.
func TestJoinEndsBothWays(t *testing.T) {
	client, outer := pair(t)
	inner, server := pair(t)
	done := make(chan error, 1)
	go func() { done <- Join(outer, inner) }()
	Reset(client)
	if _, err := server.Read(make([]byte, 1)); err == nil || errors.Is(err, unix.EAGAIN) {
		t.Errorf("the server's end: %v", err)
	}
	if err := <-done; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("told %v", err)
	}
}
