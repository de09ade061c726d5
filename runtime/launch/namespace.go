package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	_ "github.com/sandboxd/sandboxd/runtime/launch/stage" // a program without another for a shell's first stages is its own
)

// stageEnv marks the second life of the daemon, in its own mount namespace.
const stageEnv = "_SANDBOXD_STAGE"

// cgroupMount is where libcontainer looks for the cgroup2 tree; no other
// place can be configured.
const cgroupMount = "/sys/fs/cgroup"

// EnterPrivateMounts starts the running program again, as the same process,
// in a mount namespace of its own in which
//
//   - changes made by the daemon stay unseen by the host, and what the host
//     mounts or unmounts still arrives (propagation "slave"),
//   - the cgroup2 tree stands on /sys/fs/cgroup, also where the host keeps it
//     elsewhere beside version 1,
//   - the program runs from a sealed memory file, so that libcontainer need
//     not copy it for every shell and no sandbox could ever write to it.
//
// In the second life it returns nil at once. It must be called before the
// program has done anything that exec would lose.
func EnterPrivateMounts() error {
	if os.Getenv(stageEnv) != "" {
		if err := os.Unsetenv(stageEnv); err != nil {
			return err
		}
		// exec named the process after a descriptor's number.
		return os.WriteFile("/proc/self/comm", []byte("sandboxd"), 0)
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts private to the daemon: %w", err)
	}
	if err := mountCgroup2(); err != nil {
		return err
	}
	exe, err := sealedSelf()
	if err != nil {
		return fmt.Errorf("seal the running program: %w", err)
	}
	env := append(os.Environ(), stageEnv+"=2")
	err = unix.Exec(fmt.Sprintf("/proc/self/fd/%d", exe.Fd()), os.Args, env)
	return fmt.Errorf("start again from the sealed copy: %w", err)
}

// mountCgroup2 puts the cgroup2 tree on /sys/fs/cgroup of this mount
// namespace, unless it is there.
func mountCgroup2() error {
	isV2 := func(path string) bool {
		var st unix.Statfs_t
		return unix.Statfs(path, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
	}
	if isV2(cgroupMount) {
		return nil
	}
	if unified := cgroupMount + "/unified"; isV2(unified) {
		if err := unix.Mount(unified, cgroupMount, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind the cgroup2 tree on %s: %w", cgroupMount, err)
		}
		return nil
	}
	if err := unix.Mount("cgroup2", cgroupMount, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount cgroup2 on %s (the kernel needs version 2 of cgroups): %w", cgroupMount, err)
	}
	return nil
}

// sealedSelf copies the running program into a sealed memory file.
func sealedSelf() (*os.File, error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer self.Close()
	return sealed("sandboxd", self)
}

// sealed copies a program into a memory file that nobody can write to.
func sealed(name string, program io.Reader) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // kernels before 6.3 know no MFD_EXEC
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("make a memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := io.Copy(f, program); err != nil {
		f.Close()
		return nil, err
	}
	// Exactly the seals libcontainer looks for before it decides not to copy.
	seals := unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		f.Close()
		return nil, fmt.Errorf("add seals: %w", err)
	}
	return f, nil
}
