package client

import (
	"context"
	"encoding/json"
	"io"
	"sync"

	"github.com/coder/websocket"

	"github.com/sandboxd/sandboxd/api"
	"github.com/sandboxd/sandboxd/sandbox"
)

// stdin is the sending half of a stream. It keeps every byte the process is
// not known to have taken, at most api.StdinWindow, so that a new connection
// can go on exactly where the process stopped reading.
type stdin struct {
	mu      sync.Mutex
	wake    sync.Cond
	writing sync.Mutex // one caller of write at a time: the window is shared
	sending sync.Mutex // held, before mu, by whoever writes to conn: keeps frames in order

	session int64           // the server knows by it what it has of ours
	conn    *websocket.Conn // nil while there is none
	next    *websocket.Conn // becomes conn when the server has told what it has
	base    int64           // offset of kept[0] in the session
	kept    []byte          // written by the caller, not known to be taken
	ended   bool            // the caller closed stdin
	closed  bool            // the process closed its end
	err     error           // the stream is over
	size    *sandbox.WindowSize
}

func (in *stdin) init(conn *websocket.Conn, session int64) {
	in.wake.L = &in.mu
	in.session = session
	if session == starter {
		in.conn = conn // the process has nothing yet
	} else {
		in.next = conn
	}
}

// given notes that the server was given all of stdin at once: nothing can be
// added, and a new connection goes on where the process stopped reading.
func (in *stdin) given(all []byte) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.kept, in.ended, in.closed = all, len(all) > 0, true
}

// write sends p in frames, as the window permits.
func (in *stdin) write(ctx context.Context, p []byte) (int, error) {
	in.writing.Lock()
	defer in.writing.Unlock()
	sent := 0
	for len(p) > 0 {
		chunk := p[:min(len(p), api.MaxStdinFrame)]
		if err := in.frame(ctx, chunk); err != nil {
			return sent, err
		}
		sent += len(chunk)
		p = p[len(chunk):]
	}
	return sent, nil
}

func (in *stdin) frame(ctx context.Context, chunk []byte) error {
	in.mu.Lock()
	for len(in.kept)+len(chunk) > api.StdinWindow && in.err == nil && !in.closed {
		in.wake.Wait()
	}
	in.mu.Unlock()
	in.sending.Lock()
	defer in.sending.Unlock()
	in.mu.Lock()
	switch {
	case in.err != nil:
		in.mu.Unlock()
		return in.err
	case in.closed || in.ended:
		in.mu.Unlock()
		return io.ErrClosedPipe
	}
	in.kept = append(in.kept, chunk...)
	conn := in.conn
	in.mu.Unlock()
	if conn != nil {
		// A write that breaks is not an error: Next finds out as well, and
		// the new connection gets what was kept.
		_ = conn.Write(ctx, websocket.MessageBinary, api.AppendStdin(make([]byte, 0, 1+len(chunk)), chunk))
	}
	return nil
}

// taken notes that the process has taken total bytes in all. The first time on
// a new connection it then goes on, after them.
func (in *stdin) taken(ctx context.Context, total int64, closed bool) {
	in.mu.Lock()
	in.forget(total)
	in.closed = in.closed || closed
	if closed {
		in.kept = nil // nobody wants it
	}
	in.wake.Broadcast()
	fresh := in.next != nil
	in.mu.Unlock()
	if fresh {
		in.resume(ctx)
	}
}

// forget drops what lies before total; in.mu is held.
func (in *stdin) forget(total int64) {
	n := min(max(total-in.base, 0), int64(len(in.kept)))
	in.kept = in.kept[n:]
	in.base += n
	if len(in.kept) == 0 {
		in.kept = nil // lets the array go
	}
}

// control sends a message, or leaves it to the next connection.
func (in *stdin) control(ctx context.Context, m api.Message, note func()) error {
	in.sending.Lock()
	defer in.sending.Unlock()
	in.mu.Lock()
	if in.err != nil {
		defer in.mu.Unlock()
		return in.err
	}
	note()
	conn := in.conn
	in.mu.Unlock()
	if conn != nil {
		send(ctx, conn, m)
	}
	return nil
}

func send(ctx context.Context, conn *websocket.Conn, m api.Message) {
	b, err := json.Marshal(m)
	if err == nil {
		err = conn.Write(ctx, websocket.MessageText, b)
	}
	_ = err // see frame: Next finds out
}

func (in *stdin) finish(ctx context.Context) error {
	in.mu.Lock()
	again := in.ended
	in.mu.Unlock()
	if again {
		return nil
	}
	return in.control(ctx, api.Message{Type: api.MsgCloseStdin}, func() { in.ended = true })
}

func (in *stdin) resize(ctx context.Context, size sandbox.WindowSize) error {
	return in.control(ctx, api.Message{Type: api.MsgResize, Cols: size.Cols, Rows: size.Rows}, func() { in.size = &size })
}

// detach notes that there is no connection.
func (in *stdin) detach() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.conn, in.next = nil, nil
}

// attach notes a new connection, which is used once taken was told on it.
func (in *stdin) attach(conn *websocket.Conn) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.next = conn
}

// resume sends what the process has not taken on the new connection.
func (in *stdin) resume(ctx context.Context) {
	in.sending.Lock()
	defer in.sending.Unlock()
	in.mu.Lock()
	kept, ended, size, conn := append([]byte(nil), in.kept...), in.ended, in.size, in.next
	in.conn, in.next = conn, nil
	in.mu.Unlock()
	for len(kept) > 0 {
		n := min(len(kept), api.MaxStdinFrame)
		if conn.Write(ctx, websocket.MessageBinary, api.AppendStdin(nil, kept[:n])) != nil {
			return // Next finds out
		}
		kept = kept[n:]
	}
	if ended {
		send(ctx, conn, api.Message{Type: api.MsgCloseStdin})
	}
	if size != nil {
		send(ctx, conn, api.Message{Type: api.MsgResize, Cols: size.Cols, Rows: size.Rows})
	}
}

// end wakes every writer for good.
func (in *stdin) end(err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.err == nil {
		in.err = err
		in.wake.Broadcast()
	}
}
