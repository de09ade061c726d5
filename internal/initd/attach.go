package initd

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// streamBuffer is how much output goes out with one write. While a reader
// waits it holds none.
const streamBuffer = 128 << 10

var streamBuffers = sync.Pool{New: func() any { b := make([]byte, streamBuffer); return &b }}

func (s *Server) attach(c *conn, a initproto.Attach) error {
	p, err := s.procs.get(a.ID)
	if err != nil {
		return err
	}
	return s.stream(c, p, a.Offset)
}

// stream serves a process's output from off, and takes its input, until the
// output ends or the other side hangs up.
func (s *Server) stream(c *conn, p *process, off int64) error {
	p.readers.Add(1)
	defer func() {
		p.readers.Add(-1)
		s.procs.trim()
	}()
	c.growSendBuffer()
	rd := p.out.attach(off, c.unsent)
	defer rd.detach()
	if err := c.reply(p.record(s.procs)); err != nil {
		return nil
	}
	go func() {
		p.takeInput(c)
		rd.detach()
		c.shut()
	}()
	for rd.wait() {
		if err := p.sendOutput(c, rd); err != nil {
			return nil
		}
	}
	if rec := p.record(s.procs); rec.Exit != nil && !rd.left() {
		return c.sendJSON(initproto.FrameExit, rec.Exit)
	}
	return nil
}

// takeInput passes input on until the connection ends.
func (p *process) takeInput(c *conn) {
	var buf []byte
	for {
		fr, err := initproto.ReadFrame(c.in, initproto.Daemon, buf)
		if err != nil {
			return
		}
		switch fr.Type {
		case initproto.FrameStdin:
			// Input nobody reads any more is not an error of the reader of output.
			_ = p.writeStdin(fr.Payload)
			buf = nil
			if cap(fr.Payload) <= 64<<10 {
				buf = fr.Payload[:0]
			}
		case initproto.FrameStdinEnd:
			p.endStdin()
		}
	}
}

// sendOutput sends what there is, up to a buffer full, in one write.
func (p *process) sendOutput(c *conn, rd *ringReader) error {
	const head = initproto.HeaderSize + initproto.OutputHead
	bp := streamBuffers.Get().(*[]byte) //nolint:errcheck // the pool holds nothing else
	defer streamBuffers.Put(bp)
	b, used := *bp, 0
	for len(b)-used > head+512 {
		pc, ok := rd.take(b[used+head:])
		if !ok {
			break
		}
		initproto.PutHeader(b[used:], initproto.FrameOutput, initproto.OutputHead+pc.n)
		initproto.PutOutputHead(b[used+initproto.HeaderSize:], byte(pc.stream), pc.off, pc.dropped)
		used += head + pc.n
	}
	return c.write(b[:used])
}

// left tells whether the reader itself has gone.
func (rd *ringReader) left() bool {
	rd.r.mu.Lock()
	defer rd.r.mu.Unlock()
	return rd.gone
}

// target runs the short operations on one process.
func (s *Server) target(c *conn, op string, a initproto.Target) error {
	p, err := s.procs.get(a.ID)
	if err != nil {
		return err
	}
	switch op {
	case initproto.OpSignal:
		sig := unix.SignalNum(a.Signal)
		if sig == 0 {
			return sandbox.Errorf(sandbox.ErrInvalid, "invalid_signal", "signal %.32q: use a name such as SIGTERM", a.Signal)
		}
		if err := p.signal(s.procs, sig); err != nil {
			return err
		}
	case initproto.OpResize:
		if a.Size == nil {
			return sandbox.Errorf(sandbox.ErrInvalid, "bad_request", "resize without a size")
		}
		if err := p.resize(*a.Size); err != nil {
			return err
		}
	case initproto.OpForget:
		s.forget(p)
	}
	return c.reply(p.record(s.procs))
}

// forget ends what is left of a process and drops its record.
func (s *Server) forget(p *process) {
	_ = p.signal(s.procs, unix.SIGKILL)
	const patience = 5 * time.Second
	deadline := time.Now().Add(patience)
	wake := time.AfterFunc(patience, func() {
		s.procs.mu.Lock()
		s.procs.changed.Broadcast()
		s.procs.mu.Unlock()
	})
	defer wake.Stop()
	t := s.procs
	t.mu.Lock()
	defer t.mu.Unlock()
	for time.Now().Before(deadline) {
		if p.exit != nil {
			p.dropGroupLocked(t)
			if p.group == nil {
				break
			}
		}
		t.changed.Wait()
	}
	if p.exit != nil {
		t.dropLocked(p)
	}
}

func (s *Server) list(c *conn) error {
	if err := c.reply(struct{}{}); err != nil {
		return nil
	}
	for _, rec := range s.procs.records() {
		if err := c.sendJSON(initproto.FrameItem, rec); err != nil {
			return nil
		}
	}
	return c.send(initproto.FrameEnd, nil)
}

// events sends the changes in the process table until the other side hangs up.
func (s *Server) events(c *conn, a initproto.EventsAfter) error {
	t := s.procs
	if err := c.reply(s.info()); err != nil {
		return nil
	}
	stop := false
	go func() {
		c.untilHangup()
		t.mu.Lock()
		stop = true
		t.changed.Broadcast()
		t.mu.Unlock()
	}()
	seq := max(a.After, 0)
	for {
		evs, ok := t.eventsAfter(seq, &stop)
		if !ok {
			return nil
		}
		for _, e := range evs {
			if err := c.sendJSON(initproto.FrameItem, e); err != nil {
				return nil
			}
			seq = e.Seq
		}
	}
}
