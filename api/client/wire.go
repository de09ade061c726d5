package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// wire carries the server's messages of a process stream.
type wire interface {
	// read reads the next message into buf, which it may replace.
	read(ctx context.Context, buf []byte) (kind byte, msg []byte, err error)
	// close lets go; ended says that the last message was read.
	close(ended bool)
}

// socket is a stream over a WebSocket.
type socket struct{ ws *websocket.Conn }

func (s *socket) read(ctx context.Context, buf []byte) (byte, []byte, error) {
	typ, r, err := s.ws.Reader(ctx)
	if err != nil {
		return 0, buf, err
	}
	buf, err = readAll(r, buf[:0])
	if typ == websocket.MessageBinary {
		return api.FrameBinary, buf, err
	}
	return api.FrameText, buf, err
}

func (s *socket) close(bool) { _ = s.ws.CloseNow() } // broken, or nothing more is wanted of it

// body is a stream as the body of a response, which ends with the request's
// context.
type body struct {
	r    io.ReadCloser
	head [api.FrameHeader]byte
}

func (b *body) read(_ context.Context, buf []byte) (byte, []byte, error) {
	if _, err := io.ReadFull(b.r, b.head[:]); err != nil {
		return 0, buf, err
	}
	kind, n, ok := api.ParseFrameHeader(b.head[:])
	if !ok {
		return 0, buf, fmt.Errorf("frame header %x is none", b.head)
	}
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	_, err := io.ReadFull(b.r, buf)
	return kind, buf, err
}

// close reads the end of the body, so that the connection can be used again.
func (b *body) close(ended bool) {
	if ended {
		_, _ = b.r.Read(b.head[:1]) // io.EOF; anything else costs the connection
	}
	_ = b.r.Close() // nothing more is wanted of it
}

// dial opens a WebSocket, sends the first message unless it is nil, and
// reads up to "started".
func (c *Client) dial(ctx context.Context, path string, q url.Values, h http.Header, first any) (*socket, api.Message, error) {
	if err := named(path); err != nil {
		return nil, api.Message{}, err
	}
	target := c.base + path
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	if c.key != "" {
		if h = h.Clone(); h == nil {
			h = http.Header{}
		}
		c.sign(h)
	}
	ws, resp, err := websocket.Dial(ctx, target, &websocket.DialOptions{HTTPClient: c.ws, HTTPHeader: h, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			return nil, api.Message{}, problem(resp)
		}
		return nil, api.Message{}, c.unreachable(ctx, err)
	}
	ws.SetReadLimit(api.MaxText)
	if first != nil {
		b, err := api.MarshalUTF8(first)
		if err == nil {
			err = ws.Write(ctx, websocket.MessageText, b)
		}
		if err != nil {
			_ = ws.CloseNow() // the error says more
			return nil, api.Message{}, unknown(ctx, err)
		}
	}
	s := &socket{ws}
	started, err := handshake(ctx, s)
	return s, started, err
}

// stream sends a request whose answer is a process stream, and reads up to
// "started".
func (c *Client) stream(ctx context.Context, path string, h http.Header, request any) (*body, api.Message, error) {
	b, err := api.MarshalUTF8(request)
	if err != nil {
		return nil, api.Message{}, err
	}
	h.Set("Content-Type", "application/json")
	resp, err := c.do(ctx, call{method: http.MethodPost, path: path, header: h, body: bytes.NewReader(b), short: true})
	if err != nil {
		return nil, api.Message{}, err
	}
	w := &body{r: resp.Body}
	started, err := handshake(ctx, w)
	return w, started, err
}

// handshake reads up to "started", and closes w if there is none.
func handshake(ctx context.Context, w wire) (api.Message, error) {
	var buf []byte
	for {
		_, b, err := w.read(ctx, buf)
		var m api.Message
		if err == nil {
			err = json.Unmarshal(b, &m)
		}
		switch {
		case err != nil:
		case m.Type == api.MsgStarted && m.Process != nil:
			return m, nil
		case m.Type == api.MsgError && m.Problem != nil:
			w.close(true)
			return m, m.Problem.Err()
		case m.Type == api.MsgHeartbeat:
			buf = b
			continue
		default:
			err = fmt.Errorf("message of type %.40q", m.Type)
		}
		w.close(false)
		return m, unknown(ctx, err)
	}
}

// unknown is the error of a stream that broke before its process was known.
func unknown(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if _, ok := errors.AsType[*sandbox.Error](err); ok {
		return err
	}
	return sandbox.Errorf(sandbox.ErrUnavailable, "stream_broken", "the connection broke before the process was known: %w; 'sandbox ps' tells whether it runs", err)
}
