package rootfs

import (
	"archive/tar"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	xattrRecord     = "SCHILY.xattr." // how pax headers carry extended attributes
	xattrCapability = "security.capability"
	xattrACL        = "system.posix_acl_access"
	xattrDefaultACL = "system.posix_acl_default"
	maxXattr        = 65536 // of a value: XATTR_SIZE_MAX
)

// keepsXattr says which extended attributes layers have. All else either
// means something to the kernel on the host's side (trusted.overlay.*, labels
// of security modules) or nothing to anybody in a sandbox.
func keepsXattr(name string) bool {
	return strings.HasPrefix(name, "user.") || name == xattrCapability || name == xattrACL || name == xattrDefaultACL
}

// entryXattrs returns the extended attributes an entry carries.
func entryXattrs(hdr *tar.Header) map[string]string {
	var out map[string]string
	for key, value := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrRecord)
		if !ok {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = value
	}
	return out
}

// setXattrs gives a file or directory those of the entry's attributes that
// layers keep.
func (u *unpacker) setXattrs(fd int, hdr *tar.Header) error {
	attrs := entryXattrs(hdr)
	for _, name := range slices.Sorted(maps.Keys(attrs)) {
		value := attrs[name]
		if !keepsXattr(name) {
			u.layer.dropped++
			continue
		}
		if len(value) > maxXattr {
			return xattrTooLarge(hdr.Name, name, value)
		}
		if name == xattrACL || name == xattrDefaultACL {
			if err := checkACL(value); err != nil {
				return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_id", "archive entry %.200q, its %s: %w", hdr.Name, name, err)
			}
			u.layer.acl = u.layer.acl || name == xattrDefaultACL
		}
		err := unix.Fsetxattr(fd, name, []byte(value), 0)
		switch {
		case err == nil:
		case errors.Is(err, unix.EOPNOTSUPP):
			u.layer.dropped++
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ERANGE):
			return sandbox.Errorf(sandbox.ErrInvalid, "image_bad_format", "archive entry %.200q: the kernel takes no extended attribute %.80q with such a value: %w", hdr.Name, name, err)
		case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENOSPC) && hasRoom(fd):
			return xattrTooLarge(hdr.Name, name, value)
		default:
			return &os.PathError{Op: "set extended attribute", Path: hdr.Name, Err: err}
		}
	}
	return nil
}

func xattrTooLarge(entry, name, value string) error {
	return sandbox.Errorf(sandbox.ErrTooLarge, "image_too_large", "archive entry %.200q: its extended attribute %.80q of %d bytes is more than the volume's filesystem holds for one file", entry, name, len(value))
}

// hasRoom tells an attribute that does not fit its inode, as on ext4, from a
// full disk: both are ENOSPC.
func hasRoom(fd int) bool {
	var st unix.Statfs_t
	return unix.Fstatfs(fd, &st) == nil && st.Bavail*uint64(st.Bsize) > 16<<20 && st.Ffree > 16
}

// checkACL refuses an ACL that names ids a sandbox does not have. Its form is
// that of linux/posix_acl_xattr.h: a version, then tag, permissions and id
// of each entry; whether that is sound, the kernel checks.
func checkACL(value string) error {
	const head, size = 4, 8
	for b := []byte(value)[min(head, len(value)):]; len(b) >= size; b = b[size:] {
		tag, id := binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint32(b[4:])
		if (tag == aclUser || tag == aclGroup) && id > maxID {
			return fmt.Errorf("it names id %d, a sandbox has 0 to %d", id, maxID)
		}
	}
	return nil
}

const (
	aclUser  = 0x02 // a named user
	aclGroup = 0x08
)

// getXattr returns the value of an extended attribute, nil if there is none.
func getXattr(fd int, name string) ([]byte, error) {
	buf := make([]byte, 256)
	for {
		n, err := unix.Fgetxattr(fd, name, buf)
		switch {
		case errors.Is(err, unix.ERANGE) && len(buf) < maxXattr:
			buf = make([]byte, maxXattr)
			continue
		case errors.Is(err, unix.ENODATA), errors.Is(err, unix.EOPNOTSUPP):
			return nil, nil
		case err != nil:
			return nil, os.NewSyscallError("fgetxattr "+name, err)
		}
		return buf[:n:n], nil
	}
}

// forgetXattrs removes what an earlier entry of the same name had set.
func forgetXattrs(fd int, entry string) error {
	names, err := listXattrs(func(buf []byte) (int, error) { return unix.Flistxattr(fd, buf) })
	if err != nil {
		return err
	}
	for _, n := range names {
		if !keepsXattr(n) {
			continue
		}
		if err := unix.Fremovexattr(fd, n); err != nil && !errors.Is(err, unix.ENODATA) {
			return &os.PathError{Op: "remove extended attribute", Path: entry, Err: err}
		}
	}
	return nil
}

// forgetACL removes what the kernel made a new file or directory inherit: in
// an archive, every entry says for itself what it has.
func (u *unpacker) forgetACL(fd int, dir bool, entry string) error {
	if !u.layer.acl {
		return nil
	}
	names := []string{xattrACL, xattrDefaultACL}
	if !dir {
		names = names[:1]
	}
	for _, n := range names {
		if err := unix.Fremovexattr(fd, n); err != nil && !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.EOPNOTSUPP) {
			return &os.PathError{Op: "remove extended attribute", Path: entry, Err: err}
		}
	}
	return nil
}
