package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// MountSpec asks for the root of one sandbox.
type MountSpec struct {
	ID      sandbox.ID
	Slot    int
	Image   sandbox.Image
	UserNS  *os.File // the sandbox's user namespace, mapping 65,536 ids
	UIDBase uint32   // the host id it maps its id 0 to
}

// Root is a root file system attached nowhere yet: whoever receives the
// descriptors attaches Mount and then each Extra at its path inside.
type Root struct {
	Mount *os.File
	Extra []Extra
}

// Extra is one more mount of a root.
type Extra struct {
	File *os.File
	Path string // absolute, inside the root
}

// Close lets go of the descriptors. Where the mounts were attached they stay.
func (r *Root) Close() error {
	var errs []error
	if r.Mount != nil {
		errs = append(errs, r.Mount.Close())
	}
	for _, e := range r.Extra {
		errs = append(errs, e.File.Close())
	}
	return errors.Join(errs...)
}

// Mount builds the root of a sandbox over its upper, which CreateUpper made.
// Mounting an upper twice at once is the caller's to prevent. Classes:
// ErrNotFound for a missing upper or layer, ErrConflict for an upper that
// needs Clean first, ErrInvalid for layers that leave no place to mount /proc
// and the like (image_bad_path), ErrUnsupported.
func (s *Store) Mount(ctx context.Context, m MountSpec) (*Root, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, err := sandbox.ParseID(string(m.ID)); err != nil {
		return nil, err
	}
	plan, err := s.planRoot(m.ID, m.Image.Layers)
	if err != nil {
		return nil, err
	}
	if err := s.inheritRoot(plan, m.Image.Layers); err != nil {
		return nil, fmt.Errorf("rootfs: mount the root of %s: %w", m.ID, err)
	}
	root := &Root{}
	err = s.withHeadroom(m.ID, func() (err error) {
		if root.Mount, err = s.mountOverlay(plan, m.UserNS, m.UIDBase, s.mode); err != nil {
			return err
		}
		return writable(root.Mount)
	})
	if err != nil {
		return nil, errors.Join(s.explainMount(m.ID, plan, err), root.Close())
	}
	if m.Image.Kind == sandbox.ImageHost {
		usr, err := s.hostUsr()
		if err != nil {
			return nil, errors.Join(err, root.Close())
		}
		root.Extra = append(root.Extra, Extra{File: usr, Path: "/usr"})
	}
	return root, nil
}

// writable is ENOSPC where the overlay found no room for its work directory:
// the kernel then mounts it read-only, and only its log says why.
func writable(mount *os.File) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(mount.Fd()), &st); err != nil {
		return os.NewSyscallError("fstatfs", err)
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return unix.ENOSPC
	}
	return nil
}

// What mounting itself may take beyond a sandbox's limits: the overlay makes
// some directories and probes the filesystem with temporary files.
const (
	headroomBytes  = 1 << 20
	headroomInodes = 32
)

// withHeadroom runs mount with the limits of a sandbox a little raised, so
// that one that has used them up can be started again. The sandbox is not yet
// there to use the difference.
func (s *Store) withHeadroom(id sandbox.ID, mount func() error) (err error) {
	if !s.vol.quota {
		return mount()
	}
	project, err := projectOf(s.vol.path(sandboxesDir, string(id)))
	if err != nil {
		return err
	}
	if project == 0 {
		return mount()
	}
	bytes, inodes, err := linux.ProjectLimits(s.vol.root, project)
	if err != nil {
		return err
	}
	if bytes == 0 && inodes == 0 {
		return mount()
	}
	raised := func(n, by uint64) uint64 {
		if n == 0 {
			return 0
		}
		return n + by
	}
	if err := linux.SetProjectQuota(s.vol.root, project, raised(bytes, headroomBytes), raised(inodes, headroomInodes)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, linux.SetProjectQuota(s.vol.root, project, bytes, inodes)) }()
	return mount()
}

// explainMount looks for a cause behind the kernel's bare errno.
func (s *Store) explainMount(id sandbox.ID, p overlayPlan, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandbox.Errorf(sandbox.ErrExhausted, "disk_full", "sandbox %s has no disk space left to be mounted: raise its disk limits, or free space on the volume: %w", id, err)
	}
	for _, l := range p.lowers {
		if _, serr := os.Stat(s.vol.path(l)); errors.Is(serr, os.ErrNotExist) {
			return sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "layer %s of sandbox %s is not there: import its image again: %w", filepath.Base(filepath.Dir(l)), id, err)
		}
	}
	if _, serr := os.Stat(s.vol.path(p.upper)); errors.Is(serr, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files: %w", id, err)
	}
	if dirty, derr := s.Dirty(id); derr == nil && dirty {
		return sandbox.Errorf(sandbox.ErrConflict, "upper_dirty", "the files of sandbox %s are in use, or were when the host went down: %w", id, err)
	}
	return fmt.Errorf("rootfs: mount the root of %s: %w", id, err)
}

// Masked directories of the host's /usr: unit files, and what administrators
// keep there. Sandboxes find them empty.
var maskedUsr = []string{
	"etc", "local/etc", "src", "local/src",
	"lib/systemd/system", "lib/systemd/user", "lib/systemd/network",
	"lib/systemd/system-preset", "lib/systemd/user-preset", "lib/systemd/system-generators",
	"local/lib/systemd", "share/dbus-1/system-services",
}

// hostView is the host's /usr as sandboxes see it.
type hostView struct {
	dir    string   // attached here, in the scratch mount; empty: not yet
	masked []string // of maskedUsr, those that exist
}

// hostUsr returns a copy of the masked /usr, detached.
//
// It is deliberately not idmapped. Its files then belong to ids that do not
// exist inside, so the sandbox's root is to them what any stranger is: it
// reads what the host shows everybody and nothing else. Idmapped, it would
// own them, and could read every file of mode 0600 in the host's /usr.
func (s *Store) hostUsr() (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	masked := existingDirs(hostUsrDir, maskedUsr)
	if s.host.dir == "" || !slices.Equal(masked, s.host.masked) {
		if err := s.buildHostUsr(masked); err != nil {
			return nil, fmt.Errorf("rootfs: the host's %s for sandboxes: %w", hostUsrDir, err)
		}
	}
	return linux.CloneTree(s.host.dir, true)
}

const hostUsrDir = "/usr"

// buildHostUsr expects the lock to be held.
func (s *Store) buildHostUsr(masked []string) (err error) {
	const attrs = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV
	usr, err := linux.CloneTree(hostUsrDir, true)
	if err != nil {
		return err
	}
	defer usr.Close()
	if err := linux.SetTree(usr, attrs, true); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(s.scratch(), "usr")
	if err != nil {
		return err
	}
	if err := linux.AttachTree(usr, dir); err != nil {
		return errors.Join(err, os.Remove(dir))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, linux.DetachTree(dir), os.Remove(dir))
		}
	}()
	for _, m := range masked {
		empty, err := linux.NewMount("tmpfs", []linux.MountParam{{Key: "mode", Value: "0755"}, {Key: "ro"}},
			attrs|unix.MOUNT_ATTR_NOEXEC)
		if err != nil {
			return err
		}
		err = errors.Join(linux.SetTree(empty, 0, false), linux.AttachTree(empty, filepath.Join(dir, m)), empty.Close())
		if err != nil {
			return err
		}
	}
	if old := s.host.dir; old != "" {
		if err := errors.Join(linux.DetachTree(old), os.Remove(old)); err != nil {
			return err
		}
	}
	s.host = hostView{dir: dir, masked: masked}
	return nil
}

// existingDirs returns those names below base that are real directories.
func existingDirs(base string, names []string) []string {
	var out []string
	for _, n := range names {
		if st, err := os.Lstat(filepath.Join(base, n)); err == nil && st.IsDir() {
			out = append(out, n)
		}
	}
	return out
}
