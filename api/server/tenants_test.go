package server

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
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
