package rootfs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	minVolume     = 320 << 20 // mkfs.xfs refuses less than 300 MiB
	defaultVolume = 20 << 30
	keepFree      = 1 << 30 // left to the rest of the host
)

// volume is the directory tree everything lies on.
type volume struct {
	dir     string
	root    *os.File // open directory; for quotactl_fd and syncfs
	mounted bool     // by us, from the image
	quota   bool     // project quotas are counted and enforced
	why     string   // where not: why, and how to mend that
}

func (v *volume) path(elem ...string) string {
	return filepath.Join(append([]string{v.dir}, elem...)...)
}

func (v *volume) close() error {
	err := v.root.Close()
	if v.mounted {
		err = errors.Join(err, linux.DetachTree(v.dir))
	}
	return err
}

// sync writes everything on the volume's filesystem to disk.
func (v *volume) sync() error {
	return os.NewSyscallError("syncfs", unix.Syncfs(int(v.root.Fd())))
}

// openVolume decides, in this order: the image there is; the directory
// itself if its filesystem has project quotas; a new image; and, with
// BestEffort, the directory without quotas.
func openVolume(ctx context.Context, cfg Config, dir string) (*volume, error) {
	v := &volume{dir: filepath.Join(dir, "volume")}
	if err := os.Mkdir(v.dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("rootfs: make volume directory: %w", err)
	}
	image := filepath.Join(dir, "volume.img")
	_, err := os.Stat(image)
	switch {
	case err == nil:
		return v.mountImage(image)
	case !errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("rootfs: volume image: %w", err)
	}
	if err := v.openRoot(); err != nil {
		return nil, err
	}
	if v.quota {
		return v, nil
	}
	_, plain := os.Stat(v.path(layersDir))
	if plain == nil {
		v.why = "the volume was begun as a plain directory; to have quotas, stop the daemon, move " + v.dir + " away and start again"
	} else {
		// The directory is opened again, from the image.
		_ = v.root.Close()
		err := makeImage(ctx, image, cfg.VolumeBytes)
		if err == nil {
			return v.mountImage(image)
		}
		if ctx.Err() != nil || errors.Is(err, sandbox.ErrInvalid) {
			return nil, err
		}
		v.why = err.Error()
		if err := v.openRoot(); err != nil {
			return nil, err
		}
	}
	if !cfg.BestEffort {
		_ = v.root.Close() // reading only
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "no_project_quota",
			"no project quotas for %s: %s; or start with best-effort disk limits, which enforces none", v.dir, v.why)
	}
	slog.Warn("disk limits are not enforced", "volume", v.dir, "why", v.why)
	return v, nil
}

// openRoot opens the volume directory and asks its filesystem for quotas.
func (v *volume) openRoot() error {
	root, err := os.Open(v.dir)
	if err != nil {
		return fmt.Errorf("rootfs: open volume: %w", err)
	}
	if v.quota, err = linux.ProjectQuotaOn(root); err != nil {
		_ = root.Close() // reading only
		return fmt.Errorf("rootfs: ask %s for project quotas: %w", v.dir, err)
	}
	v.root = root
	return nil
}

// mountImage mounts the image on the volume directory. Sandboxes of a killed
// predecessor may still hold the same filesystem: then the same loop device is
// found and mounted once more.
func (v *volume) mountImage(image string) (*volume, error) {
	// Left by an earlier Store of this mount namespace.
	if err := linux.DetachTree(v.dir); err != nil {
		return nil, fmt.Errorf("rootfs: old volume mount: %w", err)
	}
	tree, err := mountXFS(image)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.ErrUnsupported, "volume_mount", "mount volume image %s: %w", image, err)
	}
	defer tree.Close()
	if err := linux.AttachTree(tree, v.dir); err != nil {
		return nil, fmt.Errorf("rootfs: attach volume: %w", err)
	}
	v.mounted = true
	if err := v.openRoot(); err != nil {
		return nil, errors.Join(err, linux.DetachTree(v.dir))
	}
	if !v.quota {
		v.why = "the volume's filesystem was mounted without quotas"
	}
	return v, nil
}

// mountXFS returns the XFS in image as a detached, private mount.
func mountXFS(image string) (*os.File, error) {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	dev, err := linux.LoopDevice(f)
	if err != nil {
		return nil, err
	}
	defer dev.Close() // the mount keeps the device from here on
	tree, err := linux.NewMount("xfs",
		[]linux.MountParam{{Key: "source", Value: dev.Name()}, {Key: "prjquota"}},
		unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return nil, err
	}
	if err := linux.SetTree(tree, 0, false); err != nil {
		_ = tree.Close() // the first error counts
		return nil, err
	}
	return tree, nil
}

// CheckVolumeSize finds a size that no image of a volume can have, where one
// would have to be made. 0 is a size of the daemon's choice.
func CheckVolumeSize(dir string, asked int64) error {
	if _, err := os.Stat(filepath.Join(dir, "volume.img")); err == nil || asked == 0 {
		return nil
	}
	_, err := volumeSize(asked, 1<<62)
	return err
}

// volumeSize plans the size of a new image from what is free.
func volumeSize(asked, free int64) (int64, error) {
	size := asked
	if size == 0 {
		size = min(defaultVolume, free/2)
	}
	size = size &^ (1<<20 - 1)
	switch {
	case asked != 0 && asked < minVolume:
		return 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_volume_bytes", "volume of %s: at least %s", units.BytesSize(float64(asked)), units.BytesSize(minVolume))
	case size < minVolume || size > free-keepFree:
		return 0, sandbox.Errorf(sandbox.ErrExhausted, "volume_no_space",
			"a volume image of %s needs that and %s more on disk, %s are free: free some, or set a smaller volume size",
			units.BytesSize(float64(max(size, minVolume))), units.BytesSize(keepFree), units.BytesSize(float64(free)))
	}
	return size, nil
}

// makeImage builds the loop image under another name and renames it, so that
// an image that exists is whole. Every block is allocated: on a full disk, a
// sparse image accepts writes and then loses them.
func makeImage(ctx context.Context, image string, asked int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(image), &st); err != nil {
		return &os.PathError{Op: "statfs", Path: filepath.Dir(image), Err: err}
	}
	size, err := volumeSize(asked, int64(st.Bavail)*st.Bsize)
	if err != nil {
		return err
	}
	part := image + ".part"
	defer func() { _ = os.Remove(part) }() // after a success there is none
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		return err
	}
	if err := mkfs(ctx, part); err != nil {
		return err
	}
	if err := probeImage(part); err != nil { // while it takes no space
		return err
	}
	if err := allocate(ctx, f, size); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(part, image); err != nil {
		return err
	}
	return syncDir(filepath.Dir(image))
}

// probeImage finds out whether this host mounts the image with project quotas.
func probeImage(path string) error {
	tree, err := mountXFS(path)
	if err != nil {
		return fmt.Errorf("this kernel does not mount XFS with project quotas (CONFIG_XFS_QUOTA; Debian's own kernel has it): %w", err)
	}
	defer tree.Close()
	fd, err := unix.Openat(int(tree.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "root of " + path, Err: err}
	}
	root := os.NewFile(uintptr(fd), path)
	defer root.Close()
	on, err := linux.ProjectQuotaOn(root)
	if err == nil && !on {
		err = errors.New("XFS was mounted, but without project quotas (CONFIG_XFS_QUOTA; Debian's own kernel has it)")
	}
	return err
}

// mkfs makes an XFS with reflinks in a file. Without reverse mapping, which
// newer versions of the program turn on: it is of use to repairs, and every
// clone would have one tree more to change.
func mkfs(ctx context.Context, path string) error {
	bin, err := exec.LookPath("mkfs.xfs")
	if err != nil {
		return fmt.Errorf("%w: install xfsprogs", err)
	}
	out, err := exec.CommandContext(ctx, bin, "-q", "-f", "-K", "-m", "reflink=1,crc=1,rmapbt=0", path).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", bin, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// allocate gives every block of f space on disk.
func allocate(ctx context.Context, f *os.File, size int64) error {
	err := unix.Fallocate(int(f.Fd()), 0, 0, size)
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return &os.PathError{Op: "fallocate", Path: f.Name(), Err: err}
	}
	return rewrite(ctx, f, size)
}

// rewrite writes every block of f as it is: for filesystems that cannot
// reserve space.
func rewrite(ctx context.Context, f *os.File, size int64) error {
	block := make([]byte, 1<<20)
	for off := int64(0); off < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.ReadAt(block[:min(int64(len(block)), size-off)], off)
		if err != nil {
			return err
		}
		if _, err := f.WriteAt(block[:n], off); err != nil {
			return err
		}
		off += int64(n)
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
