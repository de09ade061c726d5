package guest

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"sync/atomic"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

// IO is one connection to a process's streams. See sandbox.ProcessIO. Not
// calling Next holds the process back only for a while: a reader that takes
// nothing for two seconds loses the oldest output instead.
type IO struct {
	g    *Guest
	c    *conn
	tab  *tab
	proc sandbox.Process
	// Only the goroutine that calls Next uses these.
	buf   []byte
	left  int            // bytes of the present Output frame that were not returned yet
	where sandbox.Output // where they stand

	mu    sync.Mutex
	exit  *sandbox.ExitStatus
	err   error // what Next returns from now on
	large bool  // pieces may be as large as frames, which is charged
	shut  bool  // nothing is charged any more
	taken func(total int64, closed bool)

	inMu sync.Mutex   // held while a piece of input is sent
	at   atomic.Int64 // offset of the next one in the session; -1 without one
}

var (
	_ sandbox.ProcessIO = (*IO)(nil)
	_ sandbox.Feeder    = (*IO)(nil)

	_ sandbox.StdinSession = (*IO)(nil)
)

// Exec starts a process and reads it from its first byte, in one round trip.
// Cancelling ctx closes the connection; the process goes on. Errors as Start.
func (g *Guest) Exec(ctx context.Context, spec sandbox.ProcessSpec) (*IO, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	return g.stream(ctx, initproto.OpExec, initproto.Exec{Spec: spec, Attach: true, Key: keyOf(spec)})
}

// Attach reads a process's output from offset on, negative for the oldest
// byte kept. Several may be attached at once. ErrNotFound: no such process.
func (g *Guest) Attach(ctx context.Context, id sandbox.ProcessID, offset int64) (*IO, error) {
	return g.stream(ctx, initproto.OpAttach, initproto.Attach{ID: id, Offset: offset})
}

func (g *Guest) stream(ctx context.Context, op string, args any) (*IO, error) {
	io := &IO{g: g, tab: tabOf(ctx)}
	io.at.Store(-1)
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
		_ = s.Close()
	}
	return out, err
}

func (s *IO) next() (sandbox.Output, error) {
	if s.left > 0 {
		return s.piece()
	}
	t, n, err := s.c.head()
	for ; err == nil && t == initproto.FrameTaken; t, n, err = s.c.head() {
		p, err := initproto.ReadPayload(s.c.in, n, nil)
		if err != nil {
			return sandbox.Output{}, s.c.fail(err)
		}
		if err := s.told(p); err != nil {
			return sandbox.Output{}, err
		}
	}
	if err != nil {
		return sandbox.Output{}, err
	}
	switch t {
	case initproto.FrameOutput:
		var head [initproto.OutputHead]byte
		if err := s.c.data(head[:min(n, len(head))]); err != nil {
			return sandbox.Output{}, err
		}
		stream, off, dropped, _, err := initproto.ParseOutput(head[:min(n, len(head))])
		if err != nil {
			return sandbox.Output{}, broken(err)
		}
		s.left, s.where = n-len(head), sandbox.Output{Stream: sandbox.Stream(stream), Offset: off, Dropped: dropped}
		return s.piece()
	case initproto.FrameExit:
		var e sandbox.ExitStatus
		p, err := initproto.ReadPayload(s.c.in, n, nil)
		if err != nil {
			return sandbox.Output{}, s.c.fail(err)
		}
		if err := decode(p, &e); err != nil {
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
	return sandbox.Output{}, unexpected(t)
}

// grow tells whether pieces may be large.
func (s *IO) grow() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.large = s.large || !s.shut && s.tab.spare(largePiece)
	return s.large
}

// piece returns the next part of an Output frame: all of it, or where it is
// large and the account has no room for that, a little of it.
func (s *IO) piece() (sandbox.Output, error) {
	most := initproto.MaxData
	if s.left > smallPiece && !s.grow() {
		most = smallPiece
	}
	n := min(s.left, most)
	if cap(s.buf) < n {
		s.buf = make([]byte, n)
	}
	if err := s.c.data(s.buf[:n]); err != nil {
		return sandbox.Output{}, err
	}
	out := s.where
	out.Data = s.buf[:n]
	s.left -= n
	s.where.Offset, s.where.Dropped = s.where.Offset+int64(n), 0
	return out, nil
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

// OpenStdin implements sandbox.StdinSession.
func (s *IO) OpenStdin(id int64, taken func(total int64, closed bool)) error {
	s.mu.Lock()
	s.taken = taken
	s.mu.Unlock()
	return s.c.send(initproto.FrameStdinOpen, binary.BigEndian.AppendUint64(nil, uint64(id)))
}

// told takes what PID 1 says of the session.
func (s *IO) told(payload []byte) error {
	total, closed, err := initproto.ParseTaken(payload)
	s.mu.Lock()
	taken := s.taken
	s.mu.Unlock()
	if err != nil || taken == nil {
		return broken(errors.Join(initproto.ErrFrame, err))
	}
	// Not under inMu: a piece may wait there until PID 1 reads, which may wait
	// until this goes on reading.
	s.at.CompareAndSwap(-1, total)
	taken(total, closed)
	return nil
}

// WriteStdin writes to standard input or the terminal, waiting while the
// process does not read. What a process that closed its input is sent is lost.
func (s *IO) WriteStdin(p []byte) (int, error) {
	s.inMu.Lock()
	defer s.inMu.Unlock()
	done := 0
	for len(p) > 0 {
		n := min(len(p), initproto.MaxData)
		kind, head := initproto.FrameStdin, []byte(nil)
		if at := s.at.Load(); at >= 0 {
			kind, head = initproto.FrameStdinAt, binary.BigEndian.AppendUint64(nil, uint64(at))
			s.at.Store(at + int64(n))
		}
		if err := s.c.send(kind, head, p[:n]); err != nil {
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
func (s *IO) CloseStdin() error { return s.c.send(initproto.FrameStdinEnd) }

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
func (s *IO) Close() error {
	s.mu.Lock()
	if s.large {
		s.tab.give(largePiece)
	}
	s.large, s.shut = false, true
	s.mu.Unlock()
	return s.c.Close()
}
