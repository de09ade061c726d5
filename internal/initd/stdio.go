package initd

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// A pipe begins with the kernel's 64 KiB and is made larger once it was
	// found full: all users of a kernel user id share a budget of pipe pages,
	// and past it new pipes get two pages only (pipe(7)).
	firstPipeSize = 64 << 10
	pipeSize      = 1 << 20   // asked for; the kernel may give less
	pumpBuffer    = 256 << 10 // one read's most
	smallBuffer   = 4 << 10   // what a process that writes little gets by with
)

// stdio is the plumbing of one process: the child's ends, closed once it is
// forked, and ours.
type stdio struct {
	child   []int // stdin, stdout, stderr; plain numbers: nothing here waits on them
	lent    bool  // child is the caller's to close
	stdin   *os.File
	tty     *os.File
	outputs []*os.File
}

func openStdio(spec sandbox.ProcessSpec, acc account) (*stdio, error) {
	st := &stdio{}
	var err error
	if spec.TTY != nil {
		err = st.openTerminal(*spec.TTY, acc)
	} else {
		err = st.openPipes(spec.Stdin)
	}
	if err != nil {
		st.closeChild()
		st.closeOurs()
		return nil, sandbox.Errorf(sandbox.ErrUnavailable, "stdio_failed", "opening the streams of a process: %w", err)
	}
	return st, nil
}

func (st *stdio) openPipes(stdin bool) error {
	if stdin {
		theirs, ours, err := pipe(0, 1)
		if err != nil {
			return err
		}
		st.child, st.stdin = append(st.child, theirs), ours
	} else {
		null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("opening /dev/null: %w", err)
		}
		st.child = append(st.child, null)
	}
	for range 2 {
		theirs, ours, err := pipe(1, 0)
		if err != nil {
			return err
		}
		st.child, st.outputs = append(st.child, theirs), append(st.outputs, ours)
	}
	return nil
}

// pipe makes a pipe and returns the child's end and ours, which alone does
// not block; 0 is the end to read from, 1 the one to write to.
func pipe(theirs, ours int) (child int, file *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return -1, nil, fmt.Errorf("making a pipe: %w", err)
	}
	if err := unix.SetNonblock(fds[theirs], false); err != nil {
		_ = unix.Close(fds[0])
		_ = unix.Close(fds[1])
		return -1, nil, fmt.Errorf("making a pipe's end blocking: %w", err)
	}
	return fds[theirs], os.NewFile(uintptr(fds[ours]), "pipe"), nil
}

// openTerminal opens a new terminal of the sandbox's own devpts. The name is
// checked to be the multiplexer: what stands in /dev is the user's to change.
func (st *stdio) openTerminal(size sandbox.WindowSize, acc account) error {
	how := unix.OpenHow{Flags: unix.O_RDWR | unix.O_NOCTTY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	fd, err := unix.Openat2(unix.AT_FDCWD, "/dev/pts/ptmx", &how)
	if err != nil {
		return fmt.Errorf("opening /dev/pts/ptmx: %w", err)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFCHR || stat.Rdev != unix.Mkdev(5, 2) {
		_ = unix.Close(fd)
		return errors.New("/dev/pts/ptmx is not the terminal multiplexer: is devpts mounted?")
	}
	st.tty = os.NewFile(uintptr(fd), "terminal")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return fmt.Errorf("unlocking the terminal: %w", err)
	}
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return fmt.Errorf("opening the terminal's other side: %w", errno)
	}
	st.child = []int{int(peer), int(peer), int(peer)}
	st.stdin, st.outputs = st.tty, []*os.File{st.tty}
	if err := unix.Fchown(int(peer), int(acc.uid), -1); err != nil {
		return fmt.Errorf("giving the terminal to user %d: %w", acc.uid, err)
	}
	return setWindow(st.tty, size)
}

func setWindow(tty *os.File, size sandbox.WindowSize) error {
	raw, err := tty.SyscallConn()
	if err != nil {
		return err
	}
	var ierr error
	err = raw.Control(func(fd uintptr) {
		ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: size.Cols, Row: size.Rows})
	})
	return errors.Join(err, ierr)
}

func (st *stdio) childFDs() []uintptr {
	fds := make([]uintptr, len(st.child))
	for i, fd := range st.child {
		fds[i] = uintptr(fd)
	}
	return fds
}

func (st *stdio) closeChild() {
	if !st.lent {
		closeFDs(slices.Compact(st.child)) // a terminal is there three times
	}
	st.child = nil
}

func (st *stdio) closeOurs() {
	for _, f := range append(st.outputs, st.stdin, st.tty) {
		if f != nil {
			_ = f.Close()
		}
	}
}

var (
	pumpBuffers  = sync.Pool{New: func() any { b := make([]byte, pumpBuffer); return &b }}
	smallBuffers = sync.Pool{New: func() any { b := make([]byte, smallBuffer); return &b }}
)

// buffersFor returns the pool of buffers for about n bytes at once.
func buffersFor(n int) *sync.Pool {
	if n < smallBuffer {
		return &smallBuffers
	}
	return &pumpBuffers
}

// pump moves one stream into the ring until it ends, or until the grace
// after the main process's end is over; then what the pipe holds is still
// read, but no more than a pipe can hold. No buffer is held while there is
// nothing to read.
func (p *process) pump(t *table, f *os.File, stream sandbox.Stream) {
	defer p.partEnded(t)
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	for n, grown := 0, p.tty != nil; ; {
		if n, err = p.pumpOnce(raw.Read, stream, buffersFor(n)); err != nil {
			break
		}
		if n >= firstPipeSize && !grown {
			grown = true
			_ = raw.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) })
		}
	}
	if errors.Is(err, errEnd) || !p.ended() {
		return
	}
	for left := pipeSize; left > 0; {
		n := p.drainOnce(raw.Control, stream)
		if n <= 0 {
			return
		}
		left -= n
	}
}

func (p *process) ended() bool { return p.exited.Load() }

func (p *process) pumpOnce(read func(func(uintptr) bool) error, stream sandbox.Stream, buffers *sync.Pool) (int, error) {
	var n int
	var rerr error
	var buf *[]byte
	err := read(func(fd uintptr) bool {
		buf = buffers.Get().(*[]byte) //nolint:errcheck // the pool holds nothing else
		n, rerr = readFD(fd, *buf)
		if errors.Is(rerr, unix.EAGAIN) {
			buffers.Put(buf)
			buf = nil
			return false
		}
		return true
	})
	if buf == nil {
		return 0, err
	}
	defer buffers.Put(buf)
	switch {
	case err != nil:
		return 0, err
	case rerr != nil:
		return 0, rerr
	case n == 0:
		return 0, errEnd
	}
	p.out.write(stream, (*buf)[:n])
	return n, nil
}

var errEnd = errors.New("end of stream")

func (p *process) drainOnce(control func(func(uintptr)) error, stream sandbox.Stream) int {
	buf := pumpBuffers.Get().(*[]byte) //nolint:errcheck // the pool holds nothing else
	defer pumpBuffers.Put(buf)
	n := 0
	if err := control(func(fd uintptr) { n, _ = readFD(fd, *buf) }); err != nil || n <= 0 {
		return 0
	}
	p.out.write(stream, (*buf)[:n])
	return n
}

func readFD(fd uintptr, b []byte) (int, error) {
	for {
		n, err := unix.Read(int(fd), b)
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
