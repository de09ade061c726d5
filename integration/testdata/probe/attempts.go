package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attempts are what a workload must not be able to do and the host's root is.
// Those on another process take the one the probe was told, PID 1 inside.
// None changes anything that outlives the probe outside of its scratch
// directory and its mount namespace.
var attempts = map[string]func(dir string) error{
	"user namespace":   namespace(unix.CLONE_NEWUSER),
	"mount namespace":  namespace(unix.CLONE_NEWNS),
	"pid namespace":    namespace(unix.CLONE_NEWPID),
	"net namespace":    namespace(unix.CLONE_NEWNET),
	"uts namespace":    namespace(unix.CLONE_NEWUTS),
	"ipc namespace":    namespace(unix.CLONE_NEWIPC),
	"cgroup namespace": namespace(unix.CLONE_NEWCGROUP),
	"enter a namespace": func(string) error {
		return withFD(victim("ns/uts"), unix.O_RDONLY, func(fd int) error { return unix.Setns(fd, unix.CLONE_NEWUTS) })
	},

	"mount": func(dir string) error {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			return err
		}
		return unix.Unmount(dir, 0)
	},
	"bind mount": func(dir string) error {
		if err := unix.Mount("/", dir, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return unix.Unmount(dir, unix.MNT_DETACH)
	},
	"fsopen": func(string) error { fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC); return closed(fd, err) },
	"open_tree": func(string) error {
		fd, err := unix.OpenTree(unix.AT_FDCWD, "/", unix.OPEN_TREE_CLONE)
		return closed(fd, err)
	},
	"chroot": func(string) error { return unix.Chroot("/") },
	"mknod character device": func(dir string) error {
		return unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))
	},
	"mknod block device": func(dir string) error {
		return unix.Mknod(filepath.Join(dir, "disk"), unix.S_IFBLK|0o666, int(unix.Mkdev(7, 77)))
	},
	"file capability": func(dir string) error {
		path := filepath.Join(dir, "capable")
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			return err
		}
		// vfs_cap_data: revision 2, effective; all of the first word (capabilities(7)).
		data := []byte{1, 0, 0, 2, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
		return unix.Setxattr(path, "security.capability", data, 0)
	},

	"ptrace": trace,
	"process_vm_readv": func(string) error {
		from, to := []byte{1}, []byte{0}
		_, err := unix.ProcessVMReadv(os.Getpid(), []unix.Iovec{{Base: &to[0], Len: 1}}, []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&from[0])), Len: 1}}, 0)
		return err
	},
	"memory of a process":  func(string) error { return withFD(victim("mem"), unix.O_RDONLY, nil) },
	"root of a process":    func(string) error { return withFD(victim("root"), unix.O_RDONLY|unix.O_DIRECTORY, nil) },
	"program of a process": func(string) error { return withFD(victim("exe"), unix.O_RDONLY, nil) },
	"environment of a process": func(string) error {
		return withFD(victim("environ"), unix.O_RDONLY, nil)
	},
	"signal to a process": func(string) error { return unix.Kill(target, 0) },
	"pidfd of a process":  func(string) error { fd, err := unix.PidfdOpen(target, 0); return closed(fd, err) },
	"attach to a process": func(string) error {
		runtime.LockOSThread() // the tracer is a thread
		defer runtime.UnlockOSThread()
		if err := unix.PtraceSeize(target); err != nil {
			return err
		}
		return nil // let go with the probe's end
	},
	"priority":  func(string) error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -10) },
	"host name": rename,

	"keyring": func(string) error {
		_, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_PROCESS_KEYRING, true)
		return err
	},
	"key": func(string) error {
		_, err := unix.AddKey("user", "probe", []byte("x"), unix.KEY_SPEC_PROCESS_KEYRING)
		return err
	},
	"bpf": func(string) error {
		attr := [4]uint32{2, 4, 4, 1} // an array of one value, bpf(2)
		return call(unix.SYS_BPF, 0, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	},
	"io_uring": func(string) error {
		var params [120]byte
		return call(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	},
	"userfaultfd": func(string) error { return call(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0) },
	"perf event": func(string) error {
		attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_TASK_CLOCK, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{}))}
		fd, err := unix.PerfEventOpen(&attr, 0, -1, -1, 0)
		return closed(fd, err)
	},

	"raw socket":       socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP),
	"packet socket":    socket(unix.AF_PACKET, unix.SOCK_RAW, 0),
	"netfilter socket": socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER),
	"audit socket":     socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT),
	"alg socket":       socket(unix.AF_ALG, unix.SOCK_SEQPACKET, 0),

	"write core_pattern":    writable("/proc/sys/kernel/core_pattern"),
	"write ip_forward":      writable("/proc/sys/net/ipv4/ip_forward"),
	"write drop_caches":     writable("/proc/sys/vm/drop_caches"),
	"write namespace limit": writable("/proc/sys/user/max_user_namespaces"),
	"write sysrq":           writable("/proc/sysrq-trigger"),
	"write mtu":             writable("/sys/class/net/lo/mtu"),
	"write sys":             writable("/sys/kernel/profiling", "/sys/kernel/uevent_helper", "/sys/kernel/rcu_normal"),
	"write cgroup":          writable("/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs"),
	"read kcore":            readable("/proc/kcore"),
	"read keys":             readable("/proc/keys"),
	"read kernel log":       readable("/dev/kmsg"),
}

// target is the process that must be out of reach.
var target = 1

func victim(file string) string { return fmt.Sprintf("/proc/%d/%s", target, file) }

func call(nr, a, b, c uintptr) error {
	fd, _, errno := unix.Syscall6(nr, a, b, c, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}

func closed(fd int, err error) error {
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func withFD(path string, flags int, f func(int) error) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if f == nil {
		return nil
	}
	return f(fd)
}

// writable opens for writing the first of the paths that exists, and writes
// nothing.
func writable(paths ...string) func(string) error {
	return func(string) error {
		err := error(unix.ENOENT)
		for _, p := range paths {
			if err = withFD(p, unix.O_WRONLY, nil); err != unix.ENOENT {
				return err
			}
		}
		return err
	}
}

// readable wants a byte: some files are covered by empty ones.
func readable(path string) func(string) error {
	return func(string) error {
		return withFD(path, unix.O_RDONLY|unix.O_NONBLOCK, func(fd int) error {
			n, err := unix.Read(fd, make([]byte, 8192))
			if err == nil && n == 0 {
				err = unix.ENODATA
			}
			return err
		})
	}
}

func socket(family, kind, protocol int) func(string) error {
	return func(string) error {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, protocol)
		return closed(fd, err)
	}
}

// namespace starts a process in a new namespace.
func namespace(flag uintptr) func(string) error {
	return func(string) error {
		cmd := exec.Command("/proc/self/exe", "noop")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flag}
		return cmd.Run()
	}
}

// trace starts a process that asks to be traced.
func trace(string) error {
	runtime.LockOSThread() // the tracer is a thread
	defer runtime.UnlockOSThread()
	cmd := exec.Command("/proc/self/exe", "noop")
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer cmd.Process.Kill()
	var status unix.WaitStatus
	if _, err := unix.Wait4(cmd.Process.Pid, &status, 0, nil); err != nil {
		return err
	}
	return unix.PtraceDetach(cmd.Process.Pid)
}

// rename sets the host name there is.
func rename(string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	return unix.Sethostname([]byte(name))
}
