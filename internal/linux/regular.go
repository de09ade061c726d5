package linux

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNotRegular is of a file that need not have an end: a pipe can keep its
// reader waiting, a device goes on. Directories are none, either.
var ErrNotRegular = errors.New("it is no regular file")

// OpenRegular opens a regular file to be read, without waiting, and returns its
// size. ErrNotRegular.
func OpenRegular(path string) (*os.File, int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = &os.PathError{Op: "open", Path: path, Err: ErrNotRegular}
	}
	if err != nil {
		_ = f.Close() // the first error counts
		return nil, 0, err
	}
	return f, st.Size(), nil
}

// ReadRegular reads a regular file of at most so many bytes. ErrNotRegular.
func ReadRegular(path string, most int64) ([]byte, error) {
	f, _, err := OpenRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(b)) > most {
		err = &os.PathError{Op: "read", Path: path, Err: fmt.Errorf("it has more than %d bytes: %w", most, unix.EFBIG)}
	}
	return b, err
}
