package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestOperationsOfOthersStay: one owner's flood of operations pushes out that
// owner's alone.
func TestOperationsOfOthersStay(t *testing.T) {
	s := &server{}
	as := func(owner string) context.Context {
		return access.With(t.Context(), access.Caller{Owner: owner, Role: access.RoleDeveloper})
	}
	run := func(owner string) {
		ctx, o, err := s.ops.begin(as(owner), operationPull, "x", false)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.end(ctx, o, "done", nil)
	}
	for range 3 {
		run("alice")
	}
	for range 1200 {
		run("bob")
	}
	if n := len(s.ops.list(as("alice"), "")); n != 3 {
		t.Errorf("alice has %d of 3 operations after a flood of bob's", n)
	}
	if n := len(s.ops.list(as("bob"), "")); n != operationsKept { // the control: his own are bounded
		t.Errorf("bob has %d", n)
	}
}

// TestUploadsMayNotStandStill: a body of which nothing comes ends; one that
// comes is read.
func TestUploadsMayNotStandStill(t *testing.T) {
	got := make(chan error, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u := &upload{ReadCloser: r.Body, rc: http.NewResponseController(w), idle: 200 * time.Millisecond}
		_, err := io.Copy(io.Discard, u)
		got <- err
	}))
	defer srv.Close()
	c, err := net.Dial("tcp", srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
	select {
	case err := <-got:
		if sandbox.CodeOf(err) != "upload_too_slow" {
			t.Errorf("an idle upload: %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("an idle upload stays")
	}
	res, err := http.Post(srv.URL, "text/plain", strings.NewReader("whole"))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if err := <-got; err != nil {
		t.Errorf("the control: %v", err)
	}
}

// TestOriginsAreChecked: a page from elsewhere may not call, whatever key or
// user its browser brings along.
func TestOriginsAreChecked(t *testing.T) {
	for origin, want := range map[string]bool{
		"": true, "http://box.example:7463": true, "https://BOX.example:7463": true,
		"https://evil.example": false, "null": false, "http://box.example": false, "http://box.example:7463.evil.example": false,
	} {
		r := httptest.NewRequest(http.MethodGet, "http://box.example:7463/mcp", nil)
		if origin != "" {
			r.Header.Set("Origin", origin)
		}
		if got := ownOrigin(r); got != want {
			t.Errorf("origin %q: %v", origin, got)
		}
	}
}

// TestPlacesOfAnAddress: who was not admitted makes room for newcomers, the
// oldest first; one owner gets most places and leaves some.
func TestPlacesOfAnAddress(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := Bounded(plain, 8, 100)
	defer ln.Close()
	open := func() (client net.Conn, ctx context.Context) {
		client, err := net.Dial("tcp", plain.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() })
		c, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return client, ConnContext(t.Context(), c)
	}
	livesFor := func(c net.Conn, d time.Duration) bool {
		_ = c.SetReadDeadline(time.Now().Add(d))
		_, err := c.Read(make([]byte, 1))
		return errors.Is(err, os.ErrDeadlineExceeded)
	}
	lives := func(c net.Conn) bool { return livesFor(c, 100*time.Millisecond) }
	kept, ctx := open()
	if err := Admitted(ctx, "alice"); err != nil {
		t.Fatal(err)
	}
	oldest, _ := open()
	for range 6 {
		open()
	}
	if !lives(oldest) || !lives(kept) { // the control
		t.Fatal("a connection ended while there was room")
	}
	_, ctx = open()                                    // the ninth
	if livesFor(oldest, time.Minute) || !lives(kept) { // it is closed a moment later
		t.Error("a newcomer has not the place of the oldest that nobody was admitted on")
	}
	for n := range 6 {
		if n > 0 {
			_, ctx = open()
		}
		if err := Admitted(ctx, "bob"); err != nil {
			t.Fatalf("bob's connection %d: %v", n, err)
		}
	}
	_, ctx = open()
	if err := Admitted(ctx, "bob"); sandbox.CodeOf(err) != "too_many_connections" {
		t.Errorf("bob's seventh of eight: %v", err)
	}
	if err := Admitted(ctx, "alice"); err != nil { // the control
		t.Errorf("alice's on it: %v", err)
	}
}

// TestRestOfABodyIsAwaitedBriefly: a client that was answered and does not
// send the rest of its body loses its connection; one that sends it keeps it.
func TestRestOfABodyIsAwaitedBriefly(t *testing.T) {
	srv := httptest.NewServer(Hasty(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })))
	defer srv.Close()
	for _, c := range []struct {
		rest string
		ends bool
		wait time.Duration
	}{{"", true, time.Minute}, {"1\r\nx\r\n0\r\n\r\n", false, 2 * restTimeout}} {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, _ = fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%s", c.rest)
		_ = conn.SetReadDeadline(time.Now().Add(c.wait))
		_, err = io.Copy(io.Discard, conn)
		if ended := err == nil; ended != c.ends {
			t.Errorf("rest %q: the connection ended: %v (%v)", c.rest, ended, err)
		}
	}
}
