//go:build root

package escape

import (
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestHostImageChannel states what docs/SECURITY.md names: sandboxes of the
// host image share the inodes of /usr, and so locks and inotify of them. What
// comes from layers they do not share.
func TestHostImageChannel(t *testing.T) {
	d := harness.Install(t, "")
	one, other := d.New(t, sandbox.Spec{}), d.New(t, sandbox.Spec{})
	for file, shared := range map[string]bool{"/usr/bin/env": true, "/etc/passwd": false} {
		p, err := d.StartProcess(t.Context(), string(one.ID), sandbox.ProcessSpec{Argv: []string{"flock", file, "sh", "-c", "echo > /tmp/held; exec sleep 1000"}})
		if err != nil {
			t.Fatal(err)
		}
		d.Sh(t, string(one.ID), "until [ -e /tmp/held ]; do sleep 0.05; done; rm /tmp/held")
		if got := d.Command(t, string(other.ID), "flock", "--nonblock", file, "true").Exit.Code != 0; got != shared {
			t.Errorf("a lock of %s is shared: %t, docs/SECURITY.md says %t", file, got, shared)
		}
		// Positive control: in the same sandbox it is held.
		if d.Command(t, string(one.ID), "flock", "--nonblock", file, "true").Exit.Code == 0 {
			t.Errorf("the lock of %s is not held at all", file)
		}
		if err := d.SignalProcess(t.Context(), string(one.ID), p.ID, "SIGKILL"); err != nil {
			t.Error(err)
		}
	}
}
