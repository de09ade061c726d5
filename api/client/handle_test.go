package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// daemon answers as a real one does, from memory.
func daemon() (url string, stop func()) {
	ts := httptest.NewServer(server.New(server.Config{Manager: servertest.New(), Version: "example", Log: slog.New(slog.DiscardHandler)}))
	return ts.URL, ts.Close
}

func Example() {
	url, stop := daemon() // client.New("") speaks to the daemon of this machine
	defer stop()
	ctx := context.Background()
	c, err := client.New(url, client.WithRetries(3))
	if err != nil {
		fmt.Println(err)
		return
	}
	sb, err := c.Make(ctx, sandbox.Spec{Name: "dev", Limits: sandbox.Limits{MemoryBytes: 512 << 20}})
	if err != nil {
		fmt.Println(err)
		return
	}
	cmd := sb.Command("echo", "hello")
	cmd.Stdout = os.Stdout
	if err := cmd.Run(ctx); err != nil {
		fmt.Println(err)
	}
	fmt.Println(sb.Remove(ctx))
	// Output:
	// hello
	// <nil>
}

func ExampleClient_Connect() {
	url, stop := daemon()
	defer stop()
	c, _ := client.New(url)
	_, err := c.Connect(context.Background(), "absent")
	if e, ok := errors.AsType[*api.Problem](err); ok {
		fmt.Println(e.Status, e.Code, e.RequestID != "")
	}
	fmt.Println(errors.Is(err, sandbox.ErrNotFound))
	// Output:
	// 404 sandbox_not_found true
	// true
}

func ExampleHandle_Files() {
	url, stop := daemon()
	defer stop()
	ctx := context.Background()
	c, _ := client.New(url)
	sb, err := c.Make(ctx, sandbox.Spec{})
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := sb.Files().Write(ctx, "", "/srv/a.txt", 0o644, strings.NewReader("content")); err != nil {
		fmt.Println(err)
	}
	_, body, err := sb.Files().Read(ctx, "", "/srv/a.txt", 0, -1)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer body.Close()
	var b bytes.Buffer
	_, _ = b.ReadFrom(body)
	fmt.Println(b.String())
	// Output: content
}

func TestCommand(t *testing.T) {
	url, stop := daemon()
	defer stop()
	c, err := client.New(url)
	if err != nil {
		t.Fatal(err)
	}
	sb, err := c.Make(t.Context(), sandbox.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	cat := sb.Command("cat")
	cat.Stdin, cat.Stdout = strings.NewReader(strings.Repeat("in", 100_000)), &out
	if err := cat.Run(t.Context()); err != nil || out.Len() != 200_000 {
		t.Errorf("cat: %v, %d bytes", err, out.Len())
	}
	bad := sb.Command("err", "no")
	bad.Stderr = &errs
	if err := bad.Run(t.Context()); err != nil || errs.String() != "no\n" {
		t.Errorf("err: %v %q", err, &errs)
	}
	if e, ok := errors.AsType[*client.ExitError](sb.Command("exit", "3").Run(t.Context())); !ok || e.Code != 3 {
		t.Errorf("exit 3: %v", e)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := sb.Command("sleep").Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("sleep: %v", err)
	}
}

// TestRetries counts what a busy server is asked.
func TestRetries(t *testing.T) {
	var asked atomic.Int32
	ts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			w.Header().Set("Content-Type", api.ProblemContentType)
			w.WriteHeader(http.StatusServiceUnavailable)
			fmt.Fprint(w, `{"code":"busy","detail":"not now"}`)
			return
		}
		fmt.Fprint(w, `{}`)
	}))
	defer ts.Close()
	for _, tc := range []struct {
		name    string
		retries int
		do      func(c *client.Client) error
		want    int32
		good    bool
	}{
		{"a read", 3, func(c *client.Client) error { _, err := c.Sandbox(t.Context(), "a"); return err }, 3, true},
		{"a removal", 3, func(c *client.Client) error { _, err := c.Remove(t.Context(), "a"); return err }, 3, true},
		{"a create with a key", 3, func(c *client.Client) error { _, err := c.Create(t.Context(), sandbox.Spec{}, "k"); return err }, 3, true},
		{"a create without", 3, func(c *client.Client) error { _, err := c.Create(t.Context(), sandbox.Spec{}, ""); return err }, 1, false},
		{"a stop", 3, func(c *client.Client) error { _, err := c.Stop(t.Context(), "a"); return err }, 1, false},
		{"too few tries", 1, func(c *client.Client) error { _, err := c.Sandbox(t.Context(), "a"); return err }, 2, false},
		{"as it is", 0, func(c *client.Client) error { _, err := c.Sandbox(t.Context(), "a"); return err }, 1, false},
	} {
		asked.Store(0)
		c, err := client.New(ts.URL, client.WithRetries(tc.retries))
		if err != nil {
			t.Fatal(err)
		}
		if err := tc.do(c); (err == nil) != tc.good || asked.Load() != tc.want {
			t.Errorf("%s: asked %d times, want %d; %v", tc.name, asked.Load(), tc.want, err)
		}
	}
}
