package seccomp

import (
	"encoding/binary"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// data is struct seccomp_data.
type data struct {
	nr, arch uint32
	args     [6]uint64
}

// verdict runs the program as the kernel would.
func verdict(t *testing.T, prog []byte, d data) uint32 {
	t.Helper()
	var mem [64]byte
	binary.LittleEndian.PutUint32(mem[0:], d.nr)
	binary.LittleEndian.PutUint32(mem[4:], d.arch)
	for i, a := range d.args {
		binary.LittleEndian.PutUint64(mem[16+8*i:], a)
	}
	var acc uint32
	for pc := 0; pc < len(prog)/8; pc++ {
		in := prog[8*pc:]
		code, jt, jf, k := binary.NativeEndian.Uint16(in), int(in[2]), int(in[3]), binary.NativeEndian.Uint32(in[4:])
		cond := false
		switch code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			acc = binary.LittleEndian.Uint32(mem[k:])
			continue
		case unix.BPF_RET | unix.BPF_K:
			return k
		case unix.BPF_JMP | unix.BPF_JA:
			pc += int(k)
			continue
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			acc &= k
			continue
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			cond = acc == k
		case unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K:
			cond = acc > k
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			cond = acc >= k
		case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
			cond = acc&k != 0
		default:
			t.Fatalf("instruction %d: unknown code %#x", pc, code)
		}
		if cond {
			pc += jt
		} else {
			pc += jf
		}
	}
	t.Fatal("the program runs off its end")
	return 0
}

func name(v uint32) string {
	switch v & 0xffff0000 {
	case unix.SECCOMP_RET_ALLOW:
		return "allow"
	case unix.SECCOMP_RET_ERRNO:
		return unix.ErrnoName(unix.Errno(v & 0xffff))
	}
	return fmt.Sprintf("%#x", v)
}

func TestCompiledFilter(t *testing.T) {
	prog, err := Compile()
	if err != nil {
		t.Fatal(err)
	}
	if n := len(prog) / 8; len(prog)%8 != 0 || n > unix.BPF_MAXINSNS {
		t.Fatalf("%d bytes", len(prog))
	}
	const native, i386 = unix.AUDIT_ARCH_X86_64, unix.AUDIT_ARCH_I386
	type args = [6]uint64
	socket := func(family, kind, proto uint64) data { return data{unix.SYS_SOCKET, native, args{family, kind, proto}} }
	call := func(nr uint32, a ...uint64) data {
		d := data{nr: nr, arch: native}
		copy(d.args[:], a)
		return d
	}
	const high = 1 << 32 // the kernel looks at the low half only
	for _, c := range []struct {
		name string
		d    data
		want string
	}{
		{"read", call(unix.SYS_READ), "allow"},
		{"execve", call(unix.SYS_EXECVE), "allow"},
		{"i386 read", data{nr: 3, arch: i386}, "ENOSYS"},
		{"i386 socket number means another call", data{nr: unix.SYS_SOCKET, arch: i386, args: args{38}}, "ENOSYS"},
		{"x32 read", call(0x40000000 | unix.SYS_READ), "ENOSYS"},
		{"a call of the future", call(2000), "ENOSYS"},
		{"unix socket", socket(unix.AF_UNIX, 1, 0), "allow"},
		{"tcp", socket(unix.AF_INET, 1, 0), "allow"},
		{"udp named", socket(unix.AF_INET6, 2, unix.IPPROTO_UDP), "allow"},
		{"ping", socket(unix.AF_INET, 2, unix.IPPROTO_ICMP), "allow"},
		{"sctp", socket(unix.AF_INET, 1, unix.IPPROTO_SCTP), "EPROTONOSUPPORT"},
		{"sctp6 with high bits", socket(unix.AF_INET6|high, 1, unix.IPPROTO_SCTP|high), "EPROTONOSUPPORT"},
		{"rtnetlink", socket(unix.AF_NETLINK, 3, unix.NETLINK_ROUTE), "allow"},
		{"audit netlink", socket(unix.AF_NETLINK, 3, unix.NETLINK_AUDIT), "EPROTONOSUPPORT"},
		{"netfilter netlink", socket(unix.AF_NETLINK, 3, unix.NETLINK_NETFILTER), "EPROTONOSUPPORT"},
		{"packet", socket(unix.AF_PACKET, 3, 0), "EAFNOSUPPORT"},
		{"alg", socket(unix.AF_ALG, 5, 0), "EAFNOSUPPORT"},
		{"vsock", socket(unix.AF_VSOCK, 1, 0), "EAFNOSUPPORT"},
		{"vsock with high bits", socket(unix.AF_VSOCK|high, 1, 0), "EAFNOSUPPORT"},
		{"unspec", socket(0, 1, 0), "EAFNOSUPPORT"},
		{"socketpair unix", call(unix.SYS_SOCKETPAIR, unix.AF_UNIX), "allow"},
		{"socketpair tipc", call(unix.SYS_SOCKETPAIR, unix.AF_TIPC), "EAFNOSUPPORT"},
		{"tiocgwinsz", call(unix.SYS_IOCTL, 0, unix.TIOCGWINSZ), "allow"},
		{"tiocsti", call(unix.SYS_IOCTL, 0, unix.TIOCSTI), "EPERM"},
		{"tiocsti with high bits", call(unix.SYS_IOCTL, 0, unix.TIOCSTI|high), "EPERM"},
		{"tioclinux", call(unix.SYS_IOCTL, 0, unix.TIOCLINUX), "EPERM"},
		{"lease", call(unix.SYS_FCNTL, 3, unix.F_SETLEASE), "EINVAL"},
		{"lease with high bits", call(unix.SYS_FCNTL, 3, unix.F_SETLEASE|high), "EINVAL"},
		{"delegation", call(unix.SYS_FCNTL, 3, unix.F_SETDELEG), "EINVAL"},
		{"ask for a lease", call(unix.SYS_FCNTL, 3, unix.F_GETLEASE), "allow"},
		{"lock", call(unix.SYS_FCNTL, 3, unix.F_SETLK), "allow"},
		{"fork", call(unix.SYS_CLONE, uint64(unix.SIGCHLD)), "allow"},
		{"clone thread", call(unix.SYS_CLONE, unix.CLONE_VM|unix.CLONE_THREAD|unix.CLONE_SIGHAND), "allow"},
		{"clone new user", call(unix.SYS_CLONE, unix.CLONE_NEWUSER|uint64(unix.SIGCHLD)), "EPERM"},
		{"clone new net", call(unix.SYS_CLONE, unix.CLONE_NEWNET), "EPERM"},
		{"become PID 1's id", call(unix.SYS_SETUID, sandbox.InitID), "EINVAL"},
		{"become PID 1's id with high bits", call(unix.SYS_SETUID, sandbox.InitID|high), "EINVAL"},
		{"become another", call(unix.SYS_SETUID, 1000), "allow"},
		{"really", call(unix.SYS_SETREUID, sandbox.InitID, 0), "EINVAL"},
		{"effectively", call(unix.SYS_SETREUID, 0, sandbox.InitID), "EINVAL"},
		{"not", call(unix.SYS_SETREUID, 1, 1), "allow"},
		{"first of three", call(unix.SYS_SETRESUID, sandbox.InitID, 0, 0), "EINVAL"},
		{"second of three", call(unix.SYS_SETRESUID, 0, sandbox.InitID, 0), "EINVAL"},
		{"third of three", call(unix.SYS_SETRESUID, 0, 0, sandbox.InitID), "EINVAL"},
		{"none of three", call(unix.SYS_SETRESUID, 0, 0, 0xffffffff), "allow"},
		{"for files", call(unix.SYS_SETFSUID, sandbox.InitID), "EINVAL"},
		{"a group of that number is not mapped", call(unix.SYS_SETGID, sandbox.InitID), "allow"},
		{"give a file to PID 1", call(unix.SYS_CHOWN, 0, sandbox.InitID), "EINVAL"},
		{"give a link to PID 1", call(unix.SYS_LCHOWN, 0, sandbox.InitID), "EINVAL"},
		{"give an open file to PID 1", call(unix.SYS_FCHOWN, 0, sandbox.InitID), "EINVAL"},
		{"give a file beneath to PID 1", call(unix.SYS_FCHOWNAT, 0, 0, sandbox.InitID), "EINVAL"},
		{"give a file away", call(unix.SYS_FCHOWNAT, 0, 0, 65535, sandbox.InitID), "allow"},
		{"clone3", call(unix.SYS_CLONE3), "allow"},
		{"unshare", call(unix.SYS_UNSHARE, unix.CLONE_NEWUSER), "EPERM"},
		{"setns", call(unix.SYS_SETNS), "EPERM"},
		{"kill", call(unix.SYS_KILL, 2, 9), "allow"},
		{"kill all", call(unix.SYS_KILL, 0xffffffff, 9), "allow"},
		{"kill init", call(unix.SYS_KILL, 1, 9), "EPERM"},
		{"tgkill init", call(unix.SYS_TGKILL, 1, 1, 9), "EPERM"},
		{"queue to init", call(unix.SYS_RT_SIGQUEUEINFO, 1|high, 9), "EPERM"},
		{"pidfd of init", call(unix.SYS_PIDFD_OPEN, 1), "EPERM"},
		{"pidfd", call(unix.SYS_PIDFD_OPEN, 2), "allow"},
		{"ptrace", call(unix.SYS_PTRACE), "EPERM"},
		{"process_vm_readv", call(unix.SYS_PROCESS_VM_READV), "EPERM"},
		{"pidfd_getfd", call(unix.SYS_PIDFD_GETFD), "ENOSYS"},
		{"io_uring", call(unix.SYS_IO_URING_SETUP), "ENOSYS"},
		{"mount", call(unix.SYS_MOUNT), "EPERM"},
		{"fsopen", call(unix.SYS_FSOPEN), "ENOSYS"},
		{"open_tree", call(unix.SYS_OPEN_TREE), "ENOSYS"},
		{"move_mount", call(unix.SYS_MOVE_MOUNT), "ENOSYS"},
		{"pivot_root", call(unix.SYS_PIVOT_ROOT), "EPERM"},
		{"bpf", call(unix.SYS_BPF), "EPERM"},
		{"perf", call(unix.SYS_PERF_EVENT_OPEN), "EPERM"},
		{"keyctl", call(unix.SYS_KEYCTL), "EPERM"},
		{"userfaultfd", call(unix.SYS_USERFAULTFD), "EPERM"},
		{"modules", call(unix.SYS_FINIT_MODULE), "EPERM"},
		{"mknod for fifos", call(unix.SYS_MKNOD), "allow"},
		{"personality linux", call(unix.SYS_PERSONALITY, 0), "allow"},
		{"personality ask", call(unix.SYS_PERSONALITY, 0xffffffff), "allow"},
		{"personality no randomize", call(unix.SYS_PERSONALITY, 0x0040000), "ENOSYS"},
		{"landlock", call(unix.SYS_LANDLOCK_CREATE_RULESET), "allow"},
		{"seccomp", call(unix.SYS_SECCOMP), "allow"},
	} {
		if got := name(verdict(t, prog, c.d)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func BenchmarkCompile(b *testing.B) {
	for range b.N {
		if _, err := Compile(); err != nil {
			b.Fatal(err)
		}
	}
}
