package server_test

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/sandboxd/sandboxd/api/client"
	"github.com/sandboxd/sandboxd/api/server"
	"github.com/sandboxd/sandboxd/api/server/servertest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// BenchmarkOutput measures process output through the server, the socket and
// the client, all in this process.
func BenchmarkOutput(b *testing.B) {
	m := servertest.New()
	sock := filepath.Join(b.TempDir(), "s.sock")
	ln, err := net.Listen("unix", sock)
	if err != nil {
		b.Fatal(err)
	}
	h := server.New(server.Config{Manager: m, Log: slog.New(slog.DiscardHandler)})
	go func() { _ = server.Serve(b.Context(), ln, h) }()
	c, err := client.New("unix://" + sock)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := c.Create(b.Context(), sandbox.Spec{Name: "box"}, ""); err != nil {
		b.Fatal(err)
	}
	const total = 256 << 20
	var received int64
	for b.Loop() {
		p, err := c.Exec(b.Context(), "box", sandbox.ProcessSpec{Argv: []string{"yes", strconv.Itoa(total)}, OutputBytes: sandbox.MaxOutput})
		if err != nil {
			b.Fatal(err)
		}
		var n int64
		for {
			out, err := p.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				b.Fatal(err)
			}
			n += int64(len(out.Data)) + out.Dropped
			received += int64(len(out.Data)) // what was dropped cost nothing
		}
		if n != total {
			b.Fatalf("%d bytes", n)
		}
	}
	b.ReportMetric(float64(received)/1e6/b.Elapsed().Seconds(), "MB/s")
}

// BenchmarkExec measures a whole exec of a command that does nothing.
func BenchmarkExec(b *testing.B) {
	m := servertest.New()
	sock := filepath.Join(b.TempDir(), "s.sock")
	ln, err := net.Listen("unix", sock)
	if err != nil {
		b.Fatal(err)
	}
	h := server.New(server.Config{Manager: m, Log: slog.New(slog.DiscardHandler)})
	go func() { _ = server.Serve(b.Context(), ln, h) }()
	c, err := client.New("unix://" + sock)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := c.Create(b.Context(), sandbox.Spec{Name: "box"}, ""); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		p, err := c.Exec(b.Context(), "box", sandbox.ProcessSpec{Argv: []string{"exit", "0"}})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Next(); !errors.Is(err, io.EOF) {
			b.Fatal(err)
		}
	}
}
