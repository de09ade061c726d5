package cgroup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// EventKind tells what happened in a cgroup.
type EventKind string

// The kinds of events.
const (
	EventOOM       EventKind = "oom"        // the kernel killed for memory in the workload
	EventWorkEmpty EventKind = "work_empty" // the workload's last process ended
	EventEmpty     EventKind = "empty"      // nothing lives in the sandbox, not even PID 1
)

// Event is one thing the kernel reported about a sandbox.
type Event struct {
	ID   sandbox.ID
	Kind EventKind
	// Count is the absolute number of processes killed for memory since the
	// cgroup was made; 0 for other kinds.
	Count uint64
}

// Watcher follows the events of any number of sandboxes over one inotify
// descriptor. Events that come while nobody reads are merged, not lost: an
// OOM event carries the whole count.
type Watcher struct {
	tree   *Tree
	file   *os.File // the inotify descriptor
	fd     int      // its number; for adding watches only
	events chan Event
	wake   chan struct{} // one token: something is dirty
	done   chan struct{} // closed when the reader has ended

	mu      sync.Mutex
	closed  bool
	watched map[sandbox.ID]*watch
	byWatch map[int32]sandbox.ID
}

// watch is what is known of one sandbox.
type watch struct {
	descriptors []int32
	dirty       bool
	oomKills    uint64
	workLives   bool
	lives       bool
}

// Watch starts a watcher that ends with ctx; its channel is closed then.
func (t *Tree) Watch(ctx context.Context) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watching cgroups: inotify: %w; see fs.inotify.max_user_instances", err)
	}
	w := &Watcher{
		tree: t, file: os.NewFile(uintptr(fd), "inotify"), fd: fd,
		events: make(chan Event), wake: make(chan struct{}, 1), done: make(chan struct{}),
		watched: map[sandbox.ID]*watch{}, byWatch: map[int32]sandbox.ID{},
	}
	go w.read()
	go w.dispatch(ctx)
	return w, nil
}

// Events returns the channel of events.
func (w *Watcher) Events() <-chan Event { return w.events }

// Add begins to watch a settled sandbox, and tells at once what happened
// before: that it is empty, or that it had OOM kills. So nothing is missed
// between a start and its Add, or across a restart. Repeating it does nothing.
// ErrNotFound where it has no settled cgroup, ErrExhausted at
// fs.inotify.max_user_watches.
func (w *Watcher) Add(id sandbox.ID) error {
	dir, err := w.tree.at(id, partID)
	if err != nil {
		return err
	}
	files := []string{"cgroup.events", partWork + "/cgroup.events"}
	if w.tree.has(ctlMemory) {
		files = append(files, partWork+"/memory.events")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return sandbox.Errorf(sandbox.ErrUnavailable, "watcher_closed", "watching %s: the watcher has ended", id)
	}
	if w.watched[id] != nil {
		return nil
	}
	s := &watch{dirty: true, lives: true}
	for _, f := range files {
		wd, err := unix.InotifyAddWatch(w.fd, filepath.Join(dir, f), unix.IN_MODIFY)
		if err != nil {
			w.drop(s)
			if errors.Is(err, unix.ENOSPC) {
				return sandbox.Errorf(sandbox.ErrExhausted, "inotify_watches", "watching %s: %w; raise fs.inotify.max_user_watches", id, err)
			}
			return fmt.Errorf("watching %s of %s: %w", f, id, notFound(id, err))
		}
		s.descriptors = append(s.descriptors, int32(wd))
		w.byWatch[int32(wd)] = id
	}
	w.watched[id] = s
	w.signal()
	return nil
}

// Remove ends the watching of a sandbox; no event of it follows but one that
// is being handed over. Repeating it, or one never added, does nothing.
func (w *Watcher) Remove(id sandbox.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.watched[id]; s != nil {
		w.drop(s)
		delete(w.watched, id)
	}
}

// drop takes the kernel's watches away; the lock is held. The kernel drops
// them itself with a removed cgroup, so an error is no news.
func (w *Watcher) drop(s *watch) {
	for _, wd := range s.descriptors {
		delete(w.byWatch, wd)
		if !w.closed {
			_, _ = unix.InotifyRmWatch(w.fd, uint32(wd))
		}
	}
}

// signal leaves a token for dispatch; the lock may be held.
func (w *Watcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// read marks the sandboxes whose files changed until the descriptor closes.
func (w *Watcher) read() {
	defer close(w.done)
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if err != nil {
			if !errors.Is(err, os.ErrClosed) {
				w.tree.log.Error("watching cgroups ended", "error", err)
			}
			return
		}
		w.mark(buf[:n])
	}
}

// mark parses struct inotify_event records (inotify(7)).
func (w *Watcher) mark(buf []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(buf) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(buf))
		mask := binary.NativeEndian.Uint32(buf[4:])
		size := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(buf[12:]))
		buf = buf[min(size, len(buf)):]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			for _, s := range w.watched {
				s.dirty = true
			}
			continue
		}
		if s := w.watched[w.byWatch[wd]]; s != nil {
			s.dirty = true
		}
	}
	w.signal()
}

// dispatch looks at dirty sandboxes and hands over what is new.
func (w *Watcher) dispatch(ctx context.Context) {
	defer close(w.events)
	defer w.close()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.done:
			return
		case <-w.wake:
		}
		for _, id := range w.takeDirty() {
			for _, e := range w.look(id) {
				select {
				case w.events <- e:
				case <-ctx.Done():
					return
				}
			}
		}
	}
}

func (w *Watcher) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	_ = w.file.Close() // ends read
}

func (w *Watcher) takeDirty() []sandbox.ID {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids := slices.DeleteFunc(slices.Collect(maps.Keys(w.watched)), func(id sandbox.ID) bool { return !w.watched[id].dirty })
	for _, id := range ids {
		w.watched[id].dirty = false
	}
	slices.Sort(ids)
	return ids
}

// look reads the state of one sandbox and returns what changed since the last
// look. A cgroup that is gone is empty.
func (w *Watcher) look(id sandbox.ID) []Event {
	dir, err := w.tree.at(id, partID)
	if err != nil {
		return nil
	}
	work := filepath.Join(dir, partWork)
	populated, err := readFlat(dir, "cgroup.events", "populated")
	lives := err == nil && populated == 1
	populated, err = readFlat(work, "cgroup.events", "populated")
	workLives := err == nil && populated == 1
	// Read last: the kernel counts a kill before the victim is gone, so
	// whoever hears of the end has already heard of its cause.
	kills, killsErr := readFlat(work, "memory.events", "oom_kill")

	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.watched[id]
	if s == nil {
		return nil
	}
	var events []Event
	if killsErr == nil && kills > s.oomKills {
		events = append(events, Event{ID: id, Kind: EventOOM, Count: kills})
		s.oomKills = kills
	}
	if s.workLives && !workLives {
		events = append(events, Event{ID: id, Kind: EventWorkEmpty})
	}
	if s.lives && !lives {
		events = append(events, Event{ID: id, Kind: EventEmpty})
	}
	s.workLives, s.lives = workLives, lives
	return events
}
