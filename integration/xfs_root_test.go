//go:build root

package integration

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
)

// onXFS gives the daemons of a test state directories on an XFS of their own,
// which shares blocks between files.
func onXFS(t *testing.T) {
	t.Helper()
	testenv.Need(t, testenv.XFS)
	img, err := os.CreateTemp("/var/tmp", "sandboxd-it-*.img")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(img.Name()) })
	defer img.Close()
	if err := img.Truncate(4 << 30); err != nil {
		t.Fatal(err)
	}
	at, err := os.MkdirTemp("/var/tmp", "sandboxd-it-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(at) })
	for _, args := range [][]string{{"mkfs.xfs", "-q", "-m", "reflink=1", img.Name()}, {"mount", "-o", "loop,noatime", img.Name(), at}} {
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(at, 0o711); err != nil { // sandboxes pass through to the run directory
		t.Fatal(err)
	}
	t.Setenv("SANDBOXD_TEST_DIR", at)
}
