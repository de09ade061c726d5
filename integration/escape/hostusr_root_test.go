//go:build root

package escape

import (
	"slices"
	"strings"
	"testing"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestHostImageChannel states what docs/SECURITY.md names: sandboxes of the
// host image share the inodes of /usr, and so locks and inotify of them. What
// comes from layers they do not share, nor /dev. Descriptors without a file,
// as of epoll, are one inode of the whole kernel.
func TestHostImageChannel(t *testing.T) {
	d := harness.Install(t, "")
	one, other := d.New(t, sandbox.Spec{}), d.New(t, sandbox.Spec{})
	for file, shared := range map[string]bool{"/usr/bin/env": true, "/etc/passwd": false, "/dev/zero": false, "epoll": true} {
		p, err := d.StartProcess(t.Context(), string(one.ID), sandbox.ProcessSpec{Argv: []string{"python3", "-c", locker + "open('/tmp/held','w').close(); time.sleep(1000)", file}})
		if err != nil {
			t.Fatal(err)
		}
		d.Sh(t, string(one.ID), "until [ -e /tmp/held ]; do sleep 0.05; done; rm /tmp/held")
		if got := d.Command(t, string(other.ID), "python3", "-c", locker, file).Exit.Code != 0; got != shared {
			t.Errorf("a lock of %s is shared: %t, docs/SECURITY.md says %t", file, got, shared)
		}
		// Positive control: in the same sandbox it is held.
		if d.Command(t, string(one.ID), "python3", "-c", locker, file).Exit.Code == 0 {
			t.Errorf("the lock of %s is not held at all", file)
		}
		if err := d.SignalProcess(t.Context(), string(one.ID), p.ID, "SIGKILL"); err != nil {
			t.Error(err)
		}
		if file == "epoll" { // its inode has no path
			continue
		}
		// inotify tells one of another's reading, where the inode is shared.
		notices := func(reader sandbox.ID) bool {
			d.Sh(t, string(one.ID), "rm -f /tmp/noticed /tmp/watching")
			p, err := d.StartProcess(t.Context(), string(one.ID), sandbox.ProcessSpec{Argv: []string{"python3", "-c", watcher, file}})
			if err != nil {
				t.Fatal(err)
			}
			d.Sh(t, string(one.ID), "until [ -e /tmp/watching ]; do sleep 0.05; done")
			d.Sh(t, string(reader), "head -c 1 "+file+" >/tmp/read")
			// What was noticed is in its queue when the read is over.
			if err := d.SignalProcess(t.Context(), string(one.ID), p.ID, "SIGTERM"); err != nil {
				t.Fatal(err)
			}
			return d.Sh(t, string(one.ID), "until [ -e /tmp/noticed ]; do sleep 0.05; done; cat /tmp/noticed") == "yes"
		}
		if got := notices(other.ID); got != shared {
			t.Errorf("reading %s is noticed by another: %t, docs/SECURITY.md says %t", file, got, shared)
		}
		if !notices(one.ID) {
			t.Errorf("reading %s is noticed by nobody at all", file)
		}
	}
}

// TestNoSharedInodes: what a sandbox finds in /dev is no file of another's.
func TestNoSharedInodes(t *testing.T) {
	d := harness.Install(t, "")
	find := func() []string {
		sb := d.New(t, sandbox.Spec{})
		return strings.Fields(d.Sh(t, string(sb.ID), `find /dev /usr/bin/env -printf '%D:%i=%p\n'`))
	}
	one, other := find(), find()
	for _, f := range one {
		// Positive control: /usr is the host's.
		if shared := slices.Contains(other, f); shared != strings.HasSuffix(f, "=/usr/bin/env") {
			t.Errorf("%s is the same file in two sandboxes: %t", f, shared)
		}
	}
	if len(one) < 15 {
		t.Errorf("/dev has %q", one)
	}
}

// locker locks a file, or a descriptor that has none.
const locker = `import fcntl,select,sys,time
f=select.epoll() if sys.argv[1]=="epoll" else open(sys.argv[1])
fcntl.flock(f,fcntl.LOCK_EX|fcntl.LOCK_NB)
`

// watcher waits for SIGTERM, and then says whether a file was opened since.
const watcher = `import ctypes,os,signal,sys
libc=ctypes.CDLL(None)
fd=libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(fd,sys.argv[1].encode(),0x20)>=0
signal.pthread_sigmask(signal.SIG_BLOCK,[signal.SIGTERM])
open("/tmp/watching","w").close()
signal.sigwait([signal.SIGTERM])
try: said="yes" if os.read(fd,4096) else "no"
except BlockingIOError: said="no"
open("/tmp/noticed.new","w").write(said); os.rename("/tmp/noticed.new","/tmp/noticed")`
