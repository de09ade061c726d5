package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// Config says where a Store lives and how far it may go.
type Config struct {
	Dir         string // state directory; the volume is Dir/volume
	VolumeBytes int64  // size of a loop image, should one be made; 0: 20 GiB or half the free space
	BestEffort  bool   // where quotas are impossible, go on without and say so

	ImportMaxBytes int64 // bytes of one import, unpacked; 0: 32 GiB
	ImportMaxFiles int64 // entries of one import; 0: 2,000,000

	BindRoots []string // host directories beneath which others may be bound into sandboxes

	// Second is for another Store beside the first, with a Dir of its own: on
	// one filesystem they must not take the same project ids.
	Second bool
}

const (
	defaultImportBytes = 32 << 30
	defaultImportFiles = 2_000_000
	parallelImports    = 4 // each holds a digest per file in memory
)

// Store is the volume with its layers, uppers and trash. Its methods may be
// called from several goroutines; those of one sandbox by one at a time.
type Store struct {
	cfg     Config
	dir     string // Dir, absolute and without symbolic links
	lock    *os.File
	vol     *volume
	mode    overlayMode
	trash   *trash
	ids     *projectIDs
	imports *semaphore.Weighted

	facts sync.Map // layerFacts by a layer's directory

	boot    string      // this start of the machine
	noClone atomic.Bool // the volume shares no blocks

	mu    sync.Mutex          // guards the rest
	mated map[string][]string // stacks with their mates, by those without
	host  hostView

	closing sync.Once
	closed  error // by closing
}

// The directories of a volume.
const (
	layersDir    = "layers"
	sandboxesDir = "sandboxes"
	stagingDir   = "staging"
	trashDir     = "trash"
)

// Open prepares the volume beneath cfg.Dir, mounting it if it is an image,
// finds out how this kernel mounts overlays, and starts emptying the trash.
// What a killed predecessor left half done goes to the trash. One process at
// a time can hold a Store; opening again after Close or death is safe, also
// while sandboxes still use the volume. Class ErrUnsupported: this host has no
// project quotas (and BestEffort is off) or no usable overlay.
func Open(ctx context.Context, cfg Config) (_ *Store, err error) {
	if cfg.ImportMaxBytes == 0 {
		cfg.ImportMaxBytes = defaultImportBytes
	}
	if cfg.ImportMaxFiles == 0 {
		cfg.ImportMaxFiles = defaultImportFiles
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("rootfs: make state directory: %w", err)
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("rootfs: state directory: %w", err)
	}
	s := &Store{cfg: cfg, dir: dir, imports: semaphore.NewWeighted(parallelImports)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.boot, err = bootID(); err != nil {
		return nil, fmt.Errorf("rootfs: this start of the machine: %w", err)
	}
	if s.lock, err = lockDir(dir); err != nil {
		return nil, err
	}
	if err := s.mountScratch(); err != nil {
		return nil, err
	}
	if s.vol, err = openVolume(ctx, cfg, dir); err != nil {
		return nil, err
	}
	if err := s.prepareDirs(); err != nil {
		return nil, err
	}
	if err := s.makeSkeleton(); err != nil {
		return nil, err
	}
	if s.mode, err = s.probeOverlay(); err != nil {
		return nil, err
	}
	if s.ids, err = s.findProjectIDs(); err != nil {
		return nil, err
	}
	s.trash = startTrash(s.vol, s.ids)
	if err := errors.Join(s.discardStaging(), s.discardHalfLayers(), s.forgetGone()); err != nil {
		return nil, err
	}
	s.trash.wake()
	return s, nil
}

// Close stops the background work and takes the volume out of the caller's
// mount namespace. Sandboxes that run keep their roots. Repeating it is safe.
func (s *Store) Close() error {
	s.closing.Do(func() { s.closed = s.close() })
	return s.closed
}

func (s *Store) close() error {
	var errs []error
	if s.trash != nil {
		s.trash.stop()
	}
	if s.vol != nil {
		errs = append(errs, s.vol.close())
	}
	if s.lock != nil { // without the lock, the mount is somebody else's
		errs = append(errs, linux.DetachTree(s.scratch()), s.lock.Close())
	}
	return errors.Join(errs...)
}

// lockDir keeps a second daemon off the state directory. The kernel lets go
// of the lock when the process dies.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "rootfs.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("rootfs: lock file: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close() // the lock was not ours
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, sandbox.Errorf(sandbox.ErrConflict, "state_dir_in_use", "state directory %s is in use by another sandboxd: stop that one, or choose another directory", dir)
		}
		return nil, fmt.Errorf("rootfs: lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// scratch is a directory for mounts that must stand somewhere for a moment.
func (s *Store) scratch() string { return filepath.Join(s.dir, "mnt") }

// mountScratch puts a small private tmpfs on the scratch directory, in place
// of one an earlier Store of this mount namespace may have left.
func (s *Store) mountScratch() error {
	if err := os.MkdirAll(s.scratch(), 0o700); err != nil {
		return fmt.Errorf("rootfs: scratch directory: %w", err)
	}
	if err := linux.DetachTree(s.scratch()); err != nil {
		return fmt.Errorf("rootfs: old scratch mount: %w", err)
	}
	tmp, err := linux.NewMount("tmpfs", []linux.MountParam{{Key: "mode", Value: "0700"}, {Key: "size", Value: "1m"}}, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return fmt.Errorf("rootfs: scratch: %w", err)
	}
	defer tmp.Close()
	if err := linux.SetTree(tmp, 0, false); err != nil {
		return fmt.Errorf("rootfs: scratch: %w", err)
	}
	if err := linux.AttachTree(tmp, s.scratch()); err != nil {
		return fmt.Errorf("rootfs: scratch: %w", err)
	}
	return nil
}

func (s *Store) prepareDirs() error {
	for _, d := range []string{layersDir, sandboxesDir, volumesDir, stagingDir, copiesDir, trashDir} {
		if err := os.Mkdir(s.vol.path(d), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("rootfs: prepare volume: %w", err)
		}
	}
	// Else all uppers come from one group of inodes. An ext4 without a journal
	// searches that for one that was not deleted a moment ago, and where
	// sandboxes come and go most were: milliseconds for each of them. Other
	// filesystems refuse the hint and need none.
	_ = linux.SpreadBelow(s.vol.path(sandboxesDir))
	return nil
}

// discardStaging throws away imports and copies that a killed predecessor had
// begun.
func (s *Store) discardStaging() error {
	names, err := readNames(s.vol.path(stagingDir))
	if err != nil {
		return fmt.Errorf("rootfs: staging: %w", err)
	}
	for _, n := range names {
		if err := s.trash.add(filepath.Join(stagingDir, n)); err != nil {
			return err
		}
	}
	return nil
}

func readNames(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}
