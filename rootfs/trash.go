package rootfs

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// trash takes directories in by renaming them and deletes them in the
// background, one at a time, once nothing has come for a moment: what fills it
// in bursts has the disk and the processors first.
type trash struct {
	vol  *volume
	ids  *projectIDs
	seq  atomic.Int64
	kick chan struct{} // holds one: something may be there
	quit chan struct{}
	done sync.WaitGroup
	held atomic.Bool // see Hold
}

const (
	// trashRetry is how long the trash rests after an error.
	trashRetry = time.Minute
	// trashCalm is how long nothing may come before it is emptied, and
	// trashFull how long it waits for that.
	trashCalm, trashFull = 250 * time.Millisecond, time.Second
)

func startTrash(vol *volume, ids *projectIDs) *trash {
	t := &trash{vol: vol, ids: ids, kick: make(chan struct{}, 1), quit: make(chan struct{})}
	t.seq.Store(time.Now().UnixNano())
	t.done.Go(t.run)
	return t
}

func (t *trash) wake() {
	select {
	case t.kick <- struct{}{}:
	default:
	}
}

func (t *trash) stop() {
	close(t.quit)
	t.done.Wait()
}

// add moves a directory, named relative to the volume, into the trash. One
// that does not exist is no error.
func (t *trash) add(rel string) error {
	if err := t.take(rel); err != nil {
		return err
	}
	t.wake()
	return nil
}

// take is add without the deletion, which comes with the next wake.
func (t *trash) take(rel string) error {
	if t.kept(rel) {
		slog.Warn("kept what was to be removed: the database and the volume do not agree", "what", rel)
		return nil
	}
	to := t.vol.path(trashDir, fmt.Sprintf("%s.%d", filepath.Base(rel), t.seq.Add(1)))
	err := os.Rename(t.vol.path(rel), to)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("rootfs: discard %s: %w", rel, err)
	}
	return nil
}

func (t *trash) run() {
	var retry <-chan time.Time
	for {
		select {
		case <-t.quit:
			return
		case <-t.kick:
			t.calm()
		case <-retry:
		}
		retry = nil
		if err := t.empty(); err != nil && !errors.Is(err, errStopped) {
			slog.Error("emptying the trash; trying again", "in", trashRetry, "err", err)
			retry = time.After(trashRetry)
		}
	}
}

// calm waits until nothing more comes, for a time.
func (t *trash) calm() {
	full := time.After(trashFull)
	for {
		select {
		case <-t.quit:
			return
		case <-full:
			return
		case <-time.After(trashCalm):
			return
		case <-t.kick:
		}
	}
}

var errStopped = errors.New("stopped")

func (t *trash) stopped() error {
	select {
	case <-t.quit:
		return errStopped
	default:
		return nil
	}
}

// empty deletes what is in the trash now. An entry that resists does not
// keep the others.
func (t *trash) empty() error {
	names, err := readNames(t.vol.path(trashDir))
	if err != nil {
		return err
	}
	var errs []error
	for _, n := range names {
		if err := t.remove(n); err != nil {
			if errors.Is(err, errStopped) {
				return err
			}
			errs = append(errs, fmt.Errorf("%s: %w", n, err))
		}
	}
	return errors.Join(errs...)
}

// remove deletes one entry and, when nothing is left of it, clears its quota
// record and frees its project id.
func (t *trash) remove(name string) error {
	parent, err := os.Open(t.vol.path(trashDir))
	if err != nil {
		return err
	}
	defer parent.Close()
	var project uint32
	if t.vol.quota {
		if st, err := os.Lstat(filepath.Join(parent.Name(), name)); err == nil && st.IsDir() {
			if project, err = projectOf(filepath.Join(parent.Name(), name)); err != nil {
				return err
			}
		}
	}
	if err := linux.RemoveTree(int(parent.Fd()), name, t.stopped); err != nil {
		return err
	}
	if project == 0 {
		return nil
	}
	if err := linux.SetProjectQuota(t.vol.root, project, 0, 0); err != nil {
		return fmt.Errorf("clear the quota of project %#x: %w", project, err)
	}
	t.ids.free(project)
	return nil
}

func openDirAt(parent *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(parent.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: filepath.Join(parent.Name(), name), Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}
