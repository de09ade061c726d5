package initd

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// maxSessions bounds the senders of input a process remembers, besides the one
// that started it.
const maxSessions = 64

// session is what a process has of one sender's standard input. A sender that
// comes back on another connection, after the daemon restarted, goes on in it,
// while the connection before may still hold bytes of it. The process's inMu
// guards it.
type session struct {
	id    int64
	taken int64
	ended bool
}

// open returns a sender's session.
func (p *process) open(id int64) *session {
	p.inMu.Lock()
	defer p.inMu.Unlock()
	for _, s := range p.sessions {
		if s.id == id {
			return s
		}
	}
	s := &session{id: id}
	if p.sessions = append(p.sessions, s); len(p.sessions) > maxSessions {
		p.sessions = append(p.sessions[:1], p.sessions[2:]...) // the first one started it
	}
	return s
}

// takeAt writes data that stands at an offset of a session's input, but for what
// was taken before.
func (p *process) takeAt(s *session, at int64, data []byte) error {
	p.writing.Lock()
	defer p.writing.Unlock()
	p.inMu.Lock()
	skip := s.taken - at
	p.inMu.Unlock()
	switch {
	case skip < 0:
		return fmt.Errorf("%w: input at %d, with %d bytes missing before it", initproto.ErrFrame, at, -skip)
	case skip >= int64(len(data)):
		return nil
	}
	_ = p.write(data[skip:]) // what nobody reads any more is taken, too
	p.inMu.Lock()
	s.taken = at + int64(len(data))
	p.inMu.Unlock()
	return nil
}

// endOf is the end of a session's input, once.
func (p *process) endOf(s *session) {
	p.inMu.Lock()
	again := s.ended
	s.ended = true
	p.inMu.Unlock()
	if !again {
		p.endStdin()
	}
}

// tellTaken says how much of a session's input was taken, unless the operation
// has ended meanwhile.
func (p *process) tellTaken(c *conn, s *session) error {
	p.inMu.Lock()
	b := initproto.AppendTaken(nil, s.taken, p.stdin == nil || p.deaf)
	p.inMu.Unlock()
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.expecting.Load() {
		return nil
	}
	_, err := c.f.Write(b)
	return err
}

// takeInput passes input on until the connection ends or the next request
// comes, which it leaves in c.next.
func (p *process) takeInput(c *conn) error {
	var buf []byte
	var s *session
	for {
		fr, err := initproto.ReadFrame(c.in, initproto.Daemon, buf)
		if err != nil {
			return nil
		}
		switch fr.Type {
		case initproto.FrameStdin:
			// Input nobody reads any more is not an error of the reader of output.
			_ = p.writeStdin(fr.Payload)
		case initproto.FrameStdinOpen, initproto.FrameStdinAt:
			at, data, err := initproto.ParseStdinHead(fr.Payload)
			switch {
			case err != nil:
				return err
			case fr.Type == initproto.FrameStdinOpen:
				s = p.open(at)
			case s == nil:
				return fmt.Errorf("%w: input of no session", initproto.ErrFrame)
			default:
				if err := p.takeAt(s, at, data); err != nil {
					return err
				}
			}
			if p.tellTaken(c, s) != nil {
				continue // what came before the daemon went is still taken
			}
		case initproto.FrameStdinEnd:
			if s != nil {
				p.endOf(s)
				continue
			}
			p.endStdin()
		default:
			req, err := c.parse(fr)
			if err == nil {
				c.next = &req
			}
			return err
		}
		buf = nil
		if cap(fr.Payload) <= 128<<10 {
			buf = fr.Payload[:0]
		}
	}
}

// writeStdin writes all of b, waiting while the process does not read.
func (p *process) writeStdin(b []byte) error {
	p.writing.Lock()
	defer p.writing.Unlock()
	return p.write(b)
}

// write is writeStdin for one that holds p.writing.
func (p *process) write(b []byte) error {
	p.inMu.Lock()
	f := p.stdin
	p.inMu.Unlock()
	if f == nil {
		return sandbox.Errorf(sandbox.ErrConflict, "stdin_closed", "process %s has no open standard input", p.rec.ID)
	}
	n, err := f.Write(b)
	closed := errors.Is(err, unix.EPIPE) || errors.Is(err, os.ErrClosed) || errors.Is(err, unix.EIO)
	p.inMu.Lock()
	p.inBytes += int64(n)
	p.deaf = p.deaf || closed
	p.inMu.Unlock()
	switch {
	case err == nil:
		return nil
	case closed:
		return sandbox.Errorf(sandbox.ErrConflict, "stdin_closed", "process %s has closed its standard input", p.rec.ID)
	}
	return sandbox.Errorf(sandbox.ErrUnavailable, "stdin_failed", "writing to process %s: %w", p.rec.ID, err)
}

// endStdin is the client's end of input: a pipe is closed, a terminal gets
// its end-of-file character.
func (p *process) endStdin() {
	if p.tty != nil {
		const endOfFile = 4 // ^D, termios(3) VEOF
		_ = p.writeStdin([]byte{endOfFile})
		return
	}
	p.closeStdin()
}

func (p *process) closeStdin() {
	p.inMu.Lock()
	f := p.stdin
	p.stdin = nil
	p.inMu.Unlock()
	if f != nil && f != p.tty {
		_ = f.Close()
	}
}

// stdinBytes is how much the process was given in all.
func (p *process) stdinBytes() int64 {
	p.inMu.Lock()
	defer p.inMu.Unlock()
	return p.inBytes
}
