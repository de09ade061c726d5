package gate

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"
)

// activity tells when bytes last went through a tunnel, either way.
type activity struct{ last atomic.Int64 }

func (a *activity) note()                { a.last.Store(time.Now().UnixNano()) }
func (a *activity) quiet() time.Duration { return time.Duration(time.Now().UnixNano() - a.last.Load()) }

// lookEvery is how often a tunnel looks whether it is quiet.
const lookEvery = quietTimeout / 4

// splice passes bytes on both ways until both are done, one breaks, or both
// are quiet for too long.
func splice(a, b *net.TCPConn) {
	defer func() { _, _ = a.Close(), b.Close() }() // both are done
	var moved activity
	done := make(chan bool, 2)
	go func() { done <- pipe(a, b, &moved) }()
	go func() { done <- pipe(b, a, &moved) }()
	if !<-done { // broken: the other way ends too
		_, _ = a.Close(), b.Close()
	}
	<-done
}

// pipe copies from src to dst until src ends, and ends dst for writing then;
// false when the tunnel broke or was quiet too long. The kernel moves the
// bytes (splice(2)), so a copy tells only at its end what it did; it is ended
// now and then by a deadline, which leaves nothing behind in between: reading
// meets it first.
func pipe(src, dst *net.TCPConn, moved *activity) bool {
	moved.note()
	for {
		now := time.Now()
		if errors.Join(src.SetReadDeadline(now.Add(lookEvery)), dst.SetWriteDeadline(now.Add(2*lookEvery))) != nil {
			return false
		}
		n, err := io.Copy(dst, src)
		if n > 0 {
			moved.note()
		}
		switch {
		case err == nil:
			return dst.CloseWrite() == nil
		case !errors.Is(err, os.ErrDeadlineExceeded) || moved.quiet() > quietTimeout:
			return false
		case time.Since(now) >= 2*lookEvery: // it may have been the deadline for writing, and bytes are lost
			return false
		}
	}
}
