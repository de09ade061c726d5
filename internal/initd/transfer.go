package initd

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/initproto"
	"github.com/sandboxd/sandboxd/sandbox"
)

func isEOF(err error) bool   { return errors.Is(err, io.EOF) }
func sortStrings(s []string) { slices.Sort(s) }
func notRegular(n string) error {
	return sandbox.Errorf(sandbox.ErrInvalid, "not_a_file", "%.300q is not a regular file", n)
}

var dataBuffers = sync.Pool{New: func() any { b := make([]byte, initproto.HeaderSize+initproto.MaxData); return &b }}

// dataWriter sends what is written to it as Data frames.
type dataWriter struct{ c *conn }

func (w dataWriter) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := min(len(p)-done, initproto.MaxData)
		if err := w.c.send(initproto.FrameData, p[done:done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

// read sends a regular file. It is opened as the user and without blocking,
// so that no FIFO or device can hold PID 1.
func (j *fileJob) read() error {
	if j.args.Offset < 0 {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_offset", "offset %d is negative", j.args.Offset)
	}
	var f *os.File
	var info sandbox.FileInfo
	err := j.as(func() error {
		fd, err := open(j.args.Path, unix.O_RDONLY)
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fd), j.args.Path)
		if err := refuseOwn(fd); err != nil {
			return err
		}
		n := j.names()
		if info, err = describe(fd, j.args.Path, &n); err != nil {
			return err
		}
		switch info.Type {
		case sandbox.FileRegular:
			kernels, err := kernelFS(fd)
			if kernels {
				info.Size = 0 // a file of /sys says a page: whoever reads it must not wait for so much
			}
			return err
		case sandbox.FileDir:
			return unix.EISDIR
		}
		return notRegular(j.args.Path)
	})
	if f != nil {
		defer f.Close()
	}
	if err != nil {
		return fileError("reading", j.args.Path, err)
	}
	if j.args.Offset > 0 {
		if _, err := f.Seek(j.args.Offset, io.SeekStart); err != nil {
			return fileError("reading", j.args.Path, err)
		}
	}
	if err := j.c.reply(info); err != nil {
		return nil
	}
	return j.sendFile(f, j.args.Limit)
}

func (j *fileJob) sendFile(f *os.File, limit int64) error {
	bp := dataBuffers.Get().(*[]byte) //nolint:errcheck // the pool holds nothing else
	defer dataBuffers.Put(bp)
	b := *bp
	for limit != 0 {
		room := int64(initproto.MaxData)
		if limit > 0 {
			room = min(room, limit)
		}
		n, err := f.Read(b[initproto.HeaderSize : initproto.HeaderSize+room])
		if n > 0 {
			initproto.PutHeader(b, initproto.FrameData, n)
			if err := j.c.write(b[:initproto.HeaderSize+n]); err != nil {
				return nil
			}
			if limit > 0 {
				limit -= int64(n)
			}
		}
		if isEOF(err) {
			break
		}
		if err != nil {
			return fileError("reading", j.args.Path, err)
		}
	}
	return j.c.send(initproto.FrameEnd, nil)
}

// upload is the stream of Upload frames as a reader. It ends with io.EOF
// only where the other side said that it was whole.
type upload struct {
	c    *conn
	buf  []byte
	rest []byte
	done bool
}

var errBroken = sandbox.Errorf(sandbox.ErrUnavailable, "upload_broken", "the upload broke off before its end")

func (u *upload) Read(p []byte) (int, error) {
	for len(u.rest) == 0 {
		if u.done {
			return 0, io.EOF
		}
		fr, err := initproto.ReadFrame(u.c.in, initproto.Daemon, u.buf)
		if err != nil {
			return 0, errBroken
		}
		switch fr.Type {
		case initproto.FrameUpload:
			u.rest = fr.Payload
			if cap(fr.Payload) > cap(u.buf) {
				u.buf = fr.Payload[:0]
			}
		case initproto.FrameUploadEnd:
			u.done = true
		default:
			return 0, errBroken
		}
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

// newFile is a file that has no name yet, or a temporary one.
type newFile struct {
	f       *os.File
	dir     int
	base    string
	temp    string // empty while it has none
	existed *unix.Stat_t
}

// write replaces a file at the end of the upload. Until then the new content
// has no name (O_TMPFILE), or where the file system cannot do that a hidden
// one, so a broken upload leaves the old content and nothing else.
func (j *fileJob) write() error {
	if j.args.Owner != "" {
		return j.writeInPlace()
	}
	var nf *newFile
	err := j.as(func() (err error) {
		nf, err = j.createFile()
		return err
	})
	if err != nil {
		return fileError("writing", j.args.Path, err)
	}
	defer func() { _ = j.as(func() error { nf.discard(); return nil }) }()
	if err := j.c.reply(struct{}{}); err != nil {
		return nil
	}
	if err := nf.fill(&upload{c: j.c}); err != nil {
		return fileError("writing", j.args.Path, err)
	}
	var info sandbox.FileInfo
	err = j.as(func() (err error) {
		if err := nf.publish(j.args.Mode); err != nil {
			return err
		}
		n := j.names()
		info, err = describe(int(nf.f.Fd()), j.args.Path, &n)
		nf.discard() // before the answer: what is open for writing cannot be executed
		return err
	})
	if err != nil {
		return fileError("writing", j.args.Path, err)
	}
	return j.c.reply(info)
}

func (nf *newFile) fill(r io.Reader) error {
	bp := dataBuffers.Get().(*[]byte) //nolint:errcheck // the pool holds nothing else
	defer dataBuffers.Put(bp)
	// Hide ReadFrom: the copy must use our buffer.
	_, err := io.CopyBuffer(struct{ io.Writer }{nf.f}, r, *bp)
	return err
}

func (j *fileJob) createFile() (*newFile, error) {
	dirName, base, err := realTarget(j.args.Path)
	if err != nil {
		return nil, err
	}
	dir, err := mkdirAll(dirName, 0o755, j.owner)
	if err != nil {
		return nil, err
	}
	nf := &newFile{dir: dir, base: base}
	if err := nf.create(); err != nil {
		nf.discard()
		return nil, err
	}
	return nf, nil
}

func (nf *newFile) create() error {
	if err := refuseKernelFS(nf.dir); err != nil {
		return err
	}
	var st unix.Stat_t
	switch err := unix.Fstatat(nf.dir, nf.base, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return unix.EISDIR
	case err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG:
		return notRegular(nf.base)
	case err == nil:
		nf.existed = &st
	case !errors.Is(err, unix.ENOENT):
		return err
	}
	fd, err := entry(nf.dir, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600, 0)
	if err != nil {
		nf.temp = tempName()
		fd, err = entry(nf.dir, nf.temp, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600, 0)
		if err != nil {
			nf.temp = ""
			return err
		}
	}
	nf.f = os.NewFile(uintptr(fd), nf.base)
	return nil
}

func tempName() string { return ".sbx-" + rand.Text() }

// publish gives the file its mode, its owner where it replaces one, and its name.
func (nf *newFile) publish(mode uint32) error {
	mode = orMode(mode, 0o644)
	fd := int(nf.f.Fd())
	if st := nf.existed; st != nil {
		mode = st.Mode & 0o7777
		_ = unix.Fchown(fd, int(st.Uid), int(st.Gid)) // who may not, becomes the owner
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		return err
	}
	if nf.temp == "" {
		temp := tempName()
		if err := linkFile(fd, nf.dir, temp); err != nil {
			return fmt.Errorf("naming the new content: %w", err)
		}
		nf.temp = temp
	}
	if err := unix.Renameat(nf.dir, nf.temp, nf.dir, nf.base); err != nil {
		return err
	}
	nf.temp = ""
	return nil
}

// discard lets go of the file; what was not published goes.
func (nf *newFile) discard() {
	if nf.temp != "" {
		_ = unix.Unlinkat(nf.dir, nf.temp, 0)
		nf.temp = ""
	}
	if nf.f != nil {
		_ = nf.f.Close()
		nf.f = nil
	}
	if nf.dir >= 0 {
		_ = unix.Close(nf.dir)
		nf.dir = -1
	}
}

// realTarget follows a link that stands at the path itself, so that writing
// replaces the file it names and not the link.
func realTarget(name string) (dir, base string, err error) {
	const most = 40 // as the kernel follows, path_resolution(7)
	for range most {
		if name == "/" {
			return "", "", unix.EISDIR
		}
		fd, err := open(name, unix.O_PATH|unix.O_NOFOLLOW)
		if err != nil {
			if errors.Is(err, unix.ENOENT) {
				return path.Dir(name), path.Base(name), nil
			}
			return "", "", err
		}
		buf := make([]byte, maxPath)
		n, rerr := unix.Readlinkat(fd, "", buf)
		kerr := refuseKernelFS(fd) // where what a link says may not be where it leads
		_ = unix.Close(fd)
		if rerr == nil && kerr != nil {
			return "", "", kerr
		}
		if rerr != nil { // not a link
			return path.Dir(name), path.Base(name), nil
		}
		target := string(buf[:n])
		if !path.IsAbs(target) {
			parent, err := realDir(path.Dir(name))
			if err != nil {
				return "", "", err
			}
			target = path.Join(parent, target)
		}
		name = path.Clean(target)
	}
	return "", "", unix.ELOOP
}

// realDir tells a directory's name without links.
func realDir(name string) (string, error) {
	fd, err := open(name, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	return nameOf(fd)
}

// bufferedData collects small writes into full Data frames.
func bufferedData(c *conn) *bufio.Writer {
	return bufio.NewWriterSize(dataWriter{c}, initproto.MaxData)
}
