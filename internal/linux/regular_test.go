package linux

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestReadRegular: what has no end is refused and not waited for, what is too
// large is not read; a regular file is, up to the last byte.
func TestReadRegular(t *testing.T) {
	dir := t.TempDir()
	pipe, file := filepath.Join(dir, "pipe"), filepath.Join(dir, "file")
	if err := errors.Join(unix.Mkfifo(pipe, 0o600), os.WriteFile(file, []byte("12345"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		most int64
		want error
	}{
		{pipe, 5, ErrNotRegular},
		{"/dev/zero", 5, ErrNotRegular},
		{dir, 5, ErrNotRegular},
		{file, 4, unix.EFBIG},
		{dir + "/none", 5, os.ErrNotExist},
		{file, 5, nil},
	} {
		b, err := ReadRegular(c.path, c.most)
		if !errors.Is(err, c.want) || c.want == nil && string(b) != "12345" {
			t.Errorf("%s: %q, %v; want %v", c.path, b, err, c.want)
		}
	}
}
