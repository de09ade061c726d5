package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// A named volume is volumes/<name>/data, with a quota of its own. Its files
// have ids 0-65535 on disk, as those of layers and uppers, and are mapped into
// the range of each sandbox that mounts them: root of one is root of all.
const (
	volumesDir = "volumes"
	dataDir    = "data"
)

// ownInodes are those a volume needs itself: its two directories. They come
// on top of the limit and out of the usage.
const ownInodes = 2

// VolumeLimits bound a named volume. Zero means no limit of its own.
type VolumeLimits struct{ Bytes, Inodes int64 }

func (s *Store) namedDir(name string) (string, error) {
	if err := sandbox.ValidateName(name); err != nil {
		return "", err
	}
	return s.vol.path(volumesDir, name), nil
}

// CreateVolume makes a named volume and sets its limits. When it returns, a
// host crash does not undo it. Repeating it keeps what is there, sets the
// limits again and finishes what a crash cut off.
func (s *Store) CreateVolume(name string, l VolumeLimits) error {
	dir, err := s.namedDir(name)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return spaceError("make the directory of volume "+name, err)
	}
	if err := s.limitVolume(name, dir, l, true); err != nil {
		return spaceError("limit volume "+name, err) // a new quota record takes space, too
	}
	data := filepath.Join(dir, dataDir)
	err = os.Mkdir(data, 0o755)
	if err == nil {
		err = os.Chmod(data, 0o755) // whatever the umask took
	} else if errors.Is(err, os.ErrExist) {
		err = nil
	}
	if err != nil {
		return spaceError("make volume "+name, err)
	}
	return errors.Join(syncDir(dir), syncDir(s.vol.path(volumesDir)))
}

// LimitVolume changes the limits of a named volume; what it already holds
// beyond them stays. Where quotas are not enforced it does nothing.
// ErrNotFound.
func (s *Store) LimitVolume(name string, l VolumeLimits) error {
	dir, err := s.namedDir(name)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(dir); err != nil {
		return s.noFiles(name, err)
	}
	return s.limitVolume(name, dir, l, true)
}

func (s *Store) limitVolume(name, dir string, l VolumeLimits, create bool) error {
	if l.Inodes != 0 {
		l.Inodes += ownInodes
	}
	return s.limitDir("volume "+name, dir, sandbox.Limits{DiskBytes: l.Bytes, DiskInodes: l.Inodes}, create)
}

// LimitsOfVolume reads back what LimitVolume set, zeroes where this host has
// no quotas.
func (s *Store) LimitsOfVolume(name string) (VolumeLimits, error) {
	dir, err := s.namedDir(name)
	if err != nil || !s.vol.quota {
		return VolumeLimits{}, err
	}
	project, err := projectOf(dir)
	if err != nil || project == 0 {
		return VolumeLimits{}, err
	}
	bytes, inodes, err := linux.ProjectLimits(s.vol.root, project)
	if err != nil {
		return VolumeLimits{}, fmt.Errorf("rootfs: limits of volume %s: %w", name, err)
	}
	return VolumeLimits{Bytes: int64(bytes), Inodes: max(0, int64(inodes)-ownInodes)}, nil
}

// VolumeUsage returns what a named volume holds. known is false where this
// host does not count, and for a volume that is not there.
func (s *Store) VolumeUsage(name string) (bytes, inodes uint64, known bool, err error) {
	dir, err := s.namedDir(name)
	if err != nil || !s.vol.quota {
		return 0, 0, false, err
	}
	project, err := projectOf(dir)
	if err != nil || project == 0 {
		return 0, 0, false, err
	}
	bytes, inodes, err = linux.ProjectUsage(s.vol.root, project)
	if err != nil {
		return 0, 0, false, fmt.Errorf("rootfs: usage of volume %s: %w", name, err)
	}
	return bytes, inodes - min(inodes, ownInodes), true, nil
}

// VolumeEnforcement says what becomes of a volume's limits on this host.
func (s *Store) VolumeEnforcement(l VolumeLimits) []sandbox.Enforcement {
	size := sandbox.Enforcement{Limit: "disk", Asked: "none", Enforced: s.vol.quota, Why: s.vol.why}
	if l.Bytes != 0 {
		size.Asked = units.BytesSize(float64(l.Bytes))
	}
	files := sandbox.Enforcement{Limit: "inodes", Asked: "none", Enforced: s.vol.quota, Why: s.vol.why}
	if l.Inodes != 0 {
		files.Asked = fmt.Sprintf("%d files", l.Inodes)
	}
	return []sandbox.Enforcement{size, files}
}

// DiscardVolume puts a named volume into the trash, at once whatever its size.
// When it returns, a host crash does not bring it back. One that is not there
// is no error. No sandbox must have it mounted.
func (s *Store) DiscardVolume(name string) error {
	if _, err := s.namedDir(name); err != nil {
		return err
	}
	if err := s.trash.add(filepath.Join(volumesDir, name)); err != nil {
		return err
	}
	return errors.Join(syncDir(s.vol.path(volumesDir)), syncDir(s.vol.path(trashDir)))
}

// NamedVolumes lists the volumes there are on disk.
func (s *Store) NamedVolumes() ([]string, error) {
	found, err := readNames(s.vol.path(volumesDir))
	if err != nil {
		return nil, fmt.Errorf("rootfs: list volumes: %w", err)
	}
	names := make([]string, 0, len(found))
	for _, n := range found {
		if sandbox.ValidateName(n) == nil {
			names = append(names, n)
		}
	}
	return names, nil
}

// MountVolume returns a named volume as a detached mount whose ids are mapped
// through userns. ErrNotFound, ErrUnsupported.
func (s *Store) MountVolume(name string, userns *os.File, readOnly bool) (*os.File, error) {
	dir, err := s.namedDir(name)
	if err != nil {
		return nil, err
	}
	tree, err := linux.CloneTree(filepath.Join(dir, dataDir), false)
	if err != nil {
		return nil, s.noFiles(name, err)
	}
	if err := mapMount(tree, userns, readOnly); err != nil {
		_ = tree.Close() // detached: it goes with it
		return nil, fmt.Errorf("rootfs: mount volume %s: %w", name, err)
	}
	return tree, nil
}

// mapMount gives a detached mount the attributes of every mount in a sandbox.
func mapMount(tree, userns *os.File, readOnly bool) error {
	attrs := uint64(unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV)
	if readOnly {
		attrs |= unix.MOUNT_ATTR_RDONLY
	}
	if userns == nil {
		return linux.SetTree(tree, attrs, false)
	}
	err := linux.MapTree(tree, userns, attrs)
	if errors.Is(err, unix.EINVAL) {
		return sandbox.Errorf(sandbox.ErrUnsupported, "no_idmap", "the filesystem of %s cannot map ids (ext4, XFS and btrfs can): %w", tree.Name(), err)
	}
	return err
}

// noFiles explains why a volume's directory cannot be opened.
func (s *Store) noFiles(name string, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.ErrNotFound, "volume_gone", "the files of volume %s are not there: put back %s from a backup, or remove the volume: %w", name, s.vol.path(volumesDir, name), err)
	}
	return fmt.Errorf("rootfs: volume %s: %w", name, err)
}
