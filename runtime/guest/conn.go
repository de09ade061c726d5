package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// replyTimeout is how long PID 1 may take to answer where no stream is
	// asked for. A listing of 100,000 files on a busy host takes seconds.
	replyTimeout = 30 * time.Second
	// pingTimeout is the same for the question whether it lives.
	pingTimeout = 5 * time.Second
	// removeTimeout is the same for the removal of a tree of any size.
	removeTimeout = 10 * time.Minute
)

// patience is how long an operation's reply is waited for.
func (g *Guest) patience(op string) time.Duration {
	switch {
	case g.hurry > 0:
		return g.hurry
	case op == initproto.OpPing:
		return pingTimeout
	case op == initproto.OpRemove, op == initproto.OpReset, op == initproto.OpInput: // as long as a process does not read
		return removeTimeout
	}
	return replyTimeout
}

// Guest is one sandbox's PID 1. It is safe for concurrent use.
type Guest struct {
	files
	path  string
	hurry time.Duration // for tests: in place of patience
	spare spares

	mu   sync.Mutex
	sock *os.File // guarded by mu; see socket
}

// New returns the guest whose PID 1 listens on socketPath, which may be of
// any length.
func New(socketPath string) *Guest {
	g := &Guest{path: socketPath}
	g.files = files{g: g}
	return g
}

// conn is one operation's connection, or kept for another one.
type conn struct {
	*net.UnixConn
	g     *Guest
	in    *bufio.Reader
	wmu   sync.Mutex
	stop  func() bool // ends the watch on the context
	ctx   context.Context
	timed bool        // a deadline is set
	over  atomic.Bool // closed or given back
	ended atomic.Bool // PID 1 waits for another request
}

func unreachable(err error) error {
	return sandbox.Errorf(sandbox.ErrUnavailable, "sandbox_unreachable", "the sandbox's init does not answer: %w", err)
}

// broken is an operation cut short by the other side.
func broken(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF // io.EOF is the end of a stream that was whole
	}
	if errors.Is(err, initproto.ErrFrame) {
		return sandbox.Errorf(sandbox.ErrUnavailable, "guest_protocol", "the sandbox's init broke the protocol: %w", err)
	}
	return unreachable(err)
}

// connect returns a connection for one operation.
func (g *Guest) connect(ctx context.Context) (*conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, ctxError(ctx)
	}
	c := g.spare.take()
	if c == nil {
		var err error
		if c, err = g.dial(ctx); err != nil {
			return nil, err
		}
	}
	c.ctx = ctx
	c.stop = context.AfterFunc(ctx, func() { _ = c.UnixConn.Close() })
	return c, nil
}

// socket returns what PID 1 listens on: still the one of before where its name is
// gone, as when somebody cleaned up in /run.
func (g *Guest) socket() (*os.File, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	is, err := os.Lstat(g.path)
	if err == nil && g.sock != nil {
		was, serr := g.sock.Stat()
		if serr == nil && os.SameFile(was, is) {
			return g.sock, nil
		}
	}
	if err == nil || g.sock == nil {
		f, err := os.OpenFile(g.path, unix.O_PATH|unix.O_NOFOLLOW, 0)
		if err != nil {
			return nil, err
		}
		g.sock = f // the one of before is closed when nobody uses it
	}
	return g.sock, nil
}

func (g *Guest) dial(ctx context.Context) (*conn, error) {
	sock, err := g.socket()
	if err != nil {
		return nil, unreachable(err)
	}
	defer runtime.KeepAlive(sock)
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(sock.Fd())))
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctxError(ctx)
		}
		return nil, unreachable(err)
	}
	c := &conn{UnixConn: nc.(*net.UnixConn), g: g} //nolint:errcheck // a unix dial gives nothing else
	c.in = bufio.NewReaderSize(c.UnixConn, 4096)
	return c, nil
}

func late(err error) error {
	return sandbox.Errorf(sandbox.ErrDeadline, "deadline", "the sandbox's init did not answer in time; 'sandbox stop' ends it and keeps the files: %w", err)
}

func ctxError(ctx context.Context) error {
	err := context.Cause(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return late(err)
	}
	return fmt.Errorf("talking to the sandbox's init: %w", err)
}

// Close ends the operation. The connection is kept for the next one if PID 1
// said that it is ready for it, and nothing is being written.
func (c *conn) Close() error {
	if c.over.Swap(true) {
		return nil
	}
	fine := c.stop()
	if fine && c.ended.Load() && c.wmu.TryLock() {
		fresh := &conn{UnixConn: c.UnixConn, g: c.g, in: c.in, timed: c.timed}
		c.wmu.Unlock()
		fresh.within(0)
		c.g.spare.give(fresh)
		return nil
	}
	err := c.UnixConn.Close()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// fail turns a transport error into one for callers: the context's, if that
// has ended.
func (c *conn) fail(err error) error {
	if c.ctx.Err() != nil {
		return ctxError(c.ctx)
	}
	switch {
	case sandbox.ClassOf(err) != nil:
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return late(err)
	}
	return broken(err)
}

// call opens a connection, sends a request and decodes the first reply. What
// follows on the connection has the rest of the operation's time.
func (g *Guest) call(ctx context.Context, op string, args, reply any, files ...*os.File) (*conn, error) {
	c, err := g.connect(ctx)
	if err != nil {
		return nil, err
	}
	c.within(g.patience(op))
	if err := c.request(op, args, files); err != nil {
		_ = c.Close()
		return nil, err
	}
	if err := c.reply(reply); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// open is call for streams: what follows the reply takes as long as it likes.
func (g *Guest) open(ctx context.Context, op string, args, reply any) (*conn, error) {
	c, err := g.call(ctx, op, args, reply)
	if err == nil {
		c.within(0)
	}
	return c, err
}

// within bounds reading and writing from now on; 0 lifts the bound.
func (c *conn) within(d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	} else if !c.timed {
		return
	}
	c.timed = d > 0
	_ = c.SetDeadline(at) // fails on a closed connection, as what follows will
}

// do is call for operations that end with their reply.
func (g *Guest) do(ctx context.Context, op string, args, reply any, files ...*os.File) error {
	c, err := g.call(ctx, op, args, reply, files...)
	if err != nil {
		return err
	}
	c.last()
	return c.Close()
}

// last notes that the operation's last frame was read. The Idle frame that
// may follow came with it; what has not come yet is not waited for.
func (c *conn) last() {
	if c.in.Buffered() != initproto.HeaderSize {
		return
	}
	head, err := c.in.Peek(initproto.HeaderSize)
	if err != nil || initproto.FrameType(head[0]) != initproto.FrameIdle {
		return
	}
	_, err = initproto.ReadFrame(c.in, initproto.Init, nil)
	c.ended.Store(err == nil) // the last that is done with c.in
}

// request is initproto.Request with its arguments not yet encoded.
type request struct {
	initproto.Request
	Args any `json:"args,omitempty"` // hides the other
}

func (c *conn) request(op string, args any, files []*os.File) error {
	body, err := json.Marshal(request{initproto.Request{Version: initproto.Version, Op: op, Keep: true}, args})
	if err != nil {
		return fmt.Errorf("encoding the request %s: %w", op, err)
	}
	if len(body) > initproto.MaxControl {
		return sandbox.Errorf(sandbox.ErrTooLarge, "request_too_large", "request %s of %d bytes: at most %d", op, len(body), initproto.MaxControl)
	}
	frame, err := initproto.AppendFrame(nil, initproto.FrameRequest, body)
	if err != nil {
		return err
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	n, _, err := c.WriteMsgUnix(frame, oob, nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(frame) {
		_, err = c.Write(frame[n:])
	}
	if err != nil {
		return c.fail(err)
	}
	return nil
}

// next reads a frame; an Error frame becomes its error.
func (c *conn) next(buf []byte) (initproto.Frame, error) {
	t, n, err := c.head()
	if err != nil {
		return initproto.Frame{}, err
	}
	p, err := initproto.ReadPayload(c.in, n, buf)
	if err != nil {
		return initproto.Frame{}, c.fail(err)
	}
	return initproto.Frame{Type: t, Payload: p}, nil
}

// head reads the beginning of a frame: its type, and how many bytes follow. An
// Error frame is read whole and becomes its error.
func (c *conn) head() (initproto.FrameType, int, error) {
	t, n, err := initproto.ReadHeader(c.in, initproto.Init)
	if err != nil {
		return 0, 0, c.fail(err)
	}
	if t != initproto.FrameError {
		return t, n, nil
	}
	p, err := initproto.ReadPayload(c.in, n, nil)
	if err != nil {
		return t, 0, c.fail(err)
	}
	var e initproto.Error
	if err := json.Unmarshal(p, &e); err != nil {
		return t, 0, broken(fmt.Errorf("%w: error frame: %w", initproto.ErrFrame, err))
	}
	return t, 0, e.Err()
}

// data reads bytes of a frame whose beginning was read, until buf is full.
func (c *conn) data(buf []byte) error {
	if _, err := io.ReadFull(c.in, buf); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return c.fail(err)
	}
	return nil
}

func (c *conn) reply(v any) error {
	fr, err := c.next(nil)
	if err != nil {
		return err
	}
	if fr.Type != initproto.FrameResponse {
		return unexpected(fr.Type)
	}
	return decode(fr.Payload, v)
}

func unexpected(t initproto.FrameType) error {
	return broken(fmt.Errorf("%w: frame of type %#02x here", initproto.ErrFrame, byte(t)))
}

func decode(b []byte, v any) error {
	if v == nil {
		return nil
	}
	if err := json.Unmarshal(b, v); err != nil {
		return broken(fmt.Errorf("%w: %w", initproto.ErrFrame, err))
	}
	return nil
}

const (
	// maxListBytes bounds a list besides the number of its items.
	maxListBytes = 64 << 20
	// maxGathered bounds one that is held whole, so that it fits the account.
	maxGathered = accountSandbox / itemFactor
)

// each hands the Item frames up to End to f, one at a time and at most most of
// them. PID 1 has patience for each; the time f takes does not count.
func each[T any](c *conn, patience time.Duration, most int, f func(v T, size int) error) error {
	var buf []byte
	total := 0
	for n := 0; ; n++ {
		c.within(patience)
		fr, err := c.next(buf)
		if err != nil {
			return err
		}
		switch fr.Type {
		case initproto.FrameEnd:
			c.last()
			return nil
		case initproto.FrameItem:
		default:
			return unexpected(fr.Type)
		}
		if total += len(fr.Payload); n >= most || total > maxListBytes {
			return sandbox.Errorf(sandbox.ErrTooLarge, "list_too_long", "the sandbox lists more than %d entries or %d bytes: ask for less at once", most, maxListBytes)
		}
		var v T
		if err := decode(fr.Payload, &v); err != nil {
			return err
		}
		if err := f(v, len(fr.Payload)); err != nil {
			return err
		}
		buf = fr.Payload
	}
}

// gather returns a whole list, whose memory is charged to the context's tab
// until the request the context belongs to has ended.
func gather[T any](ctx context.Context, list func(func(v T, size int) error) error) ([]T, error) {
	t := tabOf(ctx)
	var charged int64
	if back := func() { t.give(charged) }; !sandbox.AtEnd(ctx, back) {
		defer back()
	}
	var out []T
	total := 0
	err := list(func(v T, size int) error {
		if total += size; total > maxGathered {
			return sandbox.Errorf(sandbox.ErrTooLarge, "list_too_long", "the sandbox lists more than %d bytes: ask for less at once", maxGathered)
		}
		if most := itemFactor * int64(total); most > charged {
			step := max(most-charged, 64<<10)
			if err := t.take(ctx, step); err != nil {
				return err
			}
			charged += step
		}
		out = append(out, v)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (c *conn) send(t initproto.FrameType, parts ...[]byte) error {
	var head [initproto.HeaderSize]byte
	bufs, n := net.Buffers{head[:]}, 0
	for _, p := range parts {
		bufs, n = append(bufs, p), n+len(p)
	}
	initproto.PutHeader(head[:], t, n)
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.over.Load() {
		return c.fail(net.ErrClosed)
	}
	if _, err := bufs.WriteTo(c.UnixConn); err != nil {
		return c.fail(err)
	}
	return nil
}
