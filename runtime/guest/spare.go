package guest

import (
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxSpare bounds the idle connections of one sandbox. Each costs PID 1
	// about 8 KiB while it lasts.
	maxSpare = 2
	// spareTime is how long one is kept.
	spareTime = 3 * time.Second
)

// spares are connections whose operation ended well, for the next ones: a
// connection made anew is a wake-up of PID 1 more.
type spares struct {
	mu    sync.Mutex
	conns []*conn // the one used last is last
	keep  bool    // until they are taken, not for a time
	timer *time.Timer
}

// take returns a connection that PID 1 has not left, or nil.
func (s *spares) take() *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.conns) > 0 {
		last := len(s.conns) - 1
		c := s.conns[last]
		s.conns = s.conns[:last]
		s.keep = false
		if c.quiet() {
			return c
		}
		_ = c.UnixConn.Close()
	}
	return nil
}

// give takes a connection into keeping, or closes it.
func (s *spares) give(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) >= maxSpare {
		_ = c.UnixConn.Close()
		return
	}
	s.conns = append(s.conns, c)
	if s.timer == nil {
		s.timer = time.AfterFunc(spareTime, s.expire)
		return
	}
	s.timer.Reset(spareTime)
}

func (s *spares) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.keep {
		s.dropLocked()
	}
}

func (s *spares) dropLocked() {
	for _, c := range s.conns {
		_ = c.UnixConn.Close()
	}
	s.conns, s.keep = nil, false // what is given later has its time again
}

// hold keeps what there is until it is used.
func (s *spares) hold() {
	s.mu.Lock()
	s.keep = true
	s.mu.Unlock()
}

// CloseIdle closes the connections kept for later operations. Repeating it is
// safe, and the guest can be used after it: call it where PID 1 ends, or
// where memory counts more than time.
func (g *Guest) CloseIdle() {
	g.spare.mu.Lock()
	defer g.spare.mu.Unlock()
	g.spare.dropLocked()
}

// quiet tells that the other side neither hung up nor sent anything since.
func (c *conn) quiet() bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	quiet := false
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		quiet = errors.Is(err, unix.EAGAIN)
	})
	return err == nil && quiet && c.in.Buffered() == 0
}
