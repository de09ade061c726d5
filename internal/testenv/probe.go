package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// onOwnThread runs f on an operating-system thread that ends with it, so
// that f may change the thread's namespaces and rights.
func onOwnThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread
		done <- f()
	}()
	return <-done
}

func probeRoot() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("the test runs as uid %d", os.Geteuid())
	}
	err := onOwnThread(func() error { return unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS) })
	if err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	return nil
}

func probeUserns() error {
	stop, ns, err := startUserns()
	if err != nil {
		return err
	}
	defer stop()
	return ns.Close()
}

// usernsBase begins the id range the probes map; sandboxes' ranges start
// higher, so a probe beside a running daemon shares no id with it.
const usernsBase = 0x1fff0000

// startUserns starts a process in a user namespace of 65,536 ids from
// usernsBase and opens that namespace. stop ends the process.
func startUserns() (stop func(), ns *os.File, err error) {
	maps := []syscall.SysProcIDMap{{ContainerID: 0, HostID: usernsBase, Size: 65536}}
	cmd := exec.Command("cat") // waits until its standard input closes
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER,
		UidMappings: maps, GidMappings: maps,
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("start a process in a user namespace: %w", err)
	}
	stop = func() {
		_ = in.Close()
		_ = cmd.Wait()
	}
	ns, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	if err != nil {
		stop()
		return nil, nil, err
	}
	return stop, ns, nil
}

// probeOverlay mounts an overlay whose lower and upper are idmapped into a
// foreign range, in a mount namespace of its own, and writes through it.
func probeOverlay() error {
	if err := Root.Missing(); err != nil {
		return err
	}
	stop, ns, err := startUserns()
	if err != nil {
		return err
	}
	defer stop()
	defer func() { _ = ns.Close() }()
	dir, err := os.MkdirTemp("", "testenv-overlay-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for _, d := range []string{"tree/lower", "tree/upper", "tree/work", "mapped", "merged"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	return onOwnThread(func() error { return overlayOverIdmapped(dir, int(ns.Fd())) })
}

// overlayOverIdmapped needs a thread of its own. The mounts die with the
// thread's mount namespace.
func overlayOverIdmapped(dir string, userns int) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, filepath.Join(dir, "tree"), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer func() { _ = unix.Close(tree) }()
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns)}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("make an idmapped mount: %w", err)
	}
	mapped := filepath.Join(dir, "mapped")
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, mapped, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the idmapped mount: %w", err)
	}
	if err := becomeMapped(); err != nil {
		return err
	}
	merged := filepath.Join(dir, "merged")
	opts := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", mapped)
	if err := unix.Mount("overlay", merged, "overlay", 0, opts); err != nil {
		return fmt.Errorf("mount an overlay over idmapped trees: %w", err)
	}
	if err := os.WriteFile(filepath.Join(merged, "probe"), nil, 0o600); err != nil {
		return fmt.Errorf("write through an overlay over idmapped trees: %w", err)
	}
	st := unix.Stat_t{}
	if err := unix.Stat(filepath.Join(dir, "tree/upper/probe"), &st); err != nil {
		return fmt.Errorf("find what was written in the upper tree: %w", err)
	}
	if st.Uid != 0 {
		return fmt.Errorf("an idmapped upper stored uid %d, want 0", st.Uid)
	}
	return nil
}

// becomeMapped gives the thread the file-system ids that the idmapped mounts
// know (an overlay works with the ids of its mounter) and raises again the
// capabilities that this lowers.
func becomeMapped() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&hdr, &caps[0]); err != nil {
		return fmt.Errorf("capget: %w", err)
	}
	if _, err := unix.SetfsgidRetGid(usernsBase); err != nil {
		return fmt.Errorf("setfsgid: %w", err)
	}
	if _, err := unix.SetfsuidRetUid(usernsBase); err != nil {
		return fmt.Errorf("setfsuid: %w", err)
	}
	if err := unix.Capset(&hdr, &caps[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	return nil
}

// probeNFT adds a table with a chain in a network namespace of its own.
func probeNFT() error {
	if err := Root.Missing(); err != nil {
		return err
	}
	return onOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		conn, err := nftables.New()
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		table := conn.AddTable(&nftables.Table{Name: "testenv", Family: nftables.TableFamilyINet})
		conn.AddChain(&nftables.Chain{
			Name: "forward", Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
		})
		if err := conn.Flush(); err != nil {
			return fmt.Errorf("add an nftables inet table: %w", err)
		}
		return nil
	})
}
