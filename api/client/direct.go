package client

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of the connections kept for the next request.
const (
	maxKept   = 256
	keptFor   = time.Minute // the server keeps them for two
	keptRead  = 16 << 10    // buffers of each, in bytes
	keptWrite = 4 << 10
)

// direct sends requests over connections to a unix socket. The caller's own
// goroutine writes the request and reads the answer, where http.Transport
// needs two more and a switch to each: that is most of what a short request
// costs. It knows no TLS, no proxies and no bodies that cannot be sent at
// once.
type direct struct {
	dial func(context.Context) (net.Conn, error)

	mu    sync.Mutex
	idle  []*kept // the one used last at the end
	sweep *time.Timer
}

// kept is a connection that is used again after each answer.
type kept struct {
	net.Conn
	r     *bufio.Reader
	w     *bufio.Writer
	since time.Time // idle since
}

// roundTrip sends a request, whose body can be sent again, and returns when
// the header of the answer is there. The context also ends reading the body.
func (d *direct) roundTrip(req *http.Request) (*http.Response, error) {
	for {
		c, err := d.take(req.Context())
		if err != nil {
			return nil, err
		}
		reused := !c.since.IsZero()
		resp, err := c.roundTrip(d, req)
		// The other end of a connection that takes nothing at all has not
		// seen the request: it was closed while it was idle.
		if err == nil || !reused || !errors.Is(err, unix.EPIPE) || req.Context().Err() != nil {
			return resp, err
		}
		if req.GetBody != nil {
			if req.Body, err = req.GetBody(); err != nil {
				return nil, err
			}
		}
	}
}

func (c *kept) roundTrip(d *direct, req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // wakes whoever waits below
	werr := req.Write(c.w)
	if werr == nil {
		werr = c.w.Flush()
	}
	// A server that refuses a long request answers before it took it all.
	resp, err := http.ReadResponse(c.r, req)
	for err == nil && resp.StatusCode < 200 {
		resp, err = http.ReadResponse(c.r, req)
	}
	if err != nil {
		stop()
		_ = c.Close() // the error says more
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if werr != nil {
			return nil, werr
		}
		return nil, err
	}
	resp.Body = &answer{ReadCloser: resp.Body, c: c, d: d, stop: stop, again: werr == nil && !resp.Close}
	return resp, nil
}

// answer is the body of a response; read to its end it frees the connection.
type answer struct {
	io.ReadCloser
	c     *kept
	d     *direct
	stop  func() bool
	again bool // the connection can be used again
	over  bool
}

func (a *answer) Read(p []byte) (int, error) {
	if a.over {
		return 0, io.EOF
	}
	n, err := a.ReadCloser.Read(p)
	if err != nil {
		a.end(errors.Is(err, io.EOF))
	}
	return n, err
}

// Close breaks a connection whose answer was not read to its end.
func (a *answer) Close() error {
	a.end(false)
	return nil
}

func (a *answer) end(whole bool) {
	if a.over {
		return
	}
	a.over = true
	// Once the context has ended the connection is being closed.
	if a.stop() && whole && a.again && a.c.r.Buffered() == 0 {
		a.d.put(a.c)
		return
	}
	_ = a.c.Close() // nothing more is wanted of it
}

// take returns a connection nobody uses, a new one where there is none.
func (d *direct) take(ctx context.Context) (*kept, error) {
	for {
		d.mu.Lock()
		n := len(d.idle)
		if n == 0 {
			d.mu.Unlock()
			break
		}
		c := d.idle[n-1]
		d.idle[n-1], d.idle = nil, d.idle[:n-1]
		d.mu.Unlock()
		if time.Since(c.since) < keptFor && c.silent() {
			return c, nil
		}
		_ = c.Close() // the server has closed it, or soon will
	}
	c, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	return &kept{Conn: c, r: bufio.NewReaderSize(c, keptRead), w: bufio.NewWriterSize(c, keptWrite)}, nil
}

// silent tells whether an idle connection is open and, as it must be, has
// nothing to read (recv(2), MSG_PEEK).
func (c *kept) silent() bool {
	sc, ok := c.Conn.(*net.UnixConn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	var b [1]byte
	var rerr error
	err = raw.Read(func(fd uintptr) bool {
		_, _, rerr = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return true
	})
	return err == nil && errors.Is(rerr, unix.EAGAIN)
}

func (d *direct) put(c *kept) {
	c.since = time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.idle) >= maxKept {
		_ = c.Close() // there are enough
		return
	}
	d.idle = append(d.idle, c)
	if d.sweep == nil {
		d.sweep = time.AfterFunc(keptFor, d.clean)
	}
}

// clean closes what was not used for long, and comes again while there is
// anything left.
func (d *direct) clean() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.idle = slices.DeleteFunc(d.idle, func(c *kept) bool {
		old := time.Since(c.since) >= keptFor
		if old {
			_ = c.Close() // unused
		}
		return old
	})
	d.sweep = nil
	if len(d.idle) > 0 {
		d.sweep = time.AfterFunc(keptFor, d.clean)
	}
}
