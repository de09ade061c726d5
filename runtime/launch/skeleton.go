package launch

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The skeleton is a small tmpfs in the daemon's own mount namespace:
//
//	skeleton/root           what PID 1 sees before its first real root, read-only
//	skeleton/root/sandbox-init   mode 0111, owned by the host's root: an id the
//	                        sandbox does not map, so that its root can neither
//	                        read, trace nor open the memory of what runs from it
//	skeleton/devs/ID        the sandbox's /dev: bound read-only, nodes by mknod here.
//	                        Of its own: on shared inodes, inotify would tell of each
//	                        opening in another sandbox, and locks would slow it down
//	skeleton/devs/ID/sandbox/sbx     where PID 1 places its program once more, for
//	                        those who may enter costs
//	skeleton/stage          the program of libcontainer's stages, if there is one
//	                        but the daemon: a link to a sealed memory file
//
// It is made anew at each start of the daemon. Shells of an earlier one keep
// the tmpfs they were built on.
type skeleton struct {
	dir   string
	stage *os.File // nil: the running program is the stage
}

func (s skeleton) root() string { return filepath.Join(s.dir, "root") }
func (s skeleton) devs() string { return filepath.Join(s.dir, "devs") }

func (s skeleton) dev(id sandbox.ID) string { return filepath.Join(s.devs(), string(id)) }

// initPath is the program of PID 1 as the skeleton names it.
const initPath = "/sandbox-init"

// stageLink names the program of the stages, beside root, where trampoline.go
// looks for it. The link leads to a descriptor of this process: what a sandbox
// could hold on to for a moment is a sealed memory file, as libcontainer wants.
const stageLink = "stage"

// newRootDir is where PID 1 attaches a real root before it moves in.
const newRootDir = "/newroot"

// deviceNodes are the nodes of a sandbox's /dev: those the OCI runtime
// specification (config-linux.md, "Default Devices") asks for.
var deviceNodes = []struct {
	name         string
	major, minor uint32
}{
	{"null", 1, 3},
	{"zero", 1, 5},
	{"full", 1, 7},
	{"random", 1, 8},
	{"urandom", 1, 9},
	{"tty", 5, 0},
}

// devLinks are the symbolic links of /dev.
var devLinks = map[string]string{
	"fd":     "/proc/self/fd",
	"stdin":  "/proc/self/fd/0",
	"stdout": "/proc/self/fd/1",
	"stderr": "/proc/self/fd/2",
	"ptmx":   "pts/ptmx",
}

// makeSkeleton mounts and fills the skeleton in dir.
func makeSkeleton(dir string, initBinary []byte) (skeleton, error) {
	s := skeleton{dir: dir}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return s, err
	}
	// Mapped ids must pass through to reach the root: search permission only.
	if err := unix.Mount("skeleton", dir, "tmpfs", unix.MS_NOSUID, "mode=711,size=64m"); err != nil {
		return s, fmt.Errorf("mount the skeleton on %s: %w", dir, err)
	}
	for _, d := range []string{s.root(), s.root() + "/proc", s.root() + "/sys", s.root() + "/dev", s.root() + newRootDir, s.devs()} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return s, err
		}
	}
	if err := os.WriteFile(s.root()+initPath, initBinary, 0o700); err != nil {
		return s, fmt.Errorf("write %s: %w", initPath, err)
	}
	if err := os.Chmod(s.root()+initPath, 0o111); err != nil {
		return s, err
	}
	return s, nil
}

// makeDev fills the /dev of one sandbox.
func (s skeleton) makeDev(id sandbox.ID) error {
	dev := s.dev(id)
	for _, d := range []string{dev, dev + "/pts", dev + "/shm", dev + "/mqueue", dev + "/sandbox"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(dev+"/sandbox/sbx", nil, 0); err != nil {
		return err
	}
	for _, d := range deviceNodes {
		path := filepath.Join(dev, d.name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("make device %s: %w", path, err)
		}
		if err := os.Chmod(path, 0o666); err != nil { // mknod is subject to the umask
			return err
		}
	}
	for name, target := range devLinks {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	return nil
}

// addStage makes program the one that libcontainer's stages run.
func (s *skeleton) addStage(program []byte) error {
	if len(program) == 0 {
		return nil
	}
	f, err := sealed("sandbox-shell", bytes.NewReader(program))
	if err != nil {
		return err
	}
	if err := os.Symlink(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()), filepath.Join(s.dir, stageLink)); err != nil {
		return errors.Join(err, f.Close())
	}
	s.stage = f
	return nil
}

func (s skeleton) closeStage() {
	if s.stage != nil {
		s.stage.Close()
	}
}

// remove unmounts the skeleton; shells that stand on it keep it.
func (s skeleton) remove() error {
	defer s.closeStage()
	if err := unix.Unmount(s.dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", s.dir, err)
	}
	return nil
}
