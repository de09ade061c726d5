// Package tarfile writes regular files into tar archives while others may change
// them. An archive says how long a file is before its content: no file is filled up
// to what was said of it. It opens nothing itself.
package tarfile

import (
	"archive/tar"
	"bytes"
	"io"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// small is up to which size a file is read before its header is written: files
	// of the kernel's say that they have 0 bytes (proc(5)) or a page (sysfs(5)).
	small = 4096
	// most is how many bytes of such a file are kept in memory.
	most = 1 << 20
)

// Write writes h and what is in f, of which h.Size is the size it says it has; what
// is appended meanwhile is left out. ErrConflict with code file_changed where it has
// become shorter, ErrTooLarge with code file_without_size.
func Write(w *tar.Writer, h *tar.Header, f io.Reader) error {
	if h.Size <= small {
		b, err := io.ReadAll(io.LimitReader(f, most+1))
		if err != nil {
			return err
		}
		if len(b) > most {
			return sandbox.Errorf(sandbox.ErrTooLarge, "file_without_size", "%.300q says that it has %d bytes and has more than %d: copy it by 'sandbox files cat' or 'sandbox files put', which need no size", h.Name, h.Size, most)
		}
		h.Size, f = int64(len(b)), bytes.NewReader(b)
	}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.Copy(w, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		err = sandbox.Errorf(sandbox.ErrConflict, "file_changed", "%.300q changed while it was read: it had %d bytes and now ends after %d; copy it again when nobody writes to it", h.Name, h.Size, n)
	}
	return err
}
