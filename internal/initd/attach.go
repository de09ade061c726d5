package initd

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// streamBuffer is how much output goes out with one write. While a reader
// waits it holds none.
const streamBuffer = 128 << 10

func (s *Server) attach(c *conn, a initproto.Attach) error {
	p, err := s.procs.get(a.ID)
	if err != nil {
		return err
	}
	return s.stream(c, p, a.Offset)
}

// stream serves a process's output from off, and takes its input, until the
// output ends or the other side hangs up. If the connection is kept it returns
// with the next request read.
func (s *Server) stream(c *conn, p *process, off int64) error {
	p.readers.Add(1)
	c.growSendBuffer()
	rd := p.out.attach(off, c.unsent)
	if err := c.reply(p.record(s.procs)); err != nil {
		s.endReading(p, rd)
		return nil
	}
	go s.sendStream(c, p, rd, c.keep)
	err := p.takeInput(c)
	rd.detach()
	return err
}

func (s *Server) endReading(p *process, rd *ringReader) {
	rd.detach()
	p.readers.Add(-1)
	s.procs.trim()
}

// sendStream sends the output and how the process ended. Where the connection
// is not kept it then ends it, and so the taking of input. The next operation
// may have begun before the last write returns.
func (s *Server) sendStream(c *conn, p *process, rd *ringReader, keep bool) {
	defer s.endReading(p, rd)
	for {
		more := rd.wait()
		done, err := p.sendOutput(s.procs, c, rd, more, keep)
		if done && err == nil && keep {
			return
		}
		if done || err != nil {
			c.shut()
			return
		}
	}
}

// sendOutput sends what there is, up to a buffer full, in one write, and after
// the last of it how the process ended; done tells that this was it.
func (p *process) sendOutput(t *table, c *conn, rd *ringReader, more, keep bool) (done bool, err error) {
	const head = initproto.HeaderSize + initproto.OutputHead
	var b []byte
	if more {
		// Room for the heads of some pieces, too.
		buffers := buffersFor(rd.pending() + 1<<10)
		bp := buffers.Get().(*[]byte) //nolint:errcheck // the pool holds nothing else
		defer buffers.Put(bp)
		b = (*bp)[:0:min(len(*bp), streamBuffer)]
	}
	for more && cap(b)-len(b) > head+512 {
		used := len(b)
		all := b[:cap(b)]
		pc, ok := rd.take(all[used+head:])
		if !ok {
			break
		}
		initproto.PutHeader(all[used:], initproto.FrameOutput, initproto.OutputHead+pc.n)
		initproto.PutOutputHead(all[used+initproto.HeaderSize:], byte(pc.stream), pc.off, pc.dropped)
		b = all[:used+head+pc.n]
	}
	if rd.ended() {
		done = true
		if b, err = p.appendExit(t, c, b, keep); err != nil {
			return true, err
		}
	}
	if len(b) == 0 {
		return true, nil // the reader was ended: there is nobody to tell
	}
	return done, c.write(b)
}

// appendExit adds the frames after the last output.
func (p *process) appendExit(t *table, c *conn, b []byte, keep bool) ([]byte, error) {
	exit := p.record(t).Exit
	if exit == nil {
		return b, fmt.Errorf("the output of %s ended before it did: %w", p.rec.ID, io.ErrUnexpectedEOF)
	}
	body, err := json.Marshal(exit)
	if err != nil {
		return b, fmt.Errorf("encoding an exit: %w", err)
	}
	if b, err = initproto.AppendFrame(b, initproto.FrameExit, body); err != nil || !keep {
		return b, err
	}
	c.expect()
	return initproto.AppendFrame(b, initproto.FrameIdle, nil)
}

// pending tells how much there is to take now.
func (rd *ringReader) pending() int {
	r := rd.r
	r.mu.Lock()
	defer r.mu.Unlock()
	return int(min(r.end-rd.pos, r.size))
}

// ended tells that everything was taken and nothing will follow.
func (rd *ringReader) ended() bool {
	r := rd.r
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.closed && !rd.gone && rd.pos >= r.end
}

// input gives a process input outside a stream, and answers once its pipe has
// taken all: what comes one after the other stays in that order.
func (s *Server) input(c *conn, a initproto.Input) error {
	p, err := s.procs.get(a.ID)
	if err != nil {
		return err
	}
	if len(a.Data) > 0 {
		if err := p.writeStdin(a.Data); err != nil {
			return err
		}
	}
	if a.End {
		p.endStdin()
	}
	return c.reply(struct{}{})
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
		if ok && !slices.ContainsFunc(evs, pressing) {
			<-time.After(gatherEvents)
			evs, ok = t.eventsAfter(seq, &stop)
		}
		if !ok {
			return nil
		}
		if err := c.sendEvents(evs); err != nil {
			return nil
		}
		seq = evs[len(evs)-1].Seq
	}
}

// gatherEvents is how long an event waits for others to go with, most often
// the end of the process whose start it tells: each message wakes the daemon.
const gatherEvents = 5 * time.Millisecond

// pressing tells events that somebody waits for.
func pressing(e initproto.Event) bool {
	return e.Process == nil || e.Process.Main && e.Type == initproto.EventExited
}

// sendEvents sends events with one write.
func (c *conn) sendEvents(all []initproto.Event) error {
	var b []byte
	for _, e := range all {
		body, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("encoding an event: %w", err)
		}
		if b, err = initproto.AppendFrame(b, initproto.FrameItem, body); err != nil {
			return err
		}
	}
	return c.write(b)
}
