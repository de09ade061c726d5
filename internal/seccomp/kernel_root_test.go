//go:build root

package seccomp

import (
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/testenv"
)

func try(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	r, _, e := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
	if e != 0 {
		return e
	}
	switch nr {
	case unix.SYS_SOCKET, unix.SYS_PIDFD_OPEN, unix.SYS_FSOPEN, unix.SYS_IO_URING_SETUP, unix.SYS_OPEN_TREE:
		_ = unix.Close(int(r))
	}
	return nil
}

// TestKernelObeysTheFilter makes real calls on a thread under the filter, and
// the same on one without: there none may answer as the filter does.
func TestKernelObeysTheFilter(t *testing.T) {
	testenv.Need(t, testenv.Root)
	prog, err := Compile()
	if err != nil {
		t.Fatal(err)
	}
	var params [120]byte
	tmpfs := append([]byte("tmpfs"), 0)
	root := append([]byte("/"), 0)
	fdcwd := ^uintptr(99) // AT_FDCWD, -100
	probes := []struct {
		name string
		nr   uintptr
		args []uintptr
		want error
	}{
		{"packet socket", unix.SYS_SOCKET, []uintptr{unix.AF_PACKET, unix.SOCK_RAW, 0}, unix.EAFNOSUPPORT},
		{"netfilter socket", unix.SYS_SOCKET, []uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, unix.EPROTONOSUPPORT},
		{"route socket", unix.SYS_SOCKET, []uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, nil},
		{"tcp socket", unix.SYS_SOCKET, []uintptr{unix.AF_INET, unix.SOCK_STREAM, 0}, nil},
		{"new uts namespace", unix.SYS_UNSHARE, []uintptr{unix.CLONE_NEWUTS}, unix.EPERM},
		{"pidfd of init", unix.SYS_PIDFD_OPEN, []uintptr{1, 0}, unix.EPERM},
		{"pidfd of oneself", unix.SYS_PIDFD_OPEN, []uintptr{uintptr(unix.Getpid()), 0}, nil},
		{"signal 0 to init", unix.SYS_KILL, []uintptr{1, 0}, unix.EPERM},
		{"signal 0 to oneself", unix.SYS_KILL, []uintptr{uintptr(unix.Getpid()), 0}, nil},
		{"fsopen", unix.SYS_FSOPEN, []uintptr{uintptr(unsafe.Pointer(&tmpfs[0])), unix.FSOPEN_CLOEXEC}, unix.ENOSYS},
		{"open_tree", unix.SYS_OPEN_TREE, []uintptr{fdcwd, uintptr(unsafe.Pointer(&root[0])), unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC}, unix.ENOSYS},
		{"io_uring", unix.SYS_IO_URING_SETUP, []uintptr{1, uintptr(unsafe.Pointer(&params[0]))}, unix.ENOSYS},
	}
	under := func(filtered bool, f func()) {
		t.Helper()
		err := linux.OnThread(func() error {
			if filtered {
				if err := linux.SetNoNewPrivs(); err != nil {
					return err
				}
				if err := linux.SetSeccomp(prog); err != nil {
					return err
				}
			}
			f()
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range probes {
		var with, without error
		under(true, func() { with = try(p.nr, p.args...) })
		under(false, func() { without = try(p.nr, p.args...) })
		if !errors.Is(with, p.want) && !(with == nil && p.want == nil) {
			t.Errorf("%s under the filter: %v, want %v", p.name, with, p.want)
		}
		if without != nil {
			t.Logf("%s: its control answers %v on this kernel", p.name, without)
			if errors.Is(without, p.want) {
				t.Errorf("%s: the control answers like the filter: it shows nothing", p.name)
			}
		}
	}
}
