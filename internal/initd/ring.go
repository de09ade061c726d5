package initd

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// stallAfter is how long a reader may take nothing before a full ring
	// stops waiting for it.
	stallAfter = 2 * time.Second
	// minSegments bounds the notes of which stream wrote what: a workload
	// that alternates between its streams byte by byte must not make the
	// notes larger than the output.
	minSegments    = 1024
	bytesPerSeg    = 256
	ringPageFactor = 4096
	// smallOutput is kept on the heap: a mapping takes whole pages, and most
	// commands say less. Less than minSegments, so that nothing of it is ever
	// dropped to make room.
	smallOutput = 1000
)

// ring keeps the newest output of one process, both streams in order of
// arrival. An offset counts every byte ever written. Memory is one private
// mapping, so what was never written costs nothing and what is let go goes
// back at once.
//
//	        start            taken by a reader            end
//	          ▼                      ▼                     ▼
//	…dropped… ├──────────────────────┼─────────────────────┤
//	          ◀────────────── at most size ────────────────▶
type ring struct {
	mu      sync.Mutex
	changed sync.Cond // any change at all
	small   []byte    // the output, as long as it is small
	mem     []byte    // then all of it; nil before and after release
	size    int64
	start   int64
	end     int64
	closed  bool // nothing more will be written
	dropped int64
	segs    []segment // by offset; the last one ends at end
	sent    []span    // what some reader has taken, by offset, disjoint
	readers map[*ringReader]struct{}
}

type segment struct {
	off    int64
	stream sandbox.Stream
}

type span struct{ from, to int64 }

// ringReader is one attached reader.
type ringReader struct {
	r    *ring
	pos  int64
	gone bool
	// since is when it last took something, or when it first had something to take.
	since time.Time
	// progress, if set, tells how much of what was taken is still on its
	// way; any change counts as taking.
	progress func() int
	onWay    int
	stalled  bool
}

func newRing(size int) *ring {
	if size <= 0 {
		size = sandbox.DefaultOutput
	}
	size = (size + ringPageFactor - 1) / ringPageFactor * ringPageFactor
	r := &ring{size: int64(size), readers: make(map[*ringReader]struct{})}
	r.changed.L = &r.mu
	return r
}

// write appends p. While the ring is full of bytes an attached reader has
// not taken, and that reader keeps taking, it waits; else the oldest go.
func (r *ring) write(stream sandbox.Stream, p []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(p) > 0 && !r.closed {
		n := min(int64(len(p)), r.size)
		if free := r.freeFor(n); free <= 0 {
			r.waitForRoom()
			continue
		} else if free < n {
			n = free
		}
		r.put(stream, p[:n])
		p = p[n:]
	}
}

// freeFor tells how many of n bytes may be written now without taking
// anything from a reader that must be waited for.
func (r *ring) freeFor(n int64) int64 {
	free := n
	for rd := range r.readers {
		if !rd.stalled {
			free = min(free, r.size-(r.end-max(rd.pos, r.start)))
		}
	}
	return free
}

// waitForRoom waits for a change, at most until the slowest reader counts as
// stalled, and marks those that then do.
func (r *ring) waitForRoom() {
	now := time.Now()
	next := stallAfter
	for rd := range r.readers {
		if rd.stalled || r.end-max(rd.pos, r.start) < r.size {
			continue
		}
		if rd.progress != nil {
			if w := rd.progress(); w != rd.onWay {
				rd.onWay, rd.since = w, now
			}
		}
		if idle := now.Sub(rd.since); idle >= stallAfter {
			rd.stalled = true
			return
		} else if left := stallAfter - idle; left < next {
			next = left
		}
	}
	wake := time.AfterFunc(max(next, time.Millisecond), func() {
		r.mu.Lock()
		r.changed.Broadcast()
		r.mu.Unlock()
	})
	r.changed.Wait()
	wake.Stop()
}

// put stores p, which fits the ring, over the oldest bytes. Without memory
// for a ring it is dropped and counted.
func (r *ring) put(stream sandbox.Stream, p []byte) {
	if r.mem == nil && r.end+int64(len(p)) <= smallOutput && r.end == int64(len(r.small)) {
		r.small = append(r.small, p...)
		r.note(stream, int64(len(p)))
		return
	}
	if r.mem == nil {
		mem, err := unix.Mmap(-1, 0, int(r.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			r.end += int64(len(p))
			r.dropped += int64(len(p))
			r.start, r.segs, r.small = r.end, nil, nil
			return
		}
		// Huge pages would make one line of output cost 2 MiB.
		_ = unix.Madvise(mem, unix.MADV_NOHUGEPAGE)
		r.mem = mem
		copy(r.mem, r.small)
		r.small = nil
	}
	n := int64(len(p))
	if over := r.end + n - r.start - r.size; over > 0 {
		r.dropTo(r.start + over)
	}
	at := r.end % r.size
	c := copy(r.mem[at:], p)
	copy(r.mem, p[c:])
	r.note(stream, n)
}

// note enters n bytes of a stream that were stored.
func (r *ring) note(stream sandbox.Stream, n int64) {
	if len(r.segs) == 0 || r.segs[len(r.segs)-1].stream != stream {
		r.segs = append(r.segs, segment{r.end, stream})
	}
	now := time.Now()
	for rd := range r.readers {
		if rd.pos >= r.end {
			rd.since = now
		}
	}
	r.end += n
	if most := r.maxSegments(); len(r.segs) > most {
		r.dropTo(r.segs[len(r.segs)-most].off)
	}
	r.changed.Broadcast()
}

func (r *ring) maxSegments() int { return max(minSegments, int(r.size/bytesPerSeg)) }

// dropTo forgets everything before off and counts what nobody ever took.
func (r *ring) dropTo(off int64) {
	lost := off - r.start
	for len(r.sent) > 0 && r.sent[0].from < off {
		s := r.sent[0]
		lost -= min(s.to, off) - max(s.from, r.start)
		if s.to > off {
			r.sent[0].from = off
			break
		}
		r.sent = r.sent[1:]
	}
	r.dropped += lost
	r.start = off
	i := 0
	for i+1 < len(r.segs) && r.segs[i+1].off <= off {
		i++
	}
	if i > 0 {
		r.segs = append(r.segs[:0], r.segs[i:]...)
	}
}

// close says that nothing more will be written; readers end after the rest.
func (r *ring) close() {
	r.mu.Lock()
	r.closed = true
	r.changed.Broadcast()
	r.mu.Unlock()
}

// release gives the memory back. The content counts as gone.
func (r *ring) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.mem != nil {
		_ = unix.Munmap(r.mem)
		r.mem = nil
	}
	r.start, r.segs, r.sent, r.small = r.end, nil, nil, nil
	r.changed.Broadcast()
}

func (r *ring) state() sandbox.OutputState {
	r.mu.Lock()
	defer r.mu.Unlock()
	return sandbox.OutputState{Start: r.start, End: r.end, Dropped: r.dropped}
}

// kept tells how many bytes of memory the content takes.
func (r *ring) kept() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mem == nil {
		return int64(len(r.small))
	}
	return min(r.end, r.size)
}

// attach adds a reader at off; a negative one means the oldest byte kept, one
// past the end is taken back to the end.
func (r *ring) attach(off int64, progress func() int) *ringReader {
	r.mu.Lock()
	defer r.mu.Unlock()
	if off < 0 {
		off = r.start
	}
	rd := &ringReader{r: r, pos: min(off, r.end), since: time.Now(), progress: progress}
	r.readers[rd] = struct{}{}
	return rd
}

// detach ends a reader; the process is no longer held back for it.
func (rd *ringReader) detach() {
	rd.r.mu.Lock()
	rd.gone = true
	delete(rd.r.readers, rd)
	rd.r.changed.Broadcast()
	rd.r.mu.Unlock()
}

// piece is a run of one stream.
type piece struct {
	stream  sandbox.Stream
	off     int64
	dropped int64
	n       int
}

// wait blocks until there is something to take; false means there never will be.
func (rd *ringReader) wait() bool {
	r := rd.r
	r.mu.Lock()
	defer r.mu.Unlock()
	for rd.pos >= r.end && !r.closed && !rd.gone {
		r.changed.Wait()
	}
	return !rd.gone && rd.pos < r.end
}

// take copies the next run of one stream into buf. It returns false if there
// is nothing to take now. Bytes that went before they were taken are told in
// the piece; where nothing is left after them, the piece is empty.
func (rd *ringReader) take(buf []byte) (piece, bool) {
	r := rd.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if rd.pos >= r.end || rd.gone {
		return piece{}, false
	}
	p := piece{stream: sandbox.Stdout}
	if rd.pos < r.start {
		p.dropped = r.start - rd.pos
		rd.pos = r.start
	}
	p.off = rd.pos
	i := len(r.segs) - 1
	for i > 0 && r.segs[i].off > rd.pos {
		i--
	}
	if i >= 0 {
		p.stream = r.segs[i].stream
		to := r.end
		if i+1 < len(r.segs) {
			to = r.segs[i+1].off
		}
		n := int(min(to-rd.pos, int64(len(buf))))
		if r.mem == nil {
			copy(buf[:n], r.small[rd.pos:])
		} else {
			at := rd.pos % r.size
			c := copy(buf[:n], r.mem[at:])
			copy(buf[c:n], r.mem)
		}
		p.n = n
	}
	r.markSent(span{rd.pos, rd.pos + int64(p.n)})
	rd.pos += int64(p.n)
	rd.since, rd.stalled = time.Now(), false
	r.changed.Broadcast()
	return p, true
}

// markSent adds s to what was taken. Readers nearly always go on where one
// stopped, so the list stays short; past a bound the oldest gap is closed,
// which can only make the count of dropped bytes too small.
func (r *ring) markSent(s span) {
	if n := len(r.sent); n > 0 && s.from >= r.sent[n-1].from && s.from <= r.sent[n-1].to {
		r.sent[n-1].to = max(r.sent[n-1].to, s.to)
		return
	}
	i := 0
	for i < len(r.sent) && r.sent[i].to < s.from {
		i++
	}
	j := i
	for j < len(r.sent) && r.sent[j].from <= s.to {
		s.from, s.to = min(s.from, r.sent[j].from), max(s.to, r.sent[j].to)
		j++
	}
	r.sent = append(r.sent[:i], append([]span{s}, r.sent[j:]...)...)
	if len(r.sent) > 64 {
		r.sent[1].from = r.sent[0].from
		r.sent = r.sent[1:]
	}
}
