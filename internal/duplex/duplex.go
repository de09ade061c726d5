// Package duplex joins two connections into one: published ports, forwarded
// ports and the command line all carry bytes so. It opens nothing, knows no
// protocol and sets no time limit: an idle connection may stay.
package duplex

import (
	"errors"
	"io"
	"net"
	"sync"
)

// halfCloser can tell the other end that nothing more comes.
type halfCloser interface{ CloseWrite() error }

// Join carries bytes both ways until both ends have sent all they had, or one
// breaks; then it closes both. The end of one direction is passed on, so that
// a client may send all of its request, close its half and read the answer.
// Between two TCP connections the kernel moves the bytes (splice(2)).
func Join(a, b net.Conn) error {
	var errs [2]error
	var wg sync.WaitGroup
	pass := func(i int, to, from net.Conn) {
		if _, err := io.Copy(to, from); err != nil {
			errs[i] = err
			_ = a.Close() // wakes the other direction
			_ = b.Close()
			return
		}
		if h, ok := to.(halfCloser); ok {
			_ = h.CloseWrite() // it may be gone altogether, which the other direction finds out
			return
		}
		_ = to.Close()
	}
	wg.Go(func() { pass(0, a, b) })
	pass(1, b, a)
	wg.Wait()
	return errors.Join(errs[0], errs[1], ignoreClosed(a.Close()), ignoreClosed(b.Close()))
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Reset closes a connection so that the other end sees it refused, where it
// can: a port whose server is away must not look like one that said nothing.
func Reset(c net.Conn) {
	if t, ok := c.(interface{ SetLinger(sec int) error }); ok {
		_ = t.SetLinger(0) // a connection already gone needs none
	}
	_ = c.Close()
}
