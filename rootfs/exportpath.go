package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// ExportPath writes what a stack shows at one path, absolute as inside, as a
// tar whose names begin with the path's last part. found is false, and
// nothing is written, where it shows nothing there. No link is followed on
// the way.
func (s *Store) ExportPath(ctx context.Context, stack []string, name string, w io.Writer) (found bool, err error) {
	rel := strings.Trim(path.Clean(name), "/")
	e := exporter{ctx: ctx}
	_, err = e.exportWith(w, func() (*os.File, error) { return s.openView(stack) }, func(root *os.File) error {
		parent, err := linux.OpenBeneath(int(root.Fd()), path.Dir(rel), openDirFlags, 0, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS)
		if absent(err) {
			return nil
		}
		if err != nil {
			return &os.PathError{Op: "open", Path: path.Dir(rel), Err: err}
		}
		defer unix.Close(parent)
		var st unix.Stat_t
		if err := unix.Fstatat(parent, path.Base(rel), &st, unix.AT_SYMLINK_NOFOLLOW); absent(err) {
			return nil
		}
		found = true
		return e.entry(parent, path.Base(rel), path.Base(rel), 0, true)
	})
	if err != nil {
		return found, fmt.Errorf("rootfs: export %s: %w", name, err)
	}
	return found, nil
}

func absent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}
