package initd

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// guests are the programs inside that are connected to one of PID 1's sockets.
// They may send any descriptor, and PID 1 may be the last that has it: asked for
// or not, and also those in the queue of a unix socket that was sent.
type guests struct {
	raw  syscall.RawConn // of the listening socket
	mu   sync.Mutex
	here map[*guest]bool
}

type guest struct {
	f   *os.File
	raw syscall.RawConn

	mu  sync.Mutex // held to receive, too
	fds []int      // what the last packet brought
	cut bool       // its root is gone
}

func newGuests(l *os.File) (*guests, error) {
	raw, err := l.SyscallConn()
	return &guests{raw: raw, here: map[*guest]bool{}}, err
}

// accept takes the next one; leave is to be called.
func (g *guests) accept() (c *guest, err error) {
	rerr := g.raw.Read(func(fd uintptr) bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		var nfd int
		if nfd, _, err = unix.Accept4(int(fd), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK); err != nil {
			return !errors.Is(err, unix.EAGAIN)
		}
		c = &guest{f: os.NewFile(uintptr(nfd), "guest")}
		if c.raw, err = c.f.SyscallConn(); err == nil {
			g.here[c] = true
		}
		return true
	})
	return c, errors.Join(rerr, err)
}

func (g *guests) leave(c *guest) {
	g.mu.Lock()
	delete(g.here, c)
	g.mu.Unlock()
	c.drop()
	prod(func() { _ = c.f.Close() })
}

// clear drops all that guests of the old root have sent, so that nothing of it is
// held any more. None of its processes lives.
func (g *guests) clear() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	buf := make([]byte, 64<<10)
	prod(func() {
		_ = g.raw.Control(func(fd uintptr) {
			for {
				nfd, _, err := unix.Accept4(int(fd), unix.SOCK_CLOEXEC)
				if err != nil {
					return
				}
				_ = unix.Close(nfd)
			}
		})
		for c := range g.here {
			c.mu.Lock()
			c.cut = true
			closeFDs(c.fds)
			c.fds = nil
			_ = c.raw.Control(func(fd uintptr) {
				_ = unix.Shutdown(int(fd), unix.SHUT_RDWR)
				const most = 4096 // packets, of which a socket's buffer holds fewer; an empty one looks like the end
				for range most {
					if _, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_TRUNC|unix.MSG_DONTWAIT); err != nil {
						return
					}
				}
			})
			c.mu.Unlock()
		}
	})
}

// Read reads without a guest's descriptors: the kernel closes them.
func (c *guest) Read(p []byte) (n int, err error) {
	rerr := c.raw.Read(func(fd uintptr) bool {
		prod(func() { n, err = unix.Read(int(fd), p) })
		return !errors.Is(err, unix.EAGAIN)
	})
	if err = errors.Join(rerr, err); err == nil && n == 0 {
		err = errEnd
	}
	return max(n, 0), err
}

// drop closes what came.
func (c *guest) drop() {
	c.mu.Lock()
	fds := c.fds
	c.fds = nil
	c.mu.Unlock()
	if len(fds) > 0 {
		prod(func() { closeFDs(fds) })
	}
}

// prod has f close descriptors that may come from the workload. The last close
// of a socket with SO_LINGER waits for as long as who made it likes (socket(7));
// a signal to the thread ends that.
func prod(f func()) {
	const after = 10 * time.Millisecond
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, tid := unix.Getpid(), unix.Gettid()
	var mu sync.Mutex
	over := false
	mu.Lock()
	var t *time.Timer
	t = time.AfterFunc(after, func() {
		mu.Lock()
		defer mu.Unlock()
		if !over {
			_ = unix.Tgkill(pid, tid, unix.SIGURG) // the runtime's own, without further effect
			t.Reset(after)
		}
	})
	mu.Unlock()
	f()
	mu.Lock()
	over = true
	mu.Unlock()
	t.Stop()
}
