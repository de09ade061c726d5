package rootfs

import "sync"

// treeQueue is work that several workers share and find more of as they go:
// directories, say. It waits, the newest first, until a worker takes it; so
// of a tree no more than a few are waiting at a time. The first error ends the
// work of all.
type treeQueue[T any] struct {
	mu   sync.Mutex // guards the rest
	more *sync.Cond // todo, busy or err changed
	todo []T
	busy int // workers that have something,
	idle int // and that wait for it
	err  error
}

func newTreeQueue[T any]() *treeQueue[T] {
	q := &treeQueue[T]{}
	q.more = sync.NewCond(&q.mu)
	return q
}

func (q *treeQueue[T]) push(work T) {
	q.mu.Lock()
	q.todo = append(q.todo, work)
	q.mu.Unlock()
	q.more.Signal()
}

// each does what is to do until there is no more, and none can come, or
// something failed.
func (q *treeQueue[T]) each(do func(T) error) {
	for {
		work, ok := q.pop()
		if !ok {
			return
		}
		q.fail(do(work))
		q.done()
	}
}

// pop waits for something to do; false when there will be nothing.
func (q *treeQueue[T]) pop() (work T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.err == nil && len(q.todo) == 0 && q.busy > 0 {
		q.idle++
		q.more.Wait()
		q.idle--
	}
	if q.err != nil || len(q.todo) == 0 {
		return work, false
	}
	last := len(q.todo) - 1
	work = q.todo[last]
	q.todo = q.todo[:last]
	q.busy++
	return work, true
}

func (q *treeQueue[T]) done() {
	q.mu.Lock()
	q.busy--
	last := q.busy == 0
	q.mu.Unlock()
	if last { // and nothing to do, or pop would take it: the end
		q.more.Broadcast()
	}
}

// fail keeps the first error, which ends the work of all.
func (q *treeQueue[T]) fail(err error) {
	if err == nil {
		return
	}
	q.mu.Lock()
	if q.err == nil {
		q.err = err
	}
	q.mu.Unlock()
	q.more.Broadcast()
}

// starved reports whether a worker has nothing to do.
func (q *treeQueue[T]) starved() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.idle > 0 && len(q.todo) == 0
}

func (q *treeQueue[T]) failed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err != nil
}
