//go:build root

package guest_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
)

// attempt is something a workload must not be able to do, with the same
// thing where it may.
type attempt struct{ name, forbidden, control string }

func TestWorkloadCannotReachInit(t *testing.T) {
	testenv.Need(t, testenv.Landlock)
	t.Run("configured", func(t *testing.T) {
		b, _ := newRooted(t)
		cannotReachInit(t, b)
	})
	t.Run("prepared", func(t *testing.T) { cannotReachInit(t, newPrepared(t)) })
	t.Run("second root", func(t *testing.T) {
		b := newPrepared(t)
		cfg := guest.Config{Hostname: "box"}
		cfg.Root, _ = b.newRoot()
		if err := b.Configure(ctx(t), cfg); err != nil {
			t.Fatal(err)
		}
		cannotReachInit(t, b)
	})
}

// newPrepared starts a PID 1 that was prepared before it got its root.
func newPrepared(t *testing.T) *box {
	b := newBox(t)
	cfg := b.config()
	for range 2 {
		if err := b.Prepare(ctx(t), guest.PrepareConfig{Seccomp: cfg.Seccomp, Work: cfg.Work}); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Seccomp, cfg.Work = nil, false
	cfg.Root, _ = b.newRoot()
	if err := b.Configure(ctx(t), cfg); err != nil {
		t.Fatal(err)
	}
	return b
}

func cannotReachInit(t *testing.T, b *box) {
	t.Helper()
	for _, a := range []attempt{
		{"memory of PID 1", "head -c 1 /proc/1/mem", "sleep 9 & exec 3</proc/$!/mem"},
		{"root of PID 1", "ls /proc/1/root/", "sleep 9 & ls /proc/$!/root/"},
		{"descriptors of PID 1", "ls -l /proc/1/fd/ | grep socket", "ls -l /proc/self/fd/ | grep -e ."},
		{"program of PID 1", "cat /proc/1/exe", "sleep 9 & cat /proc/$!/exe"},
		{"environment of PID 1", "cat /proc/1/environ", "sleep 9 & cat /proc/$!/environ"},
		{"signal to PID 1", "kill -SEGV 1", "sleep 9 & kill -SEGV $!"},
		{"probe of PID 1", "kill -0 1", "kill -0 $$"},
		{"nested user namespace", "unshare -U true", "true"},
		{"nested mount namespace", "unshare -m true", "true"},
		{"mount", "mount -t tmpfs none /tmp", "true"},
		{"unmount", "umount /proc", "true"},
		{"remount", "mount -o remount,rw /usr", "true"},
		{"namespace of PID 1", "nsenter -t 1 -m true", "true"},
		{"chroot", "chroot / true", "true"},
		{"host name", "hostname other", "hostname"},
		{"device", "mknod /tmp/sda b 8 0", "mkfifo /tmp/fifo"},
		{"sysctl", "echo 1 > /proc/sys/user/max_user_namespaces", "cat /proc/sys/user/max_user_namespaces"},
		{"raw socket", "python3 -c 'import socket; socket.socket(2,3,1)'", "python3 -c 'import socket; socket.socket(2,1)'"},
		{
			"signal forged by queue", `perl -e '$b=pack("i3x116",11,0,-1); exit(syscall(129,1,11,$b)!=0)'`,
			`perl -e '$b=pack("i3x116",0,0,-1); exit(syscall(129,$$+0,0,$b)!=0)'`,
		},
	} {
		r, err := b.run(argv("sh", "-c", a.forbidden))
		if err != nil || r.exit.Code == 0 {
			t.Errorf("%s worked: %+v %v", a.name, r, err)
		}
		if r, err = b.run(argv("sh", "-c", a.control)); err != nil || r.exit.Code != 0 {
			t.Errorf("%s: its control did not work: %+v %v", a.name, r, err)
		}
	}
	if _, err := b.Ping(ctx(t)); err != nil {
		t.Fatalf("PID 1 did not live through it: %v", err)
	}
}

func TestInitOutlivesSignalsFromItsOwnUser(t *testing.T) {
	b, _ := newRooted(t)
	// By a directory of /proc as a pidfd the filter sees no number. On old
	// kernels the signal arrives; it must then do nothing.
	script := `sysopen(my $pid1, "/proc/1", 0200000) or die "open: $!";
syscall(424, fileno($pid1), $_, 0, 0) for 1..31, 40, 64;
`
	r, err := b.run(argv("perl", "-e", script))
	if err != nil || r.exit.Code != 0 {
		t.Fatalf("%+v %v", r, err)
	}
	if _, err := b.Ping(ctx(t)); err != nil {
		t.Fatalf("PID 1 died of it: %v", err)
	}
}

// TestPreparedOtherwise: what was prepared does not hold what is asked for
// later, nor is a configured PID 1 prepared any more.
func TestPreparedOtherwise(t *testing.T) {
	b := newBox(t)
	cfg := b.config()
	if _, err := b.Exec(ctx(t), argv("true")); sandbox.CodeOf(err) != "not_configured" {
		t.Errorf("exec before a configuration: %v", err)
	}
	if err := b.Prepare(ctx(t), guest.PrepareConfig{Seccomp: cfg.Seccomp, Work: cfg.Work}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Exec(ctx(t), argv("true")); sandbox.CodeOf(err) != "not_configured" {
		t.Errorf("exec when prepared only: %v", err)
	}
	cfg.Capabilities = sandbox.CapabilitiesNone
	cfg.Root, _ = b.newRoot()
	if err := b.Configure(ctx(t), cfg); err != nil {
		t.Fatal(err)
	}
	const bounding = "grep CapBnd /proc/self/status"
	if got := b.sh(bounding); !strings.HasSuffix(got, "0000000000000000") {
		t.Errorf("profile none after root was prepared: %s", got)
	}
	if err := b.Prepare(ctx(t), guest.PrepareConfig{Seccomp: cfg.Seccomp, Work: cfg.Work}); err != nil {
		t.Fatal(err)
	}
	if got := b.sh(bounding); !strings.HasSuffix(got, "0000000000000000") {
		t.Errorf("after a late Prepare: %s", got)
	}
	if got := newPrepared(t).sh(bounding); !strings.HasSuffix(got, "00000000000004fb") {
		t.Errorf("control: %s", got)
	}
}

func TestRenameAcrossDirectoriesWorks(t *testing.T) {
	b := newPrepared(t)
	b.sh("mkdir /tmp/a /tmp/b; echo x > /tmp/a/f; mv /tmp/a/f /tmp/b/f; ln /tmp/b/f /tmp/a/g; cat /tmp/a/g")
}

func TestManyConnectionsAreBounded(t *testing.T) {
	b, _ := newRooted(t)
	for range 50 {
		s, err := b.Events(ctx(t), 0)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
	}
	if got := b.sh("echo fine"); got != "fine" {
		t.Error(got)
	}
	if _, err := b.Start(ctx(t), sandbox.ProcessSpec{Argv: []string{strings.Repeat("x", 600<<10)}}); !errors.Is(sandbox.ClassOf(err), sandbox.ErrInvalid) {
		t.Errorf("huge argv: %v", err)
	}
}

// TestInitOpensNoTimeZone: a FIFO nobody writes to would hold whoever opens it.
func TestInitOpensNoTimeZone(t *testing.T) {
	b := newBox(t)
	cfg := b.config()
	var dir string
	cfg.Root, dir = b.newRoot()
	if err := unix.Mkfifo(filepath.Join(dir, "etc/localtime"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := b.Configure(ctx(t), cfg); err != nil {
		t.Fatal(err)
	}
	if got := b.sh("test -p /etc/localtime && echo there"); got != "there" {
		t.Errorf("the FIFO: %q", got)
	}
}
