package initd

import (
	"encoding/binary"
	"errors"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	watchMask = unix.IN_CREATE | unix.IN_CLOSE_WRITE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
		unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
	maxWatches = 8192 // directories of one recursive watch
)

// watcher follows a directory, or with recursive the tree beneath it.
type watcher struct {
	j    *fileJob
	f    *os.File // the inotify instance
	dirs map[int32]string
	last sandbox.FileEvent // to fold a run of writes into one
}

// watch sends changes until either side hangs up or the directory goes.
func (j *fileJob) watch() error {
	err := j.as(func() error {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			return err
		}
		w := &watcher{j: j, f: os.NewFile(uintptr(fd), "inotify"), dirs: make(map[int32]string)}
		defer w.f.Close()
		if err := w.add(j.args.Path); err != nil {
			return err
		}
		if err := j.c.reply(struct{}{}); err != nil {
			return nil
		}
		go func() {
			j.c.untilHangup()
			_ = w.f.Close()
		}()
		return w.run()
	})
	if err != nil {
		return fileError("watching", j.args.Path, err)
	}
	return j.c.send(initproto.FrameEnd, nil)
}

func (w *watcher) raw() int {
	fd := -1
	if rc, err := w.f.SyscallConn(); err == nil {
		_ = rc.Control(func(p uintptr) { fd = int(p) })
	}
	return fd
}

// add watches a directory and, with recursive, those beneath. Directories
// that go meanwhile are passed over.
func (w *watcher) add(name string) error {
	if len(w.dirs) >= maxWatches {
		return sandbox.Errorf(sandbox.ErrExhausted, "watches_exhausted", "more than %d directories beneath %.200q: watch a part of them", maxWatches, w.j.args.Path)
	}
	fd, err := open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(fd), name)
	defer dir.Close()
	wd, err := watchFile(w.raw(), fd, watchMask)
	if err != nil {
		if errors.Is(err, unix.ENOSPC) {
			return sandbox.Errorf(sandbox.ErrExhausted, "watches_exhausted", "the sandbox may watch no more directories: %w", err)
		}
		return err
	}
	w.dirs[int32(wd)] = name
	if !w.j.args.Recursive {
		return nil
	}
	entries, err := sortedNames(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		sub, err := entry(fd, e, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, unix.RESOLVE_NO_XDEV)
		if err != nil {
			continue
		}
		_ = unix.Close(sub)
		if err := w.add(path.Join(name, e)); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EACCES) {
			return err
		}
	}
	return nil
}

func (w *watcher) run() error {
	buf := make([]byte, 16<<10)
	for {
		n, err := w.f.Read(buf)
		if errors.Is(err, os.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		w.last = sandbox.FileEvent{}
		for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
			wd := int32(binary.NativeEndian.Uint32(b))
			mask := binary.NativeEndian.Uint32(b[4:])
			size := int(binary.NativeEndian.Uint32(b[12:]))
			name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:unix.SizeofInotifyEvent+size]), "\x00")
			b = b[unix.SizeofInotifyEvent+size:]
			more, err := w.event(wd, mask, name)
			if err != nil || !more {
				return err
			}
		}
	}
}

// event tells one event; false ends the watch.
func (w *watcher) event(wd int32, mask uint32, name string) (bool, error) {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		return true, w.tell(w.j.args.Path, "overflow")
	}
	dir, known := w.dirs[wd]
	if mask&unix.IN_IGNORED != 0 {
		delete(w.dirs, wd)
		return dir != w.j.args.Path, nil
	}
	if !known || mask&unix.IN_DELETE_SELF != 0 {
		return true, nil // told by the parent's watch, and by IGNORED
	}
	full := path.Join(dir, name)
	switch {
	case mask&unix.IN_MOVED_FROM != 0:
		if mask&unix.IN_ISDIR != 0 {
			w.drop(full)
		}
		return true, w.tell(full, "rename")
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		if err := w.tell(full, "create"); err != nil {
			return false, err
		}
		if mask&unix.IN_ISDIR != 0 && w.j.args.Recursive {
			if err := w.addNew(full); err != nil {
				return false, err
			}
		}
		return true, nil
	case mask&unix.IN_DELETE != 0:
		return true, w.tell(full, "remove")
	case mask&(unix.IN_MODIFY|unix.IN_CLOSE_WRITE) != 0:
		return true, w.tell(full, "write")
	case mask&unix.IN_ATTRIB != 0:
		return true, w.tell(full, "chmod")
	}
	return true, nil
}

// addNew watches a directory that appeared, and tells what was put into it
// before the watch stood.
func (w *watcher) addNew(name string) error {
	err := w.add(name)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return err
	}
	fd, err := open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil
	}
	var found []sandbox.FileInfo
	if err := listInto(&found, fd, name, maxDepth, &names{}); err != nil {
		return w.tell(name, "overflow")
	}
	for _, f := range found {
		if err := w.tell(f.Path, "create"); err != nil {
			return err
		}
	}
	return nil
}

// drop ends the watches of a directory that moved away and of those beneath.
func (w *watcher) drop(name string) {
	for wd, dir := range w.dirs {
		if dir == name || strings.HasPrefix(dir, name+"/") {
			_, _ = unix.InotifyRmWatch(w.raw(), uint32(wd))
			delete(w.dirs, wd)
		}
	}
}

func (w *watcher) tell(name, op string) error {
	e := sandbox.FileEvent{Path: name, Op: op}
	if e == w.last && op == "write" {
		return nil
	}
	w.last = e
	return w.j.c.sendJSON(initproto.FrameItem, e)
}
