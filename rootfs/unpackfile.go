package rootfs

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

func (u *unpacker) file(dir int, base string, hdr *tar.Header, content io.Reader) error {
	if hdr.Size < 0 || hdr.Size > u.lim.bytes-u.bytes {
		return u.lim.tooLarge(fmt.Sprintf("archive entry %.200q: with its %d bytes the archive is too large", hdr.Name, hdr.Size))
	}
	u.bytes += hdr.Size
	const flags = unix.O_CREAT | unix.O_EXCL | unix.O_WRONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(dir, base, flags, 0o600)
	if errors.Is(err, unix.EEXIST) {
		if err := u.clear(dir, base, hdr.Name); err != nil {
			return err
		}
		fd, err = unix.Openat(dir, base, flags, 0o600)
	}
	if err != nil {
		return &os.PathError{Op: "create", Path: hdr.Name, Err: err}
	}
	f := os.NewFile(uintptr(fd), hdr.Name)
	defer f.Close() // syncfs tells of what a close would
	sum, err := u.copy(f, content, hdr.Size)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	ts := mtime(hdr.ModTime)
	err = unix.Fchown(fd, hdr.Uid, hdr.Gid)
	if err == nil {
		err = unix.Fchmod(fd, mode(hdr))
	}
	if err == nil && u.layer == nil {
		err = unix.Fstat(fd, &st)
	}
	if err == nil && u.layer != nil {
		u.count(hdr.Size)
		if err := errors.Join(u.forgetACL(fd, false, hdr.Name), u.setXattrs(fd, hdr)); err != nil {
			return err
		}
	}
	if err == nil {
		err = unix.UtimesNanoAt(fd, "", []unix.Timespec{ts, ts}, unix.AT_EMPTY_PATH)
	}
	if err != nil {
		return &os.PathError{Op: "set file", Path: hdr.Name, Err: err}
	}
	if u.layer == nil {
		u.sums[st.Ino] = sum
	}
	return nil
}

// copy writes size bytes and leaves holes for long runs of zeroes.
func (u *unpacker) copy(f *os.File, content io.Reader, size int64) ([sha256.Size]byte, error) {
	var h hash.Hash
	if u.layer == nil {
		h = sha256.New()
	}
	zero := u.buf[sparseBlock:]
	clear(zero)
	buf := u.buf[:sparseBlock]
	holes := false
	for off := int64(0); off < size; {
		n, err := io.ReadFull(content, buf[:min(sparseBlock, size-off)])
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return [sha256.Size]byte{}, err
		}
		if h != nil {
			h.Write(buf[:n])
		}
		if holes = bytes.Equal(buf[:n], zero[:n]); !holes {
			if _, err := f.WriteAt(buf[:n], off); err != nil {
				return [sha256.Size]byte{}, err
			}
		}
		off += int64(n)
	}
	if holes { // at the end
		if err := f.Truncate(size); err != nil {
			return [sha256.Size]byte{}, err
		}
	}
	// A sparse entry's map may hold more than its size says.
	if n, err := content.Read(buf[:1]); n != 0 || !errors.Is(err, io.EOF) {
		if err == nil {
			err = tar.ErrHeader
		}
		return [sha256.Size]byte{}, err
	}
	if h == nil {
		return [sha256.Size]byte{}, nil
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}
