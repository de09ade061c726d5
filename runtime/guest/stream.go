package guest

import (
	"context"
	"io"
	"sync"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// IO is one connection to a process's streams. See sandbox.ProcessIO. Not
// calling Next holds the process back only for a while: a reader that takes
// nothing for two seconds loses the oldest output instead.
type IO struct {
	g    *Guest
	c    *conn
	proc sandbox.Process
	buf  []byte

	mu   sync.Mutex
	exit *sandbox.ExitStatus
	err  error // what Next returns from now on
}

var (
	_ sandbox.ProcessIO = (*IO)(nil)
	_ sandbox.Feeder    = (*IO)(nil)
)

// Exec starts a process and reads it from its first byte, in one round trip.
// Cancelling ctx closes the connection; the process goes on. Errors as Start.
func (g *Guest) Exec(ctx context.Context, spec sandbox.ProcessSpec) (*IO, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	return g.stream(ctx, initproto.OpExec, initproto.Exec{Spec: spec, Attach: true})
}

// Attach reads a process's output from offset on, negative for the oldest
// byte kept. Several may be attached at once. ErrNotFound: no such process.
func (g *Guest) Attach(ctx context.Context, id sandbox.ProcessID, offset int64) (*IO, error) {
	return g.stream(ctx, initproto.OpAttach, initproto.Attach{ID: id, Offset: offset})
}

func (g *Guest) stream(ctx context.Context, op string, args any) (*IO, error) {
	io := &IO{g: g}
	c, err := g.open(ctx, op, args, &io.proc)
	if err != nil {
		return nil, err
	}
	if err := checkProcess(io.proc); err != nil {
		_ = c.Close()
		return nil, err
	}
	io.c = c
	return io, nil
}

// Process returns the record as it was when the connection was made.
func (s *IO) Process() sandbox.Process { return s.proc }

// Next returns the next piece of output; io.EOF once the process has ended
// and everything was read.
func (s *IO) Next() (sandbox.Output, error) {
	s.mu.Lock()
	err := s.err
	s.mu.Unlock()
	if err != nil {
		return sandbox.Output{}, err
	}
	out, err := s.next()
	if err != nil {
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
		_ = s.c.Close()
	}
	return out, err
}

func (s *IO) next() (sandbox.Output, error) {
	fr, err := s.c.next(s.buf)
	if err != nil {
		return sandbox.Output{}, err
	}
	if cap(fr.Payload) > cap(s.buf) {
		s.buf = fr.Payload[:0]
	}
	switch fr.Type {
	case initproto.FrameOutput:
		stream, off, dropped, data, err := initproto.ParseOutput(fr.Payload)
		if err != nil {
			return sandbox.Output{}, broken(err)
		}
		return sandbox.Output{Stream: sandbox.Stream(stream), Offset: off, Dropped: dropped, Data: data}, nil
	case initproto.FrameExit:
		var e sandbox.ExitStatus
		if err := decode(fr.Payload, &e); err != nil {
			return sandbox.Output{}, err
		}
		if err := checkExit(e); err != nil {
			return sandbox.Output{}, err
		}
		s.mu.Lock()
		s.exit = &e
		s.mu.Unlock()
		s.c.last()
		return sandbox.Output{}, io.EOF
	}
	return sandbox.Output{}, unexpected(fr.Type)
}

// Exit tells how the process ended; false until Next returned io.EOF.
func (s *IO) Exit() (sandbox.ExitStatus, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit == nil {
		return sandbox.ExitStatus{}, false
	}
	return *s.exit, true
}

// WriteStdin writes to standard input or the terminal, waiting while the
// process does not read. What a process that closed its input is sent is lost.
func (s *IO) WriteStdin(p []byte) (int, error) {
	done := 0
	for len(p) > 0 {
		n := min(len(p), initproto.MaxData)
		if err := s.c.send(initproto.FrameStdin, p[:n]); err != nil {
			return done, err
		}
		done += n
		p = p[n:]
	}
	return done, nil
}

// Feed gives the process input on a connection of its own, piece by piece,
// and returns once its pipe has taken it.
func (s *IO) Feed(ctx context.Context, data []byte, end bool) error {
	for {
		n := min(len(data), initproto.MaxData)
		in := initproto.Input{ID: s.proc.ID, Data: data[:n], End: end && n == len(data)}
		if err := s.g.do(ctx, initproto.OpInput, in, nil); err != nil {
			return err
		}
		if data = data[n:]; len(data) == 0 {
			return nil
		}
	}
}

// CloseStdin ends standard input; on a terminal it sends end-of-file.
func (s *IO) CloseStdin() error { return s.c.send(initproto.FrameStdinEnd, nil) }

// Resize sets the terminal's size. It goes past unread input, on a
// connection of its own.
func (s *IO) Resize(size sandbox.WindowSize) error {
	ctx, cancel := context.WithTimeout(context.Background(), shortOp)
	defer cancel()
	_, err := s.g.target(ctx, initproto.OpResize, initproto.Target{ID: s.proc.ID, Size: &size})
	return err
}

// Signal signals the process's whole tree, past unread input too.
func (s *IO) Signal(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), shortOp)
	defer cancel()
	return s.g.Signal(ctx, s.proc.ID, name)
}

// Close lets go of the connection; the process goes on.
func (s *IO) Close() error { return s.c.Close() }
