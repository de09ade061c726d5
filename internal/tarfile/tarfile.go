// Package tarfile writes regular files into tar archives while others may change
// them, and knows an archive that was cut short. An archive says how long a file is
// before its content: no file is filled up to what was said of it. It opens nothing
// itself.
package tarfile

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// small is up to which size a file is read before its header is written: files
	// of the kernel's say that they have 0 bytes (proc(5)) or a page (sysfs(5)).
	small = 4096
	// most is how many bytes of such a file are kept in memory.
	most = 1 << 20
	// block is what an archive consists of (pax(1)).
	block = 512
)

// ErrCut is the error of an archive without an end.
var ErrCut = errors.New("the archive ends without its end mark: it was cut short; send it again")

// errMore is the error of data after an archive's end.
var errMore = errors.New("there is data after the end of the archive: send one archive only")

// Drain reads what follows an archive's end, so that what checks the stream around it
// sees all, and accepts only padding.
func Drain(r io.Reader) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		if len(bytes.Trim(buf[:n], "\x00")) > 0 {
			return errMore
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Reader reads an archive to its end mark, a block of zeros (pax(1)), and the
// padding after it. For archive/tar the input's end is the archive's, too.
type Reader struct {
	*tar.Reader
	in     counter
	sparse bool // the present entry has holes: of any size, and of no byte of the input
}

// NewReader returns a reader of what r yields.
func NewReader(r io.Reader) *Reader {
	t := &Reader{in: counter{r: r}}
	t.Reader = tar.NewReader(&t.in)
	return t
}

// Next returns the next entry, io.EOF after the last and ErrCut where there is
// neither. Data after the end mark is an error.
func (t *Reader) Next() (*tar.Header, error) {
	if !t.sparse {
		if _, err := io.Copy(io.Discard, t.Reader); err != nil {
			return nil, err
		}
	}
	// Headers of headers are entries for archive/tar alone, and it takes the end of
	// the input after one for the archive's, too: all that follows must be zeros.
	next := (t.in.n + block - 1) / block * block
	h, err := t.Reader.Next()
	if t.sparse { // where the next header begins is not known
		next = t.in.n - block
	}
	if errors.Is(err, io.EOF) {
		if t.in.n < next+block || t.in.zeros < t.in.n-next {
			return nil, ErrCut
		}
		if derr := Drain(t.in.r); derr != nil {
			return nil, derr
		}
	}
	t.sparse = err == nil && hasHoles(h)
	return h, err
}

func hasHoles(h *tar.Header) bool {
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return h.Typeflag == tar.TypeGNUSparse
}

// counter counts what is read, and the zeros it ends with, up to those of an end
// mark.
type counter struct {
	r        io.Reader
	n, zeros int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	last := p[max(0, n-2*block):n]
	zeros := len(last) - len(bytes.TrimRight(last, "\x00"))
	if zeros == n {
		c.zeros += int64(n)
	} else {
		c.zeros = int64(zeros)
	}
	return n, err
}

// Write writes h and what is in f, of which h.Size is the size it says it has; what
// is appended meanwhile is left out. ErrConflict with code file_changed where it has
// become shorter, ErrTooLarge with code file_without_size.
func Write(w *tar.Writer, h *tar.Header, f io.Reader) error {
	if h.Size <= small {
		b := bytes.NewBuffer(make([]byte, 0, h.Size+bytes.MinRead)) // all of most files in one read
		if _, err := b.ReadFrom(io.LimitReader(f, most+1)); err != nil {
			return err
		}
		if b.Len() > most {
			return sandbox.Errorf(sandbox.ErrTooLarge, "file_without_size", "%.300q says that it has %d bytes and has more than %d: copy it by 'sandbox files cat' or 'sandbox files put', which need no size", h.Name, h.Size, most)
		}
		h.Size = int64(b.Len())
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		_, err := w.Write(b.Bytes())
		return err
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
