//go:build root

package rootfs

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUppersAreSpread: ext4 was told to spread uppers, and only those.
func TestUppersAreSpread(t *testing.T) {
	s := openTest(t)
	var st unix.Statfs_t
	if err := unix.Statfs(s.vol.dir, &st); err != nil {
		t.Fatal(err)
	}
	if st.Type != unix.EXT4_SUPER_MAGIC {
		t.Skip("the volume is no ext4, which alone takes the hint")
	}
	const topDir = 0x00020000 // FS_TOPDIR_FL of <linux/fs.h>
	for dir, want := range map[string]bool{sandboxesDir: true, layersDir: false, trashDir: false} {
		f, err := os.Open(s.vol.path(dir))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
		if err != nil {
			t.Fatal(err)
		}
		if got := flags&topDir != 0; got != want {
			t.Errorf("%s: spread = %v, want %v", dir, got, want)
		}
	}
}
