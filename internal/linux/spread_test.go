package linux

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSpreadBelow(t *testing.T) {
	dir := t.TempDir()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	if st.Type != unix.EXT4_SUPER_MAGIC {
		if err := SpreadBelow(dir); err == nil {
			t.Error("a filesystem that is no ext4 took the hint")
		}
		return
	}
	spread := func(dir string) bool {
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		if err != nil {
			t.Fatal(err)
		}
		return flags&topDir != 0
	}
	if spread(dir) {
		t.Fatal("the hint was there already")
	}
	for range 2 {
		if err := SpreadBelow(dir); err != nil {
			t.Fatal(err)
		}
		if !spread(dir) {
			t.Error("the hint was not kept")
		}
	}
	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	if spread(below) {
		t.Error("what is made below has the hint too: its own directories would be torn apart")
	}
	if err := SpreadBelow(filepath.Join(dir, "none")); err == nil {
		t.Error("no error for a directory that is not there")
	}
}
