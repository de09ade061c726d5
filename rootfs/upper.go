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

// Enforcement says what becomes of the disk limits in l on this host.
func (s *Store) Enforcement(l sandbox.Limits) []sandbox.Enforcement {
	disk := sandbox.Enforcement{Limit: "disk", Asked: "none", Enforced: s.vol.quota, Why: s.vol.why}
	if l.DiskBytes != 0 {
		disk.Asked = units.BytesSize(float64(l.DiskBytes))
	}
	inodes := sandbox.Enforcement{Limit: "inodes", Asked: "none", Enforced: s.vol.quota, Why: s.vol.why}
	if l.DiskInodes != 0 {
		inodes.Asked = fmt.Sprintf("%d files", l.DiskInodes)
	}
	return []sandbox.Enforcement{disk, inodes}
}

func (s *Store) sandboxDir(id sandbox.ID) (string, error) {
	if _, err := sandbox.ParseID(string(id)); err != nil {
		return "", err
	}
	return s.vol.path(sandboxesDir, string(id)), nil
}

// CreateUpper makes the writable layer of a sandbox and sets its limits.
// Repeating it keeps what is there and sets the limits again.
//
// Quotas go by project id. The id is not derived from the slot: a slot is
// leased again while the former owner's files still wait in the trash, and
// those would count against the new one. The kernel stores the id with the
// directory, so it needs no record elsewhere.
func (s *Store) CreateUpper(id sandbox.ID, _ int, l sandbox.Limits) error {
	return s.CreateUpperOn(id, l, FirstBase)
}

// FirstBase is the base of an upper that CreateUpper made.
const FirstBase = "first"

// baseMark is the attribute of a sandbox's directory that says what its upper
// lies on, in the caller's words.
const baseMark = "trusted.sandboxd.base"

// CreateUpperOn is CreateUpper for an upper that lies on something else than the
// first. The file system keeps the order of what is written here: after a power
// cut there is an upper with its base, or none. One so long that the file system
// does not take it is not written.
func (s *Store) CreateUpperOn(id sandbox.ID, l sandbox.Limits, base string) error {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return err
	}
	err = os.Mkdir(dir, 0o700)
	if err != nil && !errors.Is(err, os.ErrExist) {
		return spaceError("make the directory of "+string(id), err)
	}
	if err == nil {
		_ = unix.Lsetxattr(dir, baseMark, []byte(base), 0)
	}
	if err := s.setLimits(id, dir, l, true); err != nil {
		return err
	}
	// The upper's own mode and owner are those of the sandbox's "/".
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"upper", 0o755}, {"work", 0o700}} {
		path := filepath.Join(dir, d.name)
		err := os.Mkdir(path, d.mode)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err == nil {
			err = os.Chmod(path, d.mode) // whatever the umask took
		}
		if err != nil {
			return spaceError("make "+d.name+" of "+string(id), err)
		}
	}
	return nil
}

// What an upper and its mount take is far below this.
const (
	ampleBytes  = 64 << 20
	ampleInodes = 4096
)

// ample reports whether a volume has so much left that nobody need try. Where
// no inodes are counted (btrfs) the free bytes tell nothing of those for names.
func ample(st unix.Statfs_t) bool {
	return st.Files > 0 && st.Ffree >= ampleInodes && st.Bavail >= ampleBytes/uint64(max(st.Bsize, 1))
}

// Room tells whether the volume has room for one more upper and its mount,
// where that is little by making what it takes and removing it, which takes a
// millisecond or more. Class ErrExhausted if not. Ask before an upper is given
// up for another.
func (s *Store) Room() error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(s.vol.root.Fd()), &st); err == nil && ample(st) {
		return nil
	}
	dir, err := os.MkdirTemp(s.vol.path(stagingDir), "room")
	if err != nil {
		return spaceError("look for room", err)
	}
	for _, d := range []string{"upper/etc", "work/work", "work/incompat/volatile"} {
		if err == nil {
			err = os.MkdirAll(filepath.Join(dir, d), 0o700)
		}
	}
	if err == nil {
		// For what Furnish writes, and what others write meanwhile.
		err = os.WriteFile(filepath.Join(dir, "upper/etc/hosts"), make([]byte, 64<<10), 0o600)
	}
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		return spaceError("look for room", err)
	}
	return nil
}

// SetLimits changes the limits of a sandbox; what it already holds beyond
// them stays. Where quotas are not enforced it does nothing.
func (s *Store) SetLimits(id sandbox.ID, _ int, l sandbox.Limits) error {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return err
	}
	return s.setLimits(id, dir, l, false)
}

func (s *Store) setLimits(id sandbox.ID, dir string, l sandbox.Limits, create bool) error {
	err := s.limitDir(string(id), dir, l, create)
	if errors.Is(err, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.ErrNotFound, "no_upper", "sandbox %s has no files: %w", id, err)
	}
	return err
}

// limitDir sets the disk limits of a directory and all that is made in it.
// With create it may be one that had none yet.
func (s *Store) limitDir(what, dir string, l sandbox.Limits, create bool) error {
	if !s.vol.quota {
		return nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("rootfs: limits of %s: %w", what, err)
	}
	defer f.Close()
	project, err := linux.ProjectID(f)
	if err != nil {
		return fmt.Errorf("rootfs: limits of %s: %w", what, err)
	}
	fresh := project == 0 && create
	if fresh {
		if project, err = s.ids.take(); err != nil {
			return err
		}
	}
	if project == 0 {
		return fmt.Errorf("rootfs: limits of %s: its directory carries no project id", what)
	}
	// The limits come first: no moment with the id and without them.
	err = linux.SetProjectQuota(s.vol.root, project, uint64(l.DiskBytes), uint64(l.DiskInodes))
	if err == nil && fresh {
		err = linux.SetProjectID(f, project)
	}
	if err != nil {
		if fresh {
			s.ids.free(project)
		}
		return fmt.Errorf("rootfs: limits of %s (project %#x): %w", what, project, err)
	}
	return nil
}

// Usage returns what the upper of a sandbox holds: bytes of disk and files,
// some seven of the latter the overlay's own. known is false where this host
// does not count, and for a sandbox without an upper.
func (s *Store) Usage(id sandbox.ID, _ int) (bytes, inodes uint64, known bool, err error) {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return 0, 0, false, err
	}
	return s.projectUsage(dir)
}

// Discard puts the upper of a sandbox into the trash, at once whatever its
// size. A sandbox without one is no error. Its roots must be unmounted, or
// what still writes to them writes to the trash.
func (s *Store) Discard(id sandbox.ID, _ int) error {
	if _, err := s.sandboxDir(id); err != nil {
		return err
	}
	return errors.Join(s.forget(id), s.trash.add(filepath.Join(sandboxesDir, string(id))))
}

// SetAside is Discard for an upper whose root is still mounted: its files go
// once release is called, or at the next start. To delete files under a mount
// makes the end of that mount slow.
func (s *Store) SetAside(id sandbox.ID, _ int) (release func(), err error) {
	if _, err := s.sandboxDir(id); err != nil {
		return nil, err
	}
	return s.trash.wake, errors.Join(s.forget(id), s.trash.take(filepath.Join(sandboxesDir, string(id))))
}

// Uppers lists the sandboxes that have an upper.
func (s *Store) Uppers() ([]sandbox.ID, error) {
	names, err := readNames(s.vol.path(sandboxesDir))
	if err != nil {
		return nil, fmt.Errorf("rootfs: list uppers: %w", err)
	}
	ids := make([]sandbox.ID, 0, len(names))
	for _, n := range names {
		if id, err := sandbox.ParseID(n); err == nil {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// CheckUpper returns an error of class ErrNotFound with code files_gone where a
// sandbox has no upper.
func (s *Store) CheckUpper(id sandbox.ID) error {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return err
	}
	upper := filepath.Join(dir, "upper")
	if _, err = os.Lstat(upper); errors.Is(err, os.ErrNotExist) {
		return sandbox.Errorf(sandbox.ErrNotFound, "files_gone", "the files of sandbox %[1]s are gone, %[2]s is missing: put that directory back from a copy, or give the sandbox other files ('sandbox reset %[1]s', 'sandbox rollback %[1]s SNAPSHOT'), or remove it: %[3]w", id, upper, unix.ENOENT)
	}
	return err
}

// UpperBase is what CreateUpper or CreateUpperOn noted; empty: not known.
func (s *Store) UpperBase(id sandbox.ID) string {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return ""
	}
	buf := make([]byte, 64<<10)
	n, err := unix.Lgetxattr(dir, baseMark, buf)
	if err != nil || s.CheckUpper(id) != nil {
		return ""
	}
	return string(buf[:n])
}

// Clean writes the upper of a sandbox to disk and removes the mark that a
// volatile overlay left on it, after which Mount takes the upper again. Call
// it when the sandbox's processes are gone but the host has not gone down
// since: after a host crash the upper may lack data that was never written,
// which the mark is there to tell. Once Clean has returned, a host crash
// loses nothing. Repeating it, or calling it for a sandbox without an upper,
// is no error.
func (s *Store) Clean(id sandbox.ID) error {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return err
	}
	dirty, err := s.Dirty(id)
	if err == nil && dirty {
		err = s.vol.sync() // the mark goes last: it may not be missed
	}
	if err != nil {
		return fmt.Errorf("rootfs: clean %s: %w", id, err)
	}
	// work is the overlay's own: no name in it comes from the sandbox.
	work := filepath.Join(dir, "work", "work")
	if err := os.RemoveAll(filepath.Join(work, "incompat")); err != nil {
		return fmt.Errorf("rootfs: clean %s: %w", id, err)
	}
	// The removal reaches the disk before the caller says that the files are
	// whole: a mark that comes back after a power cut would refuse the next
	// mount. Not only where it was dirty: a Clean cut off by a crash of the
	// daemon may have removed the mark and no more.
	if err := syncDir(work); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("rootfs: clean %s: %w", id, err)
	}
	return nil
}

// Dirty reports whether the mark that Clean removes is there.
func (s *Store) Dirty(id sandbox.ID) (bool, error) {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return false, err
	}
	_, err = os.Lstat(filepath.Join(dir, "work", "work", "incompat", "volatile"))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// projectOf returns the project id a directory carries, 0 if it is gone.
func projectOf(dir string) (uint32, error) {
	f, err := os.Open(dir)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return linux.ProjectID(f)
}

// spaceError gives a full disk its class.
func spaceError(what string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandbox.Errorf(sandbox.ErrExhausted, "volume_full", "the disk of the state directory is full (%s): remove sandboxes, images or volumes, or make it larger: %w", what, err)
	}
	return fmt.Errorf("rootfs: %s: %w", what, err)
}
