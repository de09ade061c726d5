package seccomp

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// refusal answers one system call with errno when one of its arguments has,
// or has not, one of the values. Arguments are judged by their low 32 bits,
// which is all the kernel takes of them.
type refusal struct {
	call   uint32
	arg    uint32
	values []uint32
	except bool       // refuse all but the values
	bits   uint32     // or: refuse when any of these bits is set
	when   *condition // only when this holds too
	errno  unix.Errno
}

type condition struct {
	arg    uint32
	values []uint32
}

// refusals are what the profile allows in general and not with these
// arguments. The errno matters: programs give up on the wrong one and go
// round the right one.
var refusals = []refusal{
	// Input pushed into a terminal is run by whoever reads it (TIOCSTI,
	// TIOCLINUX; legacy_tiocsti exists from Linux 6.2 only).
	{call: unix.SYS_IOCTL, arg: 1, values: []uint32{unix.TIOCSTI, unix.TIOCLINUX}, errno: unix.EPERM},

	// Whoever opens or executes a file with a lease on it waits up to 45 s
	// (fs.lease-break-time), in each sandbox that shares it. EINVAL is what a
	// filesystem without leases answers.
	{call: unix.SYS_FCNTL, arg: 1, values: []uint32{unix.F_SETLEASE, unix.F_SETDELEG}, errno: unix.EINVAL},

	{call: unix.SYS_SOCKET, values: []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}, except: true, errno: unix.EAFNOSUPPORT},
	{
		call: unix.SYS_SOCKET, arg: 2, values: []uint32{unix.NETLINK_ROUTE}, except: true, errno: unix.EPROTONOSUPPORT,
		when: &condition{0, []uint32{unix.AF_NETLINK}},
	},
	// Other protocols would make the host load a module for each.
	{
		call: unix.SYS_SOCKET, arg: 2, except: true, errno: unix.EPROTONOSUPPORT, when: &condition{0, []uint32{unix.AF_INET, unix.AF_INET6}},
		values: []uint32{0, unix.IPPROTO_ICMP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMPV6},
	},
	{call: unix.SYS_SOCKETPAIR, values: []uint32{unix.AF_UNIX}, except: true, errno: unix.EAFNOSUPPORT},

	{call: unix.SYS_CLONE, errno: unix.EPERM, bits: unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
		unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP},

	// PID 1's own id is mapped, and whoever had it could set PID 1's limits.
	// EINVAL is what the kernel answers to an id that is not mapped.
	{call: unix.SYS_SETUID, arg: 0, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_SETREUID, arg: 0, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_SETREUID, arg: 1, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_SETRESUID, arg: 0, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_SETRESUID, arg: 1, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_SETRESUID, arg: 2, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_SETFSUID, arg: 0, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_CHOWN, arg: 1, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_LCHOWN, arg: 1, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_FCHOWN, arg: 1, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},
	{call: unix.SYS_FCHOWNAT, arg: 2, values: []uint32{sandbox.InitID}, errno: unix.EINVAL},

	// A forged fault signal would end the Go program that is PID 1.
	{call: unix.SYS_KILL, values: []uint32{1}, errno: unix.EPERM},
	{call: unix.SYS_TKILL, values: []uint32{1}, errno: unix.EPERM},
	{call: unix.SYS_TGKILL, values: []uint32{1}, errno: unix.EPERM},
	{call: unix.SYS_RT_SIGQUEUEINFO, values: []uint32{1}, errno: unix.EPERM},
	{call: unix.SYS_RT_TGSIGQUEUEINFO, values: []uint32{1}, errno: unix.EPERM},
	{call: unix.SYS_PIDFD_OPEN, values: []uint32{1}, errno: unix.EPERM},
}

// Offsets in struct seccomp_data (seccomp(2)).
const (
	offCall = 0
	offArch = 4
	offArgs = 16
)

func load(off uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
}

func jump(op uint16, k uint32, yes, no int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, K: k, Jt: uint8(yes), Jf: uint8(no)}
}

// assemble makes the refusals into classic BPF that answers them and lets
// everything else fall off its end, where the main program goes on: jumps
// are relative, so the two are simply joined.
func assemble(rs []refusal) []unix.SockFilter {
	var body []unix.SockFilter
	for _, r := range rs {
		body = append(body, r.assemble()...)
	}
	// Numbers mean other calls on other architectures: those skip to the
	// main program, which refuses them.
	skip := unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(len(body))}
	return slices.Concat([]unix.SockFilter{load(offArch), jump(unix.BPF_JEQ, unix.AUDIT_ARCH_X86_64, 1, 0), skip}, body)
}

func (r refusal) assemble() []unix.SockFilter {
	refuse := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(r.errno)}
	// From its end: the refusal, then the tests that lead to it or past it.
	var tests []unix.SockFilter
	switch {
	case r.bits != 0:
		tests = []unix.SockFilter{jump(unix.BPF_JSET, r.bits, 0, 1)}
	default:
		for i, v := range r.values {
			left := len(r.values) - i - 1
			switch {
			case r.except: // a match leads past the refusal
				tests = append(tests, jump(unix.BPF_JEQ, v, left+1, 0))
			case left == 0:
				tests = append(tests, jump(unix.BPF_JEQ, v, 0, 1))
			default:
				tests = append(tests, jump(unix.BPF_JEQ, v, left, 0))
			}
		}
	}
	block := slices.Concat([]unix.SockFilter{load(offArgs + 8*r.arg)}, tests, []unix.SockFilter{refuse})
	if r.when != nil {
		var cond []unix.SockFilter
		for i, v := range r.when.values {
			left := len(r.when.values) - i - 1
			if left == 0 {
				cond = append(cond, jump(unix.BPF_JEQ, v, 0, len(block)))
			} else {
				cond = append(cond, jump(unix.BPF_JEQ, v, left, 0))
			}
		}
		block = slices.Concat([]unix.SockFilter{load(offArgs + 8*r.when.arg)}, cond, block)
	}
	return slices.Concat([]unix.SockFilter{load(offCall), jump(unix.BPF_JEQ, r.call, 0, len(block))}, block)
}

// encode lays the program out as the kernel of this machine reads it.
func encode(prog []unix.SockFilter) []byte {
	b := make([]byte, 0, 8*len(prog))
	for _, f := range prog {
		b = binary.NativeEndian.AppendUint16(b, f.Code)
		b = append(b, f.Jt, f.Jf)
		b = binary.NativeEndian.AppendUint32(b, f.K)
	}
	return b
}
