package initd

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/internal/tarfile"
	"github.com/sandboxd/sandboxd/sandbox"
)

// tarOut sends a file or tree. It runs on the user's thread as a whole: what
// the user may not read fails there, as it would for tar itself.
func (j *fileJob) tarOut() error {
	err := j.as(func() error {
		flags := unix.O_PATH | unix.O_NOFOLLOW
		if j.content {
			flags = unix.O_PATH | unix.O_DIRECTORY
		}
		fd, err := open(j.args.Path, flags)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := refuseOwn(fd); err != nil {
			return err
		}
		if err := j.c.reply(struct{}{}); err != nil {
			return err
		}
		out := bufferedData(j.c)
		a := &archiver{w: tar.NewWriter(out), names: loadNames(), links: make(map[inode]string)}
		base := path.Base(j.args.Path)
		if base == "/" {
			base = "."
		}
		if err := a.add(fd, base, 0); err != nil {
			return err
		}
		if err := a.tellLeft(); err != nil {
			return err
		}
		return errors.Join(a.w.Close(), out.Flush())
	})
	if err != nil {
		return fileError("archiving", j.args.Path, err)
	}
	return j.c.send(initproto.FrameEnd, nil)
}

type inode struct{ dev, ino uint64 }

type archiver struct {
	w     *tar.Writer
	names names
	links map[inode]string // first name of files that have several
	top   *tar.Header      // the tree's own entry
	left  []string         // names of the first few that are not in the archive
	count int              // of all those
}

const maxTarDepth = 512

// add writes the file open (O_PATH) as fd, and what is beneath it.
func (a *archiver) add(fd int, name string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid), Uname: a.names.users[st.Uid],
		Gname: a.names.groups[st.Gid], ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if depth >= maxTarDepth {
			return sandbox.Errorf(sandbox.ErrTooLarge, "tree_too_deep", "directory %.100q is more than %d levels deep", name, maxTarDepth)
		}
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
		if depth == 0 {
			a.top = h
		}
		if err := a.w.WriteHeader(h); err != nil {
			return err
		}
		if refuseOwn(fd) != nil {
			return nil // told, not entered
		}
		return a.addEntries(fd, name, depth)
	case unix.S_IFLNK:
		buf := make([]byte, maxPath)
		n, err := unix.Readlinkat(fd, "", buf)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, string(buf[:n])
		return a.w.WriteHeader(h)
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
		return a.w.WriteHeader(h)
	case unix.S_IFREG:
		return a.addRegular(fd, h, &st)
	}
	if depth == 0 {
		return notRegular(name) // told, for an archive of nothing would say that all went well
	}
	a.leave(name) // sockets and devices mean nothing elsewhere
	return nil
}

// leave leaves a file out.
func (a *archiver) leave(name string) {
	const most = 10
	if a.count++; len(a.left) < most {
		a.left = append(a.left, name)
	}
}

// tellLeft ends the archive with what was left out, as a comment (pax(1)) of its
// top, which is there a second time: some readers (Python's tarfile) refuse an
// archive that ends with a header which is no entry's.
func (a *archiver) tellLeft() error {
	if a.count == 0 {
		return nil
	}
	h := *a.top
	h.PAXRecords = map[string]string{"comment": fmt.Sprintf("left out %d sockets, devices and mounts: %.200q", a.count, a.left)}
	return a.w.WriteHeader(&h)
}

func (a *archiver) addEntries(fd int, name string, depth int) error {
	dfd, err := entry(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(dfd), name)
	defer f.Close()
	entries, err := sortedNames(f)
	if err != nil {
		return err
	}
	if len(entries) > maxEntries {
		return sandbox.Errorf(sandbox.ErrTooLarge, "list_too_long", "directory %.100q has more than %d entries", name, maxEntries)
	}
	for _, e := range entries {
		efd, err := entry(dfd, e, unix.O_PATH|unix.O_NOFOLLOW, 0, unix.RESOLVE_NO_XDEV)
		if errors.Is(err, unix.EXDEV) { // another mount: /proc beneath /
			a.leave(path.Join(name, e))
			continue
		}
		if errors.Is(err, unix.ENOENT) {
			continue // gone since
		}
		if err != nil {
			return err
		}
		err = a.add(efd, path.Join(name, e), depth+1)
		_ = unix.Close(efd)
		if err != nil {
			return err
		}
	}
	return nil
}

// addRegular writes a file's bytes, as many as its header says.
func (a *archiver) addRegular(fd int, h *tar.Header, st *unix.Stat_t) error {
	if st.Nlink > 1 {
		id := inode{st.Dev, st.Ino}
		if first, ok := a.links[id]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return a.w.WriteHeader(h)
		}
		a.links[id] = h.Name
	}
	rfd, err := reopen(fd, unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("%.200s: %w", h.Name, err)
	}
	f := os.NewFile(uintptr(rfd), h.Name)
	defer f.Close()
	h.Typeflag, h.Size = tar.TypeReg, st.Size
	if err := tarfile.Write(a.w, h, f); err != nil {
		return fmt.Errorf("%.200s: %w", h.Name, err)
	}
	return nil
}

// tarIn unpacks beneath a directory, which is made if missing. Where the
// archive breaks off, what came before stays.
func (j *fileJob) tarIn() error {
	err := j.as(func() error {
		fd, err := mkdirAll(j.args.Path, 0o755, j.owner)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := refuseKernelFS(fd); err != nil {
			return err
		}
		if err := j.c.reply(struct{}{}); err != nil {
			return err
		}
		u := &unpacker{root: fd, owner: j.acc.uid == 0}
		r := tarfile.NewReader(&upload{c: j.c})
		h, err := nextHeader(r)
		if err == nil {
			err = u.unpack(h, r)
		}
		return err
	})
	if err != nil {
		return fileError("unpacking beneath", j.args.Path, err)
	}
	return j.c.reply(struct{}{})
}

// reset removes what is at a path and puts there what an archive has under its
// last name, which may be nothing. Both are done in one directory, opened once,
// with no link and no mount on the way to it. Before the archive has begun,
// nothing is removed.
func (j *fileJob) reset() error {
	err := j.as(func() error {
		parent, base := path.Split(j.args.Path)
		if err := refuseMounts(j.args.Path, true); err != nil {
			return err
		}
		dir, err := ownDir(parent, false)
		missing := errors.Is(err, unix.ENOENT)
		if err != nil && !missing {
			return err
		}
		defer func() { _ = unix.Close(dir) }()
		if j.args.Check {
			return nil
		}
		if err := j.c.reply(struct{}{}); err != nil {
			return err
		}
		r := tarfile.NewReader(&upload{c: j.c})
		h, err := nextHeader(r)
		if err == nil && !missing {
			err = removeTree(dir, base, j.c.stopped)
		}
		if err == nil && missing && h != nil {
			dir, err = ownDir(parent, true)
		}
		if err == nil && h != nil {
			err = (&unpacker{root: dir, owner: j.acc.uid == 0, also: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV}).unpack(h, r)
		}
		return err
	})
	if err != nil {
		return fileError("resetting", j.args.Path, err)
	}
	return j.c.reply(struct{}{})
}

// unpacker keeps every name of an archive under root: links may be followed
// as far as they stay there.
type unpacker struct {
	root  int
	owner bool   // ids come from the archive
	also  uint64 // resolve flags, beside those of entry
	dirs  []dirTimes
}

type dirTimes struct {
	name string
	mode uint32
	at   time.Time
}

// unpack begins with h, the first header, which is nil in an empty archive.
func (u *unpacker) unpack(h *tar.Header, r *tarfile.Reader) (err error) {
	for ; h != nil; h, err = nextHeader(r) {
		if err := u.entry(h, r); err != nil {
			if errors.Is(err, unix.EXDEV) {
				return sandbox.Errorf(sandbox.ErrInvalid, "archive_escapes", "archive entry %.200q leads out of the directory: %w", h.Name, err)
			}
			if errors.Is(err, io.ErrUnexpectedEOF) {
				return sandbox.Errorf(sandbox.ErrInvalid, "bad_archive", "the archive ends in entry %.200q: it was cut short; send it again", h.Name)
			}
			return fmt.Errorf("entry %.200q: %w", h.Name, err)
		}
	}
	if err != nil {
		return err
	}
	return u.finishDirs()
}

// nextHeader returns none at the end.
func nextHeader(r *tarfile.Reader) (*tar.Header, error) {
	h, err := r.Next()
	if isEOF(err) {
		return nil, nil
	}
	if _, ok := errors.AsType[*sandbox.Error](err); err != nil && !ok {
		err = sandbox.Errorf(sandbox.ErrInvalid, "bad_archive", "reading the archive: %w", err)
	}
	return h, err
}

// relative makes an archive's name one without leading slash or "..".
func relative(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }

func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	name := relative(h.Name)
	switch {
	case h.Typeflag == tar.TypeXGlobalHeader || name == "" && h.Typeflag == tar.TypeDir:
		return nil
	case name == "":
		return sandbox.Errorf(sandbox.ErrInvalid, "bad_archive", "archive entry %.200q is the directory that is unpacked into, and no directory", h.Name)
	}
	if len(name) > maxPath || strings.ContainsRune(name, 0) {
		return unix.ENAMETOOLONG
	}
	dir, err := u.parent(path.Dir(name))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	base := path.Base(name)
	switch h.Typeflag {
	case tar.TypeDir:
		return u.directory(dir, base, name, h)
	case tar.TypeReg, tar.TypeRegA: //nolint:staticcheck // old archives have it
		return u.regular(dir, base, h, r)
	case tar.TypeSymlink, tar.TypeLink, tar.TypeFifo:
		return u.special(dir, base, h)
	}
	return sandbox.Errorf(sandbox.ErrInvalid, "bad_archive", "archive entry %.200q of type %q cannot be unpacked in a sandbox", h.Name, h.Typeflag)
}

// parent opens the directory of an entry, making what is missing.
func (u *unpacker) parent(name string) (int, error) {
	fd, err := entry(u.root, name, unix.O_PATH|unix.O_DIRECTORY, 0, u.also)
	if !errors.Is(err, unix.ENOENT) || name == "." {
		return fd, err
	}
	up, err := u.parent(path.Dir(name))
	if err != nil {
		return -1, err
	}
	defer unix.Close(up)
	if err := unix.Mkdirat(up, path.Base(name), 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, err
	}
	return entry(u.root, name, unix.O_PATH|unix.O_DIRECTORY, 0, u.also)
}

func (u *unpacker) directory(dir int, base, name string, h *tar.Header) error {
	err := unix.Mkdirat(dir, base, 0o700)
	if errors.Is(err, unix.EEXIST) {
		fd, oerr := entry(u.root, name, unix.O_PATH|unix.O_DIRECTORY, 0, u.also)
		if oerr != nil {
			return oerr
		}
		_ = unix.Close(fd)
	} else if err != nil {
		return err
	} else if u.owner {
		_ = unix.Fchownat(dir, base, ownerID(h.Uid), ownerID(h.Gid), unix.AT_SYMLINK_NOFOLLOW)
	}
	u.dirs = append(u.dirs, dirTimes{name, uint32(h.Mode) & 0o7777, h.ModTime})
	return nil
}

func ownerID(id int) int {
	if id < 0 || id > maxID {
		return 0
	}
	return id
}

// regular writes a file, beside one that is in its place, which stays until all of
// the new one is there.
func (u *unpacker) regular(dir int, base string, h *tar.Header, r io.Reader) (err error) {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW
	name := base
	fd, err := entry(dir, name, flags, 0o600, 0)
	if errors.Is(err, unix.EEXIST) {
		name = tempName()
		fd, err = entry(dir, name, flags, 0o600, 0)
	}
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), base)
	defer f.Close()
	defer func() {
		if err != nil {
			_ = unix.Unlinkat(dir, name, 0) // the error says more
		}
	}()
	if _, err := io.Copy(struct{ io.Writer }{f}, r); err != nil {
		return err
	}
	if u.owner {
		if err := unix.Fchown(fd, ownerID(h.Uid), ownerID(h.Gid)); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return err
	}
	if err := setTime(dir, name, h.ModTime); err != nil || name == base {
		return err
	}
	return unix.Renameat(dir, name, dir, base)
}

// special makes a link or FIFO. What is in its place stays until it is there.
func (u *unpacker) special(dir int, base string, h *tar.Header) error {
	name := base
	err := u.make(dir, name, h)
	if errors.Is(err, unix.EEXIST) {
		name = tempName()
		err = u.make(dir, name, h)
	}
	if err != nil {
		return err
	}
	if u.owner && h.Typeflag != tar.TypeLink {
		err = unix.Fchownat(dir, name, ownerID(h.Uid), ownerID(h.Gid), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil && h.Typeflag != tar.TypeLink {
		err = setTime(dir, name, h.ModTime)
	}
	if err == nil && name != base {
		err = unix.Renameat(dir, name, dir, base)
	}
	if err != nil || name != base {
		_ = unix.Unlinkat(dir, name, 0) // left where it failed, and of two names of one file (rename(2))
	}
	return err
}

func (u *unpacker) make(dir int, name string, h *tar.Header) error {
	switch h.Typeflag {
	case tar.TypeSymlink:
		return unix.Symlinkat(h.Linkname, dir, name)
	case tar.TypeFifo:
		return unix.Mkfifoat(dir, name, uint32(h.Mode)&0o777)
	}
	target := relative(h.Linkname)
	from, err := entry(u.root, path.Dir(target), unix.O_PATH|unix.O_DIRECTORY, 0, u.also)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	return unix.Linkat(from, path.Base(target), dir, name, 0)
}

func setTime(dir int, base string, at time.Time) error {
	return unix.UtimesNanoAt(dir, base, modified(at), unix.AT_SYMLINK_NOFOLLOW)
}

// modified is for utimensat(2). UnixNano would end in 2262.
func modified(at time.Time) []unix.Timespec {
	return []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: at.Unix(), Nsec: int64(at.Nanosecond())}}
}

// finishDirs sets modes and times of directories last: files made in them
// would change the times, and a mode without write keep files out.
func (u *unpacker) finishDirs() error {
	slices.SortStableFunc(u.dirs, func(a, b dirTimes) int { return len(b.name) - len(a.name) }) // deepest first
	for _, d := range u.dirs {
		fd, err := entry(u.root, d.name, unix.O_PATH|unix.O_DIRECTORY, 0, u.also)
		if err != nil {
			return err
		}
		err = errors.Join(setFileTimes(fd, modified(d.at)), chmodFile(fd, d.mode))
		_ = unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}
