// Command server is what the tests of ingress run in sandboxes.
//
//	server http ADDR...    HTTP: /headers, /ws (echoes), /sse (three events), /put (counts), /get?n=N, /slow
//	server tcp ADDR...     reads to the end of the client's half, answers with what it read
//	server stay ADDR...    takes connections and holds them, silent
//	server greet ADDR...   says hello and hangs up
//	server udp ADDR...     echoes datagrams
//
// It says "ready" once it listens.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/coder/websocket"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "server:", err)
		os.Exit(1) //nolint:forbidigo // the end of a program for tests
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("what shall be served, and where?")
	}
	serve := map[string]func(net.Listener) error{"http": serveHTTP, "tcp": each(answer), "stay": each(func(*net.TCPConn) {}), "greet": each(greet)}[args[0]]
	failed := make(chan error)
	for _, addr := range args[1:] {
		if args[0] == "udp" {
			c, err := net.ListenPacket("udp", addr)
			if err != nil {
				return err
			}
			go func() { failed <- echo(c) }()
			continue
		}
		if serve == nil {
			return fmt.Errorf("unknown: %q", args[0])
		}
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		go func() { failed <- serve(ln) }()
	}
	fmt.Println("ready") //nolint:forbidigo // its protocol
	return <-failed
}

var held []*net.TCPConn // so that nobody closes them

func each(f func(*net.TCPConn)) func(net.Listener) error {
	return func(ln net.Listener) error {
		for {
			c, err := ln.Accept()
			if err != nil {
				return err
			}
			if t, ok := c.(*net.TCPConn); ok {
				held = append(held, t)
				go f(t)
			}
		}
	}
}

func answer(c *net.TCPConn) {
	b, err := io.ReadAll(c)
	if err == nil {
		_, _ = c.Write(b) // the client may be gone
	}
	c.Close()
}

func greet(c *net.TCPConn) {
	_, _ = io.WriteString(c, "hello") // the client may be gone
	c.Close()
}

func echo(c net.PacketConn) error {
	buf := make([]byte, 65535)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return err
		}
		_, _ = c.WriteTo(buf[:n], from) // lost, as datagrams are
	}
}

func serveHTTP(ln net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/headers", func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"host": r.Host, "url": r.RequestURI, "header": r.Header, "remote": r.RemoteAddr})
	})
	mux.HandleFunc("/put", func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprintln(w, n, err)
	})
	mux.HandleFunc("/get", func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.ParseInt(r.FormValue("n"), 10, 64)
		_, _ = io.CopyN(w, zeros{}, n) // the client may be gone
	})
	mux.HandleFunc("/slow", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	mux.HandleFunc("/sse", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush() // the client may be gone
			select {
			case <-time.After(50 * time.Millisecond):
			case <-r.Context().Done():
				return
			}
		}
		<-r.Context().Done() // it stays open: what came, came before the end
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer func() { _ = c.CloseNow() }() // already closed in the good case
		for {
			kind, b, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if c.Write(r.Context(), kind, b) != nil {
				return
			}
		}
	})
	return (&http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}).Serve(ln)
}

type zeros struct{}

// Read reads zeros.
func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
