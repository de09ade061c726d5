package initd

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// writeInPlace writes a file as an agent does: the file that is there gets new
// content, so that whoever watches it or has it open sees it written. It becomes
// the owner's, keeps its mode, and loses its attributes. A broken upload leaves
// a part of the new content, or where there was no file, none.
func (j *fileJob) writeInPlace() error {
	var f *os.File
	at, base := -1, "" // where a file was made
	made := func() {   // takes it back
		if at >= 0 {
			_ = j.as(func() error { return unix.Unlinkat(at, base, 0) })
		}
	}
	defer func() {
		if at >= 0 {
			_ = unix.Close(at)
		}
	}()
	err := j.as(func() error {
		var dirName string
		var err error
		if dirName, base, err = realTarget(j.args.Path); err != nil {
			return err
		}
		dir, err := mkdirAll(dirName, 0o755, j.owner)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		var isNew bool
		if f, isNew, err = j.openInPlace(dir, base); err != nil || !isNew {
			return err
		}
		at, err = unix.FcntlInt(uintptr(dir), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			at = -1
		}
		return nil
	})
	if f != nil {
		defer f.Close()
	}
	if err != nil {
		return fileError("writing", j.args.Path, err)
	}
	if err := j.c.reply(struct{}{}); err != nil {
		made()
		return nil
	}
	if err := (&newFile{f: f}).fill(&upload{c: j.c}); err != nil {
		made()
		return fileError("writing", j.args.Path, err)
	}
	var info sandbox.FileInfo
	err = j.as(func() (err error) {
		n := j.names()
		info, err = describe(int(f.Fd()), j.args.Path, &n)
		_ = f.Close() // before the answer: what is open for writing cannot be executed
		return err
	})
	if err != nil {
		return fileError("writing", j.args.Path, err)
	}
	return j.c.reply(info)
}

// openInPlace opens a regular file to be written anew, making it where there
// is none.
func (j *fileJob) openInPlace(dir int, base string) (f *os.File, isNew bool, err error) {
	if err := refuseKernelFS(dir); err != nil {
		return nil, false, err
	}
	const flags = unix.O_WRONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY
	fd, err := entry(dir, base, flags|unix.O_CREAT|unix.O_EXCL, 0o600, 0)
	isNew = err == nil
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, false, err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
		case unix.S_IFDIR:
			return nil, false, unix.EISDIR
		default:
			return nil, false, notRegular(j.args.Path)
		}
		fd, err = entry(dir, base, flags, 0, 0)
	}
	if err != nil {
		return nil, false, err
	}
	f = os.NewFile(uintptr(fd), base)
	if err := j.beginAnew(fd, isNew); err != nil {
		_ = f.Close()
		return nil, false, err
	}
	return f, isNew, nil
}

// beginAnew makes an open file the owner's, and empty.
func (j *fileJob) beginAnew(fd int, isNew bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG { // exchanged since it was looked at
		return notRegular(j.args.Path)
	}
	mode := st.Mode & 0o7777
	if isNew {
		mode = orMode(j.args.Mode, 0o644)
	}
	if j.owner != nil && (isNew || st.Uid != j.owner.uid || st.Gid != j.owner.gid) {
		if err := unix.Fchown(fd, int(j.owner.uid), int(j.owner.gid)); err != nil {
			return err
		}
		isNew = true // its mode may have lost bits
	}
	if isNew {
		if err := unix.Fchmod(fd, mode); err != nil {
			return err
		}
	}
	for name := range attrsOf(fd) {
		if strings.HasPrefix(name, attrNamespace) {
			_ = removeAttr(fd, name)
		}
	}
	return unix.Ftruncate(fd, 0)
}
