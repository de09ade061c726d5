package linux

import (
	"errors"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The Go runtime's parts of a fork, which other programs use in the same way.
//
//go:linkname runtimeBeforeFork syscall.runtime_BeforeFork
func runtimeBeforeFork()

//go:linkname runtimeAfterFork syscall.runtime_AfterFork
func runtimeAfterFork()

//go:linkname runtimeAfterForkInChild syscall.runtime_AfterForkInChild
func runtimeAfterForkInChild()

// What a system call that may block does first and last: without it the thread
// keeps its processor, and the collector, which stops the world, waits with it.
//
//go:linkname entersyscall runtime.entersyscall
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

func vforkSyscall(trap, a1, a2, a4, a5 uintptr) (r1, errno uintptr)

// ForkToken lets the thread that forks use clone3(2) where the filter it is
// under refuses that call to everybody: see AllowClone3.
type ForkToken [2]uint64

// cloneArgs is struct clone_args (clone3(2)).
type cloneArgs struct {
	flags, pidFD, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// child is what a forked child reads and writes before its execve; it shares
// the memory.
type child struct {
	clone     cloneArgs
	token     ForkToken
	path      *byte
	argv, env []*byte
	fds       []int
	next      int // above all of fds
	uid, gid  uintptr
	groups    []uint32
	tty       bool
	execs     bool // as good as at its execve
	err       syscall.Errno
}

// ErrEndedEarly is a child that was killed before its execve.
var ErrEndedEarly = errors.New("the child was killed before its execve")

// Forking is the child of a fork that is under way. The thread that forks can
// do nothing for it: it waits in the kernel.
type Forking struct {
	mu     sync.Mutex
	pid    int32 // the kernel writes it; 0 before and after
	killed error // why
}

// Look calls f with the child's pid, if the fork is under way: the number
// cannot pass to another process meanwhile. If f returns an error, the child is
// killed and ForkExec returns that error.
func (k *Forking) Look(f func(pid int) error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if pid := atomic.LoadInt32(&k.pid); pid != 0 && k.killed == nil {
		if k.killed = f(int(pid)); k.killed != nil {
			_ = unix.Kill(int(pid), unix.SIGKILL)
		}
	}
}

func (k *Forking) over() {
	k.mu.Lock()
	atomic.StoreInt32(&k.pid, 0)
	k.mu.Unlock()
}

// ForkExec is syscall.ForkExec with five differences. The signals that the
// process ignores have their default action in the child. clone3 is called
// with the token, so that a filter can tell who calls. And an error comes back
// through the memory that parent and child share, without a pipe. And the child
// closes all but its own descriptors before execve, not by it: the kernel
// resolves the names of the program, its interpreter and its loader with what
// is open then (close_range(2), Linux 5.9). And others can look after the child
// by under while the fork is not done: whoever may signal it can stop it.
//
// Of attr it heeds Env, Files and of Sys the controlling terminal (always
// descriptor 0), the credential, which must be given, and the cgroup. The child
// has a session of its own.
func ForkExec(path string, argv []string, attr *syscall.ProcAttr, token ForkToken, under *Forking) (pid int, err error) {
	c := &child{token: token, tty: attr.Sys.Setctty}
	c.clone.flags, c.clone.exitSignal = unix.CLONE_VFORK|unix.CLONE_VM|unix.CLONE_PARENT_SETTID, uint64(unix.SIGCHLD)
	c.clone.parentTID = uint64(uintptr(unsafe.Pointer(&under.pid))) // others have it: it is on the heap
	if c.path, err = unix.BytePtrFromString(path); err != nil {
		return 0, err
	}
	if c.argv, err = syscall.SlicePtrFromStrings(argv); err != nil {
		return 0, err
	}
	if c.env, err = syscall.SlicePtrFromStrings(attr.Env); err != nil {
		return 0, err
	}
	c.next = len(attr.Files)
	for _, fd := range attr.Files {
		c.fds = append(c.fds, int(fd))
		c.next = max(c.next, int(fd)+1)
	}
	cred := attr.Sys.Credential
	c.uid, c.gid, c.groups = uintptr(cred.Uid), uintptr(cred.Gid), cred.Groups
	if attr.Sys.UseCgroupFD {
		c.clone.flags |= unix.CLONE_INTO_CGROUP
		c.clone.cgroup = uint64(attr.Sys.CgroupFD)
	}
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	r, errno := fork(c)
	runtime.KeepAlive(c)
	under.over()
	if errno != 0 {
		return 0, errno
	}
	err = under.killed
	switch {
	case c.err != 0:
		err = c.err
	case err == nil && c.execs:
		return int(r), nil
	case err == nil:
		err = ErrEndedEarly
	}
	// Its end is nobody else's to take.
	var ws unix.WaitStatus
	for {
		if _, werr := unix.Wait4(int(r), &ws, 0, nil); !errors.Is(werr, unix.EINTR) {
			return 0, err
		}
	}
}

// fork makes the child, which never returns from here: it runs on the same
// stack, and the parent goes on only once the child has another program or has
// ended. As in package syscall, nothing may be allocated and nothing but
// assembly called from the fork on.
//
//go:noinline
//go:norace
//go:nocheckptr
func fork(c *child) (pid uintptr, errno syscall.Errno) {
	var (
		e      syscall.Errno
		e1     uintptr
		i      int
		action [4]uint64 // struct kernel_sigaction: SIG_DFL, no mask
	)
	entersyscall()
	runtimeBeforeFork()
	pid, e1 = vforkSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&c.clone)), unsafe.Sizeof(c.clone), uintptr(c.token[0]), uintptr(c.token[1]))
	if e1 != 0 || pid != 0 {
		runtimeAfterFork()
		exitsyscall()
		return pid, syscall.Errno(e1)
	}
	// In the child, all signals blocked.
	if _, _, e = syscall.RawSyscall(unix.SYS_SETSID, 0, 0, 0); e != 0 {
		goto fail
	}
	for i = 1; i <= 64; i++ {
		_, _, _ = syscall.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(i), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	}
	runtimeAfterForkInChild() // takes the block off
	if len(c.groups) > 0 {
		_, _, e = syscall.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(c.groups)), uintptr(unsafe.Pointer(&c.groups[0])), 0)
	} else {
		_, _, e = syscall.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0)
	}
	if e != 0 {
		goto fail
	}
	if _, _, e = syscall.RawSyscall(unix.SYS_SETGID, c.gid, 0, 0); e != 0 {
		goto fail
	}
	if _, _, e = syscall.RawSyscall(unix.SYS_SETUID, c.uid, 0, 0); e != 0 {
		goto fail
	}
	// Those in the way of the final numbers go above all, then each goes down.
	for i = 0; i < len(c.fds); i++ {
		if c.fds[i] < i {
			if _, _, e = syscall.RawSyscall(unix.SYS_DUP3, uintptr(c.fds[i]), uintptr(c.next), unix.O_CLOEXEC); e != 0 {
				goto fail
			}
			c.fds[i] = c.next
			c.next++
		}
	}
	for i = 0; i < len(c.fds); i++ {
		if c.fds[i] == i { // dup3 refuses it
			_, _, e = syscall.RawSyscall(unix.SYS_FCNTL, uintptr(i), unix.F_SETFD, 0)
		} else {
			_, _, e = syscall.RawSyscall(unix.SYS_DUP3, uintptr(c.fds[i]), uintptr(i), 0)
		}
		if e != 0 {
			goto fail
		}
	}
	if c.tty {
		if _, _, e = syscall.RawSyscall(unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 1); e != 0 {
			goto fail
		}
	}
	if _, _, e = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, uintptr(len(c.fds)), math.MaxUint32, 0); e != 0 {
		goto fail
	}
	c.execs = true
	_, _, e = syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(c.path)), uintptr(unsafe.Pointer(&c.argv[0])), uintptr(unsafe.Pointer(&c.env[0])))
fail:
	c.err = e
	for {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT, 253, 0, 0)
	}
}

// AllowClone3 puts a rule before a filter (an array of struct sock_filter, for
// SetSeccomp) that refuses clone3: who passes the token in the call's fourth
// and fifth argument, which the kernel does not look at, may call it. All others get
// ENOSYS and use clone(2), whose flags a filter can judge: those of clone3 lie
// in memory. The token is as secret as the memory of the process that forks.
func AllowClone3(filter []byte, token ForkToken) []byte {
	const args = 16 // of struct seccomp_data
	stmt := func(code uint16, k uint32) unix.SockFilter { return unix.SockFilter{Code: code, K: k} }
	load := func(off uint32) unix.SockFilter { return stmt(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, off) }
	prog := []unix.SockFilter{load(0), {Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_CLONE3, Jf: 10}}
	for i, half := range []uint32{uint32(token[0]), uint32(token[0] >> 32), uint32(token[1]), uint32(token[1] >> 32)} {
		left := uint8(2*(3-i) + 1) // to the refusal
		prog = append(prog, load(args+8*3+4*uint32(i)), unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: half, Jf: left})
	}
	prog = append(prog, stmt(unix.BPF_RET|unix.BPF_K, unix.SECCOMP_RET_ALLOW), stmt(unix.BPF_RET|unix.BPF_K, unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS)))
	before := unsafe.Slice((*byte)(unsafe.Pointer(&prog[0])), len(prog)*int(unsafe.Sizeof(prog[0])))
	return append(append(make([]byte, 0, len(before)+len(filter)), before...), filter...)
}
