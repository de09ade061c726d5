package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of a connection. Streams live as long as they like; only what a
// client must send before its request is understood is timed.
const (
	headerTimeout = 10 * time.Second
	restTimeout   = 2 * time.Second // of a body that was answered already
	idleTimeout   = 2 * time.Minute
	maxHeader     = 64 << 10
)

// shutdownGrace is what requests in flight have to end by themselves; tests set it.
var shutdownGrace = 5 * time.Second

// serving is one run of Serve: streams watch drain, and Serve waits for
// those the HTTP server no longer knows.
type serving struct {
	drain chan struct{} // closed when streams are to end
	idle  chan struct{} // closed when, after that, none is left

	mu      sync.Mutex
	streams map[*live]bool
	fresh   map[net.Conn]bool // no request was read from them yet
	closing bool
}

// connections counts those of every Serve.
var connections atomic.Int64

// Connections returns how many connections are open, but for those that became
// WebSockets.
func Connections() int64 { return connections.Load() }

// state keeps fresh; http.Server calls it. Such connections hold a shutdown
// up for seconds, and a client's spare one never sends anything.
func (r *serving) state(c net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		connections.Add(1)
	case http.StateHijacked, http.StateClosed:
		connections.Add(-1)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if state != http.StateNew {
		delete(r.fresh, c)
		return
	}
	if r.closing {
		_ = c.Close() // the client tries again elsewhere
		return
	}
	r.fresh[c] = true
}

// live is a stream that Serve waits for.
type live struct {
	run  *serving // nil outside Serve
	stop func()   // run.mu; ends it, without waiting
}

// enter notes a stream; nil when the server takes no more.
func (r *serving) enter() *live {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closing {
		return nil
	}
	o := &live{run: r}
	r.streams[o] = true
	return o
}

// onDrain has stop called when the server wants its streams to end, at once
// if that has come already. It must not wait, and may be called when the
// stream has just ended by itself.
func (o *live) onDrain(stop func()) {
	if o.run == nil {
		return
	}
	o.run.mu.Lock()
	o.stop = stop
	now := o.run.closing
	o.run.mu.Unlock()
	if now {
		stop()
	}
}

// end notes the stream's end.
func (o *live) end() {
	r := o.run
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.streams, o)
	if r.closing && len(r.streams) == 0 {
		close(r.idle)
	}
}

// close asks the streams to end.
func (r *serving) close() {
	var stops []func()
	r.mu.Lock()
	r.closing = true
	close(r.drain)
	for c := range r.fresh {
		_ = c.Close() // nothing was asked on it
	}
	for o := range r.streams {
		if o.stop != nil {
			stops = append(stops, o.stop)
		}
	}
	if len(r.streams) == 0 {
		close(r.idle)
	}
	r.mu.Unlock()
	for _, stop := range stops {
		stop()
	}
}

type (
	servingKey struct{}
	peerKey    struct{}
)

// Serve answers ln's connections with h until ctx ends. Then it takes no
// more, asks streams to end, gives requests in flight a few seconds and
// breaks what is left. It returns nil after a shutdown, and never waits
// longer than about twice the grace.
func Serve(ctx context.Context, ln net.Listener, h http.Handler) error {
	run := &serving{drain: make(chan struct{}), idle: make(chan struct{}), streams: map[*live]bool{}, fresh: map[net.Conn]bool{}}
	// Requests must outlive ctx by the grace, so they hang on base.
	base, cancel := context.WithCancel(context.WithValue(context.WithoutCancel(ctx), servingKey{}, run))
	defer cancel()
	srv := &http.Server{
		Handler:           Hasty(h),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnState:         run.state,
		ConnContext:       ConnContext,
		ErrorLog:          slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(ln) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serving the API on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	run.close()
	grace, done := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer done()
	err := srv.Shutdown(grace)
	select {
	case <-run.idle:
	case <-grace.Done():
	}
	cancel()
	if err != nil {
		err = srv.Close()
	}
	if serr := <-failed; !errors.Is(serr, http.ErrServerClosed) {
		return errors.Join(err, serr)
	}
	return err
}

// ConnContext is of http.Server: its requests know their connection.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, peerKey{}, newPeer(c))
}

// Hasty bounds how long a client may take to send the rest of a body that was
// answered already: net/http reads on, so that the connection can be used
// again, and would wait as long as the client does.
func Hasty(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != http.NoBody {
			body := &whole{ReadCloser: r.Body}
			r.Body = body
			defer func() {
				if !body.read.Load() {
					_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(restTimeout)) // a recorder of tests has none
				}
			}()
		}
		h.ServeHTTP(w, r)
	})
}

// whole is a body that knows whether it was read to its end.
type whole struct {
	io.ReadCloser
	read atomic.Bool
}

// Read reads.
func (b *whole) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.read.Store(true)
	}
	return n, err
}

// draining returns a channel that is closed when the server wants its
// streams to end; nil, which blocks for ever, outside Serve.
func draining(ctx context.Context) <-chan struct{} {
	if run, ok := ctx.Value(servingKey{}).(*serving); ok {
		return run.drain
	}
	return nil
}

// streaming notes a stream that Serve must wait for, whose end is to be
// called; an error when the server is going down.
func streaming(ctx context.Context) (*live, error) {
	run, ok := ctx.Value(servingKey{}).(*serving)
	if !ok {
		return &live{}, nil
	}
	o := run.enter()
	if o == nil {
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "shutting_down", "the daemon is shutting down: try again in a moment")
	}
	return o, nil
}

// actorOf names who sent the request: the owner of what it makes.
func actorOf(ctx context.Context) string {
	if c, ok := access.Of(ctx); ok {
		return c.Owner
	}
	return peerOf(ctx).name()
}

// peerOf returns the other end of a request's connection.
func peerOf(ctx context.Context) peer {
	p, _ := ctx.Value(peerKey{}).(peer)
	return p
}

// newPeer looks who is at the other end of a connection: the uid the kernel
// noted when a unix socket was connected (unix(7), SO_PEERCRED).
func newPeer(c net.Conn) peer {
	p := peer{conn: c}
	if b, ok := c.(*boundedConn); ok {
		c = b.Conn
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return p
	}
	p.unix = true
	raw, err := uc.SyscallConn()
	if err != nil {
		return p
	}
	var cred *unix.Ucred
	var serr error
	if err := raw.Control(func(fd uintptr) {
		cred, serr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || serr != nil {
		return p
	}
	p.uid, p.known = cred.Uid, true
	return p
}
