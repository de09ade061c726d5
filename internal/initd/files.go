package initd

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	maxPath    = 4096
	maxEntries = 100_000 // of one listing
	maxDepth   = 64
)

// fileJob is one file operation under way.
type fileJob struct {
	c    *conn
	args initproto.File
	acc  account
	// content: the path was written with a slash or "/." at its end, which a link
	// there is followed for (path_resolution(7)).
	content bool
	// owner is whom what is made belongs to; nil means whoever makes it.
	owner *account
	// as runs f on a thread that has become the user. Every name is
	// resolved on one; bytes may then move on any.
	as func(f func() error) error
}

type fileOp func(j *fileJob) error

var fileOps = map[string]fileOp{
	initproto.OpStat: (*fileJob).stat, initproto.OpList: (*fileJob).list, initproto.OpRead: (*fileJob).read,
	initproto.OpWrite: (*fileJob).write, initproto.OpMkdir: (*fileJob).mkdir, initproto.OpMove: (*fileJob).move,
	initproto.OpRemove: (*fileJob).remove, initproto.OpChmod: (*fileJob).chmod, initproto.OpWatch: (*fileJob).watch,
	initproto.OpTarOut: (*fileJob).tarOut, initproto.OpTarIn: (*fileJob).tarIn, initproto.OpSetAttrs: (*fileJob).setAttrs,
	initproto.OpReset: (*fileJob).reset,
}

// file runs a file operation. A root switch waits for it, having cut its
// connection.
func (s *Server) file(c *conn, a initproto.File, op fileOp) error {
	s.root.RLock()
	defer s.root.RUnlock()
	s.bind(c, true)
	s.used.Store(true)
	s.cfgMu.RLock()
	cfg, err := s.settingsNow()
	s.cfgMu.RUnlock()
	if err != nil {
		return err
	}
	switch {
	case a.Owner != "":
		a.User = a.Owner
	case a.User == "":
		a.User = cfg.User
	}
	acc, err := s.users.lookup(a.User)
	if err != nil {
		return err
	}
	var owner *account
	if a.Owner != "" && cfg.Capabilities == sandbox.CapabilitiesRoot {
		user := acc
		owner, acc = &user, account{name: "root", home: "/root", shell: "/bin/sh"}
	}
	content := strings.HasSuffix(a.Path, "/") || strings.HasSuffix(a.Path, "/.")
	if a.Path, err = cleanPath(a.Path); err != nil {
		return err
	}
	profile := cfg.Capabilities
	return op(&fileJob{c: c, args: a, acc: acc, owner: owner, content: content, as: func(f func() error) error { return asUser(acc, &profile, f) }})
}

func cleanPath(p string) (string, error) {
	if err := sandbox.ValidateFilePath(p); err != nil {
		return "", err
	}
	return path.Clean(p), nil
}

// fileError gives an errno its class.
func fileError(what, name string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*sandbox.Error](err); ok {
		return err
	}
	table := []struct {
		errno unix.Errno
		class error
		code  string
		next  string // what to do about it
	}{
		{unix.ENOENT, sandbox.ErrNotFound, "file_not_found", "list its directory to see what is there"},
		{unix.EACCES, sandbox.ErrForbidden, "permission_denied", "do it as a user who may, as root"},
		{unix.EPERM, sandbox.ErrForbidden, "permission_denied", "do it as a user who may, as root"},
		{unix.EROFS, sandbox.ErrForbidden, "read_only", "choose a path that is not read-only"},
		{unix.EEXIST, sandbox.ErrConflict, "file_exists", "remove it first, or choose another name"},
		{unix.ENOTEMPTY, sandbox.ErrConflict, "directory_not_empty", "remove it recursively, or empty it first; again, where somebody fills it meanwhile"},
		{unix.EBUSY, sandbox.ErrConflict, "file_busy", "it is the root or something is mounted on it: choose another"},
		{unix.EXDEV, sandbox.ErrConflict, "crosses_mounts", "copy and remove in place of a move; what is mounted is removed by no reset"},
		{unix.ENOTDIR, sandbox.ErrInvalid, "not_a_directory", "check the path: a part of it is a file"},
		{unix.EISDIR, sandbox.ErrInvalid, "is_a_directory", "name a file, or use the archive calls for a tree"},
		{unix.ELOOP, sandbox.ErrInvalid, "too_many_links", "its symbolic links lead in a circle"},
		{unix.ENAMETOOLONG, sandbox.ErrInvalid, "invalid_path", "use shorter names, at most 255 bytes each"},
		{unix.EINVAL, sandbox.ErrInvalid, "invalid_path", "a directory cannot be moved into itself, and some file systems, as that of /dev/mqueue, hold no plain files: choose another path"},
		{unix.ENXIO, sandbox.ErrInvalid, "not_a_file", "only regular files can be read and written"},
		{unix.ENOSPC, sandbox.ErrExhausted, "disk_full", "remove files or give the sandbox a larger disk limit; below its limit it is the host that is full: 'sandbox doctor' tells"},
		{unix.EDQUOT, sandbox.ErrExhausted, "disk_full", "remove files, or give the sandbox a larger disk limit"},
		{unix.EFBIG, sandbox.ErrTooLarge, "file_too_large", "write less at once"},
		{unix.EMFILE, sandbox.ErrExhausted, "open_files_exhausted", "end some transfers and try again"},
	}
	for _, row := range table {
		if errors.Is(err, row.errno) {
			return sandbox.Errorf(row.class, row.code, "%s %.300q: %w; %s", what, name, err, row.next)
		}
	}
	return sandbox.Errorf(sandbox.ErrUnavailable, "file_failed", "%s %.300q: %w", what, name, err)
}

// openParent opens the directory a path's last part is in, and refuses the
// kernel's own file systems: nothing is to be written there for a caller.
func openParent(name string) (dir int, base string, err error) {
	if name == "/" {
		return -1, "", unix.EBUSY
	}
	if dir, err = open(path.Dir(name), unix.O_PATH|unix.O_DIRECTORY); err != nil {
		return -1, "", err
	}
	if err := refuseKernelFS(dir); err != nil {
		_ = unix.Close(dir)
		return -1, "", err
	}
	return dir, path.Base(name), nil
}

func refuseKernelFS(fd int) error {
	kernels, err := kernelFS(fd)
	if err == nil && kernels {
		err = sandbox.Errorf(sandbox.ErrForbidden, "kernel_file", "files of the kernel (/proc, /sys) cannot be changed here: use a command")
	}
	return err
}

func kernelFS(fd int) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return false, err
	}
	return st.Type == unix.PROC_SUPER_MAGIC || st.Type == unix.SYSFS_MAGIC || st.Type == unix.CGROUP2_SUPER_MAGIC, nil
}

// refuseOwn keeps PID 1's own entries in /proc shut: opened by PID 1 itself
// they would show its memory to a user whom the kernel refuses them.
func refuseOwn(fd int) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return err
	}
	if st.Type != unix.PROC_SUPER_MAGIC {
		return nil
	}
	name, err := nameOf(fd)
	if err != nil {
		return err
	}
	if isOwn(name) {
		return sandbox.Errorf(sandbox.ErrForbidden, "permission_denied", "the init's own files in /proc cannot be read")
	}
	return nil
}

// describe makes the record of an open file; O_PATH does. Its path is name.
func describe(fd int, name string, n *names) (sandbox.FileInfo, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return sandbox.FileInfo{}, err
	}
	info := infoOf(&st, name, n)
	if info.Type == sandbox.FileSymlink {
		buf := make([]byte, maxPath)
		if k, err := unix.Readlinkat(fd, "", buf); err == nil {
			info.Target = string(buf[:k])
		}
	}
	if n.atLength {
		tellMore(&info, fd)
	}
	return info, nil
}

func infoOf(st *unix.Stat_t, name string, n *names) sandbox.FileInfo {
	info := sandbox.FileInfo{
		Name: path.Base(name), Path: name, Size: st.Size, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
		User: n.users[st.Uid], Group: n.groups[st.Gid], ModTime: time.Unix(st.Mtim.Unix()).UTC(), Type: sandbox.FileOther,
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		info.Type = sandbox.FileRegular
	case unix.S_IFDIR:
		info.Type = sandbox.FileDir
	case unix.S_IFLNK:
		info.Type = sandbox.FileSymlink
	}
	return info
}

// statPath describes what stands at a path, itself a link or not.
func (j *fileJob) statPath(name string) (sandbox.FileInfo, error) {
	fd, err := open(name, unix.O_PATH|unix.O_NOFOLLOW)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	defer unix.Close(fd)
	if err := refuseOwn(fd); err != nil {
		return sandbox.FileInfo{}, err
	}
	n := j.names()
	return describe(fd, name, &n)
}

func (j *fileJob) stat() error {
	return j.change("looking at", func() error { return nil })
}

// change runs f as the user and answers with what then stands at the path.
func (j *fileJob) change(what string, f func() error) error {
	var info sandbox.FileInfo
	err := j.as(func() error {
		if err := f(); err != nil {
			return err
		}
		var err error
		info, err = j.statPath(j.args.Path)
		return err
	})
	if err != nil {
		return fileError(what, j.args.Path, err)
	}
	return j.c.reply(info)
}

// list sends the entries beneath a directory, depth first, in order of name.
// Links to directories are told, not entered.
func (j *fileJob) list() error {
	depth := min(max(j.args.Depth, 1), maxDepth)
	var out []sandbox.FileInfo
	err := j.as(func() error {
		fd, err := open(j.args.Path, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		if err := refuseOwn(fd); err != nil {
			_ = unix.Close(fd)
			return err
		}
		n := j.names()
		return listInto(&out, fd, j.args.Path, depth, &n)
	})
	if err != nil {
		return fileError("listing", j.args.Path, err)
	}
	if err := j.c.reply(struct{}{}); err != nil {
		return nil
	}
	for _, info := range out {
		if err := j.c.sendJSON(initproto.FrameItem, info); err != nil {
			return nil
		}
	}
	return j.c.send(initproto.FrameEnd, nil)
}

// listInto takes over fd.
func listInto(out *[]sandbox.FileInfo, fd int, dir string, depth int, n *names) error {
	f := os.NewFile(uintptr(fd), dir)
	defer f.Close()
	entries, err := sortedNames(f)
	if err != nil {
		return err
	}
	for _, name := range entries {
		if len(*out) >= maxEntries {
			return sandbox.Errorf(sandbox.ErrTooLarge, "list_too_long", "directory %.200q lists more than %d entries: list a part of it", dir, maxEntries)
		}
		efd, err := entry(fd, name, unix.O_PATH|unix.O_NOFOLLOW, 0, 0)
		if err != nil {
			continue // gone since
		}
		info, err := describe(efd, path.Join(dir, name), n)
		_ = unix.Close(efd)
		if err != nil {
			continue
		}
		*out = append(*out, info)
		if info.Type != sandbox.FileDir || depth == 1 {
			continue
		}
		sub, err := entry(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0, 0)
		if err != nil {
			continue // not ours to read: told above, not entered
		}
		if refuseOwn(sub) != nil {
			_ = unix.Close(sub)
			continue
		}
		if err := listInto(out, sub, info.Path, depth-1, n); err != nil {
			return err
		}
	}
	return nil
}

// sortedNames reads a directory, but no more of it than a listing may have.
func sortedNames(f *os.File) ([]string, error) {
	names, err := f.Readdirnames(maxEntries + 1)
	if err != nil && len(names) == 0 && !isEOF(err) {
		return nil, err
	}
	sortStrings(names)
	return names, nil
}

func (j *fileJob) mkdir() error {
	return j.change("making directory", func() error {
		fd, err := mkdirAll(j.args.Path, orMode(j.args.Mode, 0o755), j.owner)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	})
}

func orMode(mode, otherwise uint32) uint32 {
	if mode &= 0o7777; mode != 0 {
		return mode
	}
	return otherwise
}

// mkdirAll opens a directory (O_PATH), making it and its parents; mode is
// the last one's, where it is made. Those made belong to owner.
func mkdirAll(name string, mode uint32, owner *account) (int, error) {
	fd, err := open(name, unix.O_PATH|unix.O_DIRECTORY)
	if !errors.Is(err, unix.ENOENT) || name == "/" {
		return fd, err
	}
	dir, err := mkdirAll(path.Dir(name), 0o755, owner)
	if err != nil {
		return -1, err
	}
	defer unix.Close(dir)
	return makeDir(dir, path.Base(name), mode, owner)
}

func makeDir(dir int, name string, mode uint32, owner *account) (int, error) {
	if err := refuseKernelFS(dir); err != nil {
		return -1, err
	}
	err := unix.Mkdirat(dir, name, mode&0o777)
	made := err == nil
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, err
	}
	fd, err := entry(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0, 0)
	if err != nil {
		return -1, err
	}
	if !made {
		return fd, nil
	}
	// What was made in a set-group-id directory has its group and is one, too
	// (inode(7)); a mode that was asked for says nothing of that.
	var st unix.Stat_t
	err = unix.Fstatat(fd, "", &st, unix.AT_EMPTY_PATH)
	shared := st.Mode & unix.S_ISGID
	if err == nil && owner != nil {
		gid := int(owner.gid)
		if shared != 0 {
			gid = -1
		}
		err = unix.Fchownat(fd, "", int(owner.uid), gid, unix.AT_EMPTY_PATH)
	}
	if err == nil {
		err = chmodFile(fd, mode|shared) // past the umask
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (j *fileJob) move() error {
	to, err := cleanPath(j.args.To)
	if err != nil {
		return err
	}
	err = j.as(func() error {
		from, fromBase, err := openParent(j.args.Path)
		if err != nil {
			return err
		}
		defer unix.Close(from)
		dir, base, err := openParent(to)
		if err != nil {
			return fmt.Errorf("to %.200q: %w", to, err)
		}
		defer unix.Close(dir)
		return unix.Renameat(from, fromBase, dir, base)
	})
	if err != nil {
		return fileError("moving", j.args.Path, err)
	}
	return j.c.reply(struct{}{})
}

func (j *fileJob) remove() error {
	err := j.as(func() error {
		dir, base, err := openParent(j.args.Path)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		err = unix.Unlinkat(dir, base, 0)
		if !errors.Is(err, unix.EISDIR) {
			return err
		}
		if !j.args.Recursive {
			return unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
		}
		return removeTree(dir, base, j.c.stopped)
	})
	if err != nil {
		return fileError("removing", j.args.Path, err)
	}
	return j.c.reply(struct{}{})
}

func (j *fileJob) chmod() error {
	err := j.as(func() error {
		fd, err := open(j.args.Path, unix.O_PATH)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := refuseKernelFS(fd); err != nil {
			return err
		}
		return chmodFile(fd, j.args.Mode&0o7777)
	})
	if err != nil {
		return fileError("changing the mode of", j.args.Path, err)
	}
	return j.c.reply(struct{}{})
}
