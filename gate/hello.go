package gate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"
)

// hello is the first message of a TLS client (RFC 8446, 4.1.2).
type hello struct {
	name string // server_name in the form of rules; empty where there is none
	ech  bool   // it may hide another name (encrypted_client_hello)
	raw  []byte // all that was read, to be sent on
}

// extensionECH is encrypted_client_hello (RFC 9849).
const extensionECH = 0xfe0d

var (
	errHelloRead = errors.New("the hello was read")
	errHelloSize = fmt.Errorf("the hello is longer than %d bytes", maxHello)
	errHelloName = errors.New("the server name in the hello is no name in ASCII")
)

// readHello reads no more than the hello needs and answers nothing. What it
// read is in hello.raw also where it returns an error.
func readHello(ctx context.Context, r io.Reader) (hello, error) {
	rec := &recorder{from: r}
	var h hello
	err := tls.Server(rec, &tls.Config{
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			h.name = info.ServerName
			h.ech = slices.Contains(info.Extensions, extensionECH)
			return nil, errHelloRead
		},
	}).HandshakeContext(ctx)
	h.raw = rec.read
	if !errors.Is(err, errHelloRead) {
		if err == nil {
			err = errors.New("a handshake without certificates came to an end")
		}
		return h, fmt.Errorf("read the hello: %w", err)
	}
	if h.name == "" {
		return h, nil
	}
	name, addr, err := parseHost(h.name)
	if err != nil || addr.IsValid() {
		return h, errHelloName
	}
	h.name = name
	return h, nil
}

// recorder is a connection that keeps what is read and sends nothing.
type recorder struct {
	from io.Reader
	read []byte
}

func (r *recorder) Read(b []byte) (int, error) {
	room := maxHello - len(r.read)
	if room <= 0 {
		return 0, errHelloSize
	}
	n, err := r.from.Read(b[:min(len(b), room)])
	r.read = append(r.read, b[:n]...)
	return n, err
}

func (r *recorder) Write(b []byte) (int, error)      { return len(b), nil }
func (r *recorder) Close() error                     { return nil }
func (r *recorder) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (r *recorder) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (r *recorder) SetDeadline(time.Time) error      { return nil }
func (r *recorder) SetReadDeadline(time.Time) error  { return nil }
func (r *recorder) SetWriteDeadline(time.Time) error { return nil }
