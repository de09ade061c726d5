//go:build root

package escape

import (
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestOddModesAreCleared: whatever modes and owners the workload gives to what
// outlives a root, reset and rollback go through and leave it as in a new
// sandbox. The control is the look before them.
func TestOddModesAreCleared(t *testing.T) {
	d := harness.Install(t, "")
	const look = "stat -c '%n %a %u:%g' /dev /dev/mqueue /dev/shm /dev/pts /dev/pts/ptmx /tmp /srv; find /dev/shm /dev/mqueue -mindepth 1; true"
	d.New(t, sandbox.Spec{Name: "x"})
	fresh := d.Sh(t, "x", look)
	snap, err := d.Snapshot(t.Context(), "x", sandbox.SnapshotRequest{Name: "s"})
	if err != nil {
		t.Fatal(err)
	}
	for _, odd := range []string{
		"chmod 0 /dev/mqueue", "chown 1000:1000 /dev/mqueue; chmod 0 /dev/mqueue", "touch /dev/mqueue/q; chown 1000 /dev/mqueue/q; chmod 0 /dev/mqueue/q; chmod 0 /dev/mqueue", "chmod 7777 /dev/mqueue",
		"chmod 0 /dev/shm", "mkdir -p /dev/shm/a/b; chmod 0 /dev/shm/a/b /dev/shm/a; chown 7:7 /dev/shm; chmod 0 /dev/shm", "chmod 0 /dev/pts", "chown 1000 /dev/pts /dev/pts/ptmx; chmod 0 /dev/pts/ptmx; chmod 0 /dev/pts",
		"chmod 0 /srv /root /tmp",
	} {
		for _, way := range []string{"reset", "rollback"} {
			d.Sh(t, "x", odd+"; true")
			if d.Sh(t, "x", look) == fresh {
				t.Errorf("control: %q changed nothing", odd)
			}
			if way == "reset" {
				_, err = d.Reset(t.Context(), "x")
			} else {
				_, err = d.Rollback(t.Context(), "x", string(snap.ID))
			}
			if err != nil {
				t.Errorf("%s after %q: %v", way, odd, err)
				if _, err := d.Start(t.Context(), "x"); err != nil {
					t.Fatal(err)
				}
			}
			if got := d.Sh(t, "x", look); got != fresh {
				t.Errorf("%s after %q: %s; new it is %s", way, odd, got, fresh)
			}
		}
	}
}
