package rootfs

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestRewrite: a file without gaps says what it said before.
func TestRewrite(t *testing.T) {
	const size = 3<<20 + 5000
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := make([]byte, size)
	copy(want[1<<20-2:], "over the end of a block")
	if _, err := f.WriteAt(want[1<<20-2:1<<20+30], 1<<20-2); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	held := func() int64 {
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		return st.Sys().(*syscall.Stat_t).Blocks * 512
	}
	if held() >= size {
		t.Fatal("the file has no gaps to begin with")
	}
	if err := rewrite(t.Context(), f, size); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("the content changed")
	}
	if n := held(); n < size {
		t.Errorf("%d of %d bytes have their space", n, size)
	}
}
