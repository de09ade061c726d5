package initd

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// requestDeadline bounds the wait for a connection's first frame.
const requestDeadline = 10 * time.Second

// conn is one connection of the daemon's. It uses os.File and raw calls: the
// net package would cost every sandbox memory for nothing.
type conn struct {
	f   *os.File
	raw syscall.RawConn
	in  *bufio.Reader
	// Only the goroutine that reads touches these.
	fds  []*os.File         // came with the request; whoever takes one sets it nil
	next *initproto.Request // read already

	// expecting is set while a request may come: what it brings are then the
	// descriptors of that request, else they are dropped by the kernel.
	expecting atomic.Bool
	keep      bool        // the present operation is to be followed by another
	used      bool        // an operation has ended
	large     bool        // the send buffer was grown
	ended     atomic.Bool // by shut

	wmu    sync.Mutex
	corked bool   // frames are held until the answer is complete
	held   []byte // those frames
}

func newConn(fd int) (*conn, error) {
	f := os.NewFile(uintptr(fd), "daemon")
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("taking a connection: %w", err)
	}
	c := &conn{f: f, raw: raw}
	c.in = bufio.NewReaderSize(c, 4096)
	c.expecting.Store(true)
	return c, nil
}

// Read receives bytes, and descriptors up to the bound for one request.
func (c *conn) Read(p []byte) (int, error) {
	var n int
	var err error
	rerr := c.raw.Read(func(fd uintptr) bool {
		n, err = c.receive(int(fd), p)
		return !errors.Is(err, unix.EAGAIN)
	})
	switch {
	case rerr != nil:
		return 0, rerr
	case err != nil:
		return 0, err
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

func (c *conn) receive(fd int, p []byte) (int, error) {
	if !c.expecting.Load() {
		n, err := unix.Read(fd, p)
		return max(n, 0), err
	}
	oob := make([]byte, unix.CmsgSpace(4*initproto.MaxFDs))
	n, oobn, flags, _, err := unix.Recvmsg(fd, p, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, err
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return 0, fmt.Errorf("reading control data: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			c.fds = append(c.fds, os.NewFile(uintptr(fd), "received"))
		}
	}
	if flags&unix.MSG_CTRUNC != 0 || len(c.fds) > initproto.MaxFDs {
		return 0, fmt.Errorf("%w: more than %d descriptors", initproto.ErrFrame, initproto.MaxFDs)
	}
	return n, nil
}

// request reads the next request. The first must come soon; before a later
// one, input for a process that has ended is dropped. The end of a kept
// connection is io.EOF.
func (c *conn) request() (initproto.Request, error) {
	if c.next != nil {
		req := *c.next
		c.next = nil
		return req, nil
	}
	if !c.used {
		_ = c.f.SetReadDeadline(time.Now().Add(requestDeadline))
		defer func() { _ = c.f.SetReadDeadline(time.Time{}) }()
	}
	for {
		fr, err := initproto.ReadFrame(c.in, initproto.Daemon, nil)
		if err != nil {
			return initproto.Request{}, err
		}
		switch fr.Type {
		case initproto.FrameStdin, initproto.FrameStdinEnd, initproto.FrameStdinOpen, initproto.FrameStdinAt:
			if c.used {
				continue // too late
			}
		}
		return c.parse(fr)
	}
}

func (c *conn) parse(fr initproto.Frame) (initproto.Request, error) {
	var req initproto.Request
	if fr.Type != initproto.FrameRequest || !c.expecting.Load() {
		return req, fmt.Errorf("%w: frame of type %#02x in place of a request", initproto.ErrFrame, byte(fr.Type))
	}
	if err := json.Unmarshal(fr.Payload, &req); err != nil {
		return req, sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "request: %w", err)
	}
	return req, initproto.CheckVersion("daemon", req.Version)
}

// expect says that the operation is over but for its last frames: they must
// be sent after it, since the next request may be their answer.
func (c *conn) expect() {
	c.used = true
	c.expecting.Store(true)
}

// idle sends what is held, and that another request may follow.
func (c *conn) idle() error {
	c.expect()
	c.wmu.Lock()
	defer c.wmu.Unlock()
	b, err := initproto.AppendFrame(c.held, initproto.FrameIdle, nil)
	if err != nil {
		return err
	}
	c.held, c.corked = nil, false
	_, err = c.f.Write(b)
	return err
}

// takeFD hands over the next descriptor of the request.
func (c *conn) takeFD(what string) (*os.File, error) {
	if len(c.fds) == 0 {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "no descriptor came for the %s", what)
	}
	f := c.fds[0]
	c.fds = c.fds[1:]
	return f, nil
}

// noMoreFDs closes what nobody took; later ones are refused by the kernel.
func (c *conn) noMoreFDs() {
	for _, f := range c.fds {
		_ = f.Close()
	}
	c.fds = nil
	c.expecting.Store(false)
}

func (c *conn) send(t initproto.FrameType, payload []byte) error {
	b, err := initproto.AppendFrame(make([]byte, 0, initproto.HeaderSize+len(payload)), t, payload)
	if err != nil {
		return err
	}
	return c.write(b)
}

// holdMost is how much of an answer is held back.
const holdMost = 32 << 10

// write sends whole frames, or holds them for a while if the connection is
// corked.
func (c *conn) write(b []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.corked {
		c.held = append(c.held, b...)
		if len(c.held) < holdMost {
			return nil
		}
		b, c.held = c.held, nil
	}
	_, err := c.f.Write(b)
	return err
}

// uncork sends what is held.
func (c *conn) uncork() {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if len(c.held) > 0 {
		_, _ = c.f.Write(c.held)
	}
	c.held, c.corked = nil, false
}

func (c *conn) sendJSON(t initproto.FrameType, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding a reply: %w", err)
	}
	return c.send(t, b)
}

func (c *conn) reply(v any) error { return c.sendJSON(initproto.FrameResponse, v) }

func (c *conn) fail(err error) {
	c.uncork()
	_ = c.sendJSON(initproto.FrameError, initproto.FromError(err))
}

// unsent tells how many bytes the other side has not yet read.
func (c *conn) unsent() int {
	n := 0
	_ = c.raw.Control(func(fd uintptr) {
		n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
	})
	return n
}

// growSendBuffer asks for twice the usual room, the most one without rights
// over the host gets: fewer changes between writer and reader.
func (c *conn) growSendBuffer() {
	if c.large {
		return
	}
	c.large = true
	const most = 1 << 20 // cut to net.core.wmem_max by the kernel
	_ = c.raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, most) })
}

// shut ends both directions; blocked reads and writes return.
func (c *conn) shut() {
	c.ended.Store(true)
	_ = c.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
}

// stopped tells work that reads and writes nothing of the end.
func (c *conn) stopped() error {
	if c.ended.Load() {
		return io.ErrClosedPipe
	}
	return nil
}

func (c *conn) close() {
	c.noMoreFDs()
	_ = c.f.Close()
}

// untilHangup reads and drops what comes until the other side has gone.
func (c *conn) untilHangup() {
	var buf [512]byte
	for {
		if _, err := initproto.ReadFrame(c.in, initproto.Daemon, buf[:0]); err != nil {
			return
		}
	}
}
