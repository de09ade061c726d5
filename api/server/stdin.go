package server

import (
	"sync"

	"github.com/sandboxd/sandboxd/api"
)

// stdinQueue holds what a client sent and the process has not taken yet: at
// most api.StdinWindow bytes, which well-behaved clients never exceed.
type stdinQueue struct {
	mu     sync.Mutex
	wake   sync.Cond
	chunks [][]byte
	bytes  int  // of those, and what was taken out and is not free
	ended  bool // the client closed stdin
	closed bool // the stream is over
}

func (q *stdinQueue) init() { q.wake.L = &q.mu }

// push copies data in; false when that would exceed the window.
func (q *stdinQueue) push(data []byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.bytes+len(data) > api.StdinWindow {
		return false
	}
	if q.ended || q.closed || len(data) == 0 {
		return true // too late to matter
	}
	q.bytes += len(data)
	// Small frames share a chunk, or a flood of one-byte frames would
	// cost many times its size.
	if n := len(q.chunks); n > 0 && len(q.chunks[n-1])+len(data) <= 4<<10 {
		q.chunks[n-1] = append(q.chunks[n-1], data...)
	} else {
		q.chunks = append(q.chunks, append([]byte(nil), data...))
	}
	q.wake.Signal()
	return true
}

// pop waits for the next chunk; false when there will be none. The bytes
// count against the window until free.
func (q *stdinQueue) pop() ([]byte, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.chunks) == 0 && !q.ended && !q.closed {
		q.wake.Wait()
	}
	if q.closed || len(q.chunks) == 0 {
		return nil, false
	}
	chunk := q.chunks[0]
	q.chunks = q.chunks[1:]
	return chunk, true
}

func (q *stdinQueue) free(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.bytes -= n
}

// finish notes the end of the client's stdin: what is queued still goes.
func (q *stdinQueue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = true
	q.wake.Broadcast()
}

func (q *stdinQueue) finished() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended && !q.closed
}

// close throws the queue away.
func (q *stdinQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.wake.Broadcast()
}
