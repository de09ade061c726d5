package initd

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func takeAll(rd *ringReader, size int) (out, errs string, dropped int64) {
	buf := make([]byte, size)
	for rd.wait() {
		p, ok := rd.take(buf)
		if !ok {
			continue
		}
		dropped += p.dropped
		if p.stream == sandbox.Stderr {
			errs += string(buf[:p.n])
		} else {
			out += string(buf[:p.n])
		}
	}
	return out, errs, dropped
}

func TestRingKeepsStreamsApartInOrder(t *testing.T) {
	r := newRing(4096)
	defer r.release()
	rd := r.attach(0, nil)
	r.write(sandbox.Stdout, []byte("a"))
	r.write(sandbox.Stderr, []byte("bc"))
	r.write(sandbox.Stdout, []byte("d"))
	r.close()
	var got []piece
	buf := make([]byte, 10)
	for rd.wait() {
		if p, ok := rd.take(buf); ok {
			got = append(got, p)
		}
	}
	want := []piece{{sandbox.Stdout, 0, 0, 1}, {sandbox.Stderr, 1, 0, 2}, {sandbox.Stdout, 3, 0, 1}}
	if len(got) != 3 || got[0] != want[0] || got[1] != want[1] || got[2] != want[2] {
		t.Errorf("got %+v", got)
	}
}

func TestRingDropsTheOldestWithoutReaders(t *testing.T) {
	r := newRing(4096)
	defer r.release()
	data := make([]byte, 10_000)
	for i := range data {
		data[i] = byte(i)
	}
	for i := 0; i < len(data); i += 500 {
		r.write(sandbox.Stdout, data[i:i+500])
	}
	r.close()
	if s := r.state(); s != (sandbox.OutputState{Start: 10_000 - 4096, End: 10_000, Dropped: 10_000 - 4096}) {
		t.Errorf("state %+v", s)
	}
	rd := r.attach(0, nil)
	out, _, dropped := takeAll(rd, 700)
	if dropped != 10_000-4096 || out != string(data[10_000-4096:]) {
		t.Errorf("%d dropped, %d bytes", dropped, len(out))
	}
}

func TestRingCountsOnlyWhatNobodyTook(t *testing.T) {
	r := newRing(4096)
	defer r.release()
	rd := r.attach(0, nil)
	r.write(sandbox.Stdout, make([]byte, 3000))
	buf := make([]byte, 2000)
	rd.take(buf)
	rd.detach()
	r.write(sandbox.Stdout, make([]byte, 4096))
	if s := r.state(); s.Dropped != 1000 || s.Start != 3000 {
		t.Errorf("2000 of 3000 were taken, the rest pushed out: %+v", s)
	}
}

func TestRingWaitsForAReaderThatReads(t *testing.T) {
	r := newRing(4096)
	defer r.release()
	rd := r.attach(0, nil)
	var want bytes.Buffer
	rng := rand.NewChaCha8([32]byte{1})
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 300 {
			p := make([]byte, rand.New(rng).IntN(3000))
			_, _ = rng.Read(p)
			want.Write(p)
			r.write(sandbox.Stdout, p)
		}
		r.close()
	})
	out, _, dropped := takeAll(rd, 333)
	wg.Wait()
	if dropped != 0 || out != want.String() {
		t.Errorf("%d dropped, %d of %d bytes", dropped, len(out), want.Len())
	}
}

func TestRingStopsWaitingForAStalledReader(t *testing.T) {
	r := newRing(4096)
	defer r.release()
	rd := r.attach(0, nil)
	began := time.Now()
	r.write(sandbox.Stdout, make([]byte, 3*4096))
	if took := time.Since(began); took < stallAfter {
		t.Errorf("gave up on the reader after %v", took)
	}
	if s := r.state(); s.End != 3*4096 || s.Dropped != 2*4096 {
		t.Errorf("state %+v", s)
	}
	r.close()
	if out, _, dropped := takeAll(rd, 4096); dropped != 2*4096 || len(out) != 4096 {
		t.Errorf("%d dropped, %d bytes", dropped, len(out))
	}
}

func TestRingTakesDrainForReading(t *testing.T) {
	r := newRing(4096)
	defer r.release()
	left, calls := 1_000_000, 0
	rd := r.attach(0, func() int { left--; calls++; return left }) // its socket empties slowly
	done := make(chan struct{})
	go func() { r.write(sandbox.Stdout, make([]byte, 3*4096)); close(done) }()
	select {
	case <-done:
		t.Error("the writer did not wait though the reader's socket moved on")
	case <-time.After(stallAfter + stallAfter/2):
	}
	rd.detach()
	<-done
}

func TestRingNotesStayBounded(t *testing.T) {
	r := newRing(1 << 20)
	defer r.release()
	for i := range 200_000 {
		r.write(sandbox.Stream(1+i%2), []byte{byte(i)})
	}
	if len(r.segs) > r.maxSegments() {
		t.Errorf("%d notes for %d bytes", len(r.segs), r.end-r.start)
	}
	r.close()
	if out, errs, _ := takeAll(r.attach(-1, nil), 100); len(out)+len(errs) != int(r.end-r.start) {
		t.Errorf("%d bytes read of %d", len(out)+len(errs), r.end-r.start)
	}
}

func TestDetachWakesItsReader(t *testing.T) {
	r := newRing(0)
	defer r.release()
	rd := r.attach(0, nil)
	go rd.detach()
	if rd.wait() {
		t.Error("a reader that has gone was given something")
	}
}

// FuzzRing checks any sequence of writes and takes against a plain buffer.
func FuzzRing(f *testing.F) {
	f.Add([]byte{1, 200, 3, 0, 9})
	f.Fuzz(func(t *testing.T, ops []byte) {
		r := newRing(4096)
		defer r.release()
		rd := r.attach(0, nil)
		var all []byte
		buf := make([]byte, 600)
		var read int64
		for i, op := range ops {
			if op%2 == 0 {
				p := bytes.Repeat([]byte{byte(i)}, int(op)*8)
				r.mu.Lock()
				rd.stalled = true
				r.mu.Unlock()
				r.write(sandbox.Stream(1+op/2%2), p)
				all = append(all, p...)
			} else if p, ok := rd.take(buf); ok {
				if p.off != read+p.dropped || !bytes.Equal(buf[:p.n], all[p.off:p.off+int64(p.n)]) {
					t.Fatalf("took %+v after %d", p, read)
				}
				read = p.off + int64(p.n)
			}
		}
		s := r.state()
		if s.End != int64(len(all)) || s.Dropped > s.Start || s.End-s.Start > 4096 {
			t.Fatalf("state %+v of %d", s, len(all))
		}
	})
}

func BenchmarkRing(b *testing.B) {
	r := newRing(1 << 20)
	defer r.release()
	rd := r.attach(0, nil)
	p, buf := make([]byte, 64<<10), make([]byte, 128<<10)
	b.SetBytes(int64(len(p)))
	go func() {
		for range b.N {
			r.write(sandbox.Stdout, p)
		}
		r.close()
	}()
	for rd.wait() {
		rd.take(buf)
	}
}

// TestRingGrowsOutOfTheHeap: output is the same before, across and after the
// size up to which it is kept without a mapping.
func TestRingGrowsOutOfTheHeap(t *testing.T) {
	for _, step := range []int{1, 7, smallOutput - 1, smallOutput, smallOutput + 1, 5000} {
		r := newRing(64 << 10)
		var want []byte
		early := r.attach(0, nil)
		for len(want) < 6000 {
			p := make([]byte, step)
			for i := range p {
				p[i] = byte(len(want) + i)
			}
			want = append(want, p...)
			r.write(sandbox.Stdout, p)
			if small := r.mem == nil; small != (len(want) <= smallOutput) {
				t.Fatalf("%d bytes in steps of %d: on the heap %v", len(want), step, small)
			}
		}
		late := r.attach(3, nil)
		r.close()
		if got, _, dropped := takeAll(early, 900); got != string(want) || dropped != 0 {
			t.Errorf("in steps of %d: %d bytes differ from those written, %d dropped", step, len(got), dropped)
		}
		if got, _, _ := takeAll(late, 900); got != string(want[3:]) {
			t.Errorf("in steps of %d, from the middle: %d bytes differ", step, len(got))
		}
		r.release()
		if r.kept() != 0 {
			t.Error("kept after release")
		}
	}
	r := newRing(4096)
	defer r.release()
	r.write(sandbox.Stderr, []byte("x"))
	if r.kept() != 1 || r.state().End != 1 {
		t.Errorf("%d kept, %+v", r.kept(), r.state())
	}
}
