package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // its C constructor turns a child called "init" into a shell's first stage
	"golang.org/x/sys/unix"
)

// stageEnv marks the second life of the daemon, in its own mount namespace.
const stageEnv = "_SANDBOXD_STAGE"

// cgroupMount is where libcontainer looks for the cgroup2 tree; no other
// place can be configured.
const cgroupMount = "/sys/fs/cgroup"

// libcontainer starts the running program again with the argument "init" as a
// shell's first stage. That stage begins here and not in main: Go initializes
// a package as soon as those it imports are, so HTTP and the API's framework,
// which this one does not import, are not waited for (0.2 ms of 1.4).
func init() {
	if len(os.Args) > 1 && os.Args[1] == "init" && os.Getenv("_LIBCONTAINER_INITPIPE") != "" {
		runtime.GOMAXPROCS(1)
		runtime.LockOSThread()
		libcontainer.Init() // does not return
	}
}

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

// sealedSelf copies the running program into a memory file and seals it.
func sealedSelf() (*os.File, error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer self.Close()
	fd, err := unix.MemfdCreate("sandboxd", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // kernels before 6.3 know no MFD_EXEC
		fd, err = unix.MemfdCreate("sandboxd", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("make a memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), "sandboxd")
	if _, err := io.Copy(f, self); err != nil {
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
