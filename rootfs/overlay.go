package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/sandbox"
)

// overlayMode is how this kernel wants an overlay to be put together.
type overlayMode int

const (
	// modeDetached: layers lie in a mount that is attached nowhere and go
	// in one by one (lowerdir+, Linux 6.7; detached layers, 6.15).
	modeDetached overlayMode = iota + 1
	// modeAttached: one by one, but the layers' mount must be attached in
	// the caller's mount namespace.
	modeAttached
	// modeString: attached, and all layers in one lowerdir= string, which
	// holds a page; short names keep 500 layers (the kernel's limit) in it.
	modeString
)

func (m overlayMode) String() string {
	return [...]string{"unknown", "detached", "attached", "string"}[m]
}

// MaxLayers is the kernel's OVL_MAX_STACK.
const MaxLayers = 500

// overlayPlan is one overlay, with paths relative to the volume.
type overlayPlan struct {
	lowers      []string // topmost first, as overlay wants them
	upper, work string   // both empty: read only
}

func planOverlay(id sandbox.ID, layers []string) (overlayPlan, error) {
	p, err := planLayers(layers)
	p.upper = filepath.Join(sandboxesDir, string(id), "upper")
	p.work = filepath.Join(sandboxesDir, string(id), "work")
	return p, err
}

// planLayers plans a read-only overlay, of layers given lowest first.
func planLayers(layers []string) (overlayPlan, error) {
	var p overlayPlan
	if len(layers) == 0 || len(layers) > MaxLayers {
		return p, sandbox.Errorf(sandbox.ErrInvalid, "image_layers", "an image of %d layers: 1 to %d can be stacked", len(layers), MaxLayers)
	}
	for _, layer := range slices.Backward(layers) {
		tree, err := layerTree(layer)
		if err != nil {
			return p, err
		}
		p.lowers = append(p.lowers, tree)
	}
	return p, nil
}

// features are the options every overlay gets besides its directories:
//
//   - redirect_dir: directories that lie in a layer can be renamed
//   - volatile: no sync when the mount goes or the sandbox asks for one
//   - the rest off: each would tie an upper to the very layers it was first
//     mounted over, or hide data from whoever stacks the upper as a layer
func (p overlayPlan) features() []linux.MountParam {
	out := []linux.MountParam{
		{Key: "redirect_dir", Value: "on"},
		{Key: "metacopy", Value: "off"},
		{Key: "index", Value: "off"},
		{Key: "xino", Value: "off"},
	}
	if p.upper != "" {
		out = append(out, linux.MountParam{Key: "volatile"})
	}
	return out
}

// params gives each layer its own parameter. base is a path of the volume.
func (p overlayPlan) params(base string) []linux.MountParam {
	var out []linux.MountParam
	for _, l := range p.lowers {
		out = append(out, linux.MountParam{Key: "lowerdir+", Value: filepath.Join(base, l)})
	}
	if p.upper != "" {
		out = append(out,
			linux.MountParam{Key: "upperdir", Value: filepath.Join(base, p.upper)},
			linux.MountParam{Key: "workdir", Value: filepath.Join(base, p.work)})
	}
	return append(out, p.features()...)
}

// data is the option string of mount(2), for layers already open as the
// given descriptors and a working directory in which each descriptor is an
// entry, as in /proc/self/fd.
func (p overlayPlan) data(base string, lowers []int) (string, error) {
	names := make([]string, len(lowers))
	for i, fd := range lowers {
		names[i] = strconv.Itoa(fd)
	}
	opts := []string{"lowerdir=" + strings.Join(names, ":")}
	if p.upper != "" {
		opts = append(opts, "upperdir="+filepath.Join(base, p.upper), "workdir="+filepath.Join(base, p.work))
	}
	for _, f := range p.features() {
		if f.Value == "" {
			opts = append(opts, f.Key)
		} else {
			opts = append(opts, f.Key+"="+f.Value)
		}
	}
	s := strings.Join(opts, ",")
	if len(s) >= 4096 { // mount(2) takes a page, with its zero byte
		return "", sandbox.Errorf(sandbox.ErrUnsupported, "image_layers", "%d layers do not fit one mount on this kernel: flatten the image", len(lowers))
	}
	return s, nil
}

// overlayAttrs are the attributes of every root.
const overlayAttrs = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// mountOverlay builds the overlay and returns it detached. userns, if not
// nil, maps the volume's ids into the range that begins at base.
//
// An overlay works with the credentials of its mounter, and those must exist
// in the idmapped range: hence the file-system ids of the thread meanwhile
// (else: EOVERFLOW on the work directory, and a read-only mount). Without
// CAP_SYS_RESOURCE among them, quotas bind what is written through it.
func (s *Store) mountOverlay(p overlayPlan, userns *os.File, base uint32, mode overlayMode) (*os.File, error) {
	vol, err := linux.CloneTree(s.vol.dir, false)
	if err != nil {
		return nil, err
	}
	defer vol.Close()
	if userns != nil {
		err = linux.MapTree(vol, userns, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	} else {
		err = linux.SetTree(vol, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV, false)
	}
	if err != nil {
		if errors.Is(err, unix.EINVAL) && userns != nil {
			return nil, sandbox.Errorf(sandbox.ErrUnsupported, "no_idmap", "the filesystem of %s cannot map ids (ext4, XFS and btrfs can): move the state directory: %w", s.vol.dir, err)
		}
		return nil, err
	}
	var done func() error
	if mode != modeDetached {
		if done, err = s.attachScratch(vol); err != nil {
			return nil, err
		}
	}
	var root *os.File
	mount := func() (err error) {
		if mode == modeString {
			root, err = s.mountByString(p, vol)
		} else {
			root, err = linux.NewMount("overlay", p.params(fdPath(vol)), overlayAttrs)
		}
		return err
	}
	asMounter := mount
	if userns != nil {
		asMounter = func() error { return linux.WithFSIDs(base, base, mount, unix.CAP_SYS_RESOURCE) }
	}
	if mode == modeString { // it changes its thread's working directory
		err = linux.OnThread(asMounter)
	} else {
		err = asMounter()
	}
	if done != nil {
		err = errors.Join(err, done())
	}
	if err != nil && root != nil {
		_ = root.Close() // a detached mount goes with it
		root = nil
	}
	return root, err
}

func fdPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// attachScratch attaches a tree at a fresh directory of the scratch mount.
func (s *Store) attachScratch(tree *os.File) (detach func() error, err error) {
	dir, err := os.MkdirTemp(s.scratch(), "a")
	if err != nil {
		return nil, err
	}
	if err := linux.AttachTree(tree, dir); err != nil {
		return nil, errors.Join(err, os.Remove(dir))
	}
	return func() error { return errors.Join(linux.DetachTree(dir), os.Remove(dir)) }, nil
}

// mountByString mounts in the old way, on a scratch directory, and lifts the
// mount off again. It runs on a thread of its own.
func (s *Store) mountByString(p overlayPlan, vol *os.File) (_ *os.File, err error) {
	fds := make([]int, 0, len(p.lowers))
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd) // O_PATH: nothing to lose
		}
	}()
	for _, l := range p.lowers {
		fd, err := unix.Openat(int(vol.Fd()), l, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, &os.PathError{Op: "open layer", Path: l, Err: err}
		}
		fds = append(fds, fd)
	}
	data, err := p.data(fdPath(vol), fds)
	if err != nil {
		return nil, err
	}
	at, err := os.MkdirTemp(s.scratch(), "o")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.Remove(at)) }()
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, os.NewSyscallError("unshare fs", err)
	}
	if err := unix.Chdir("/proc/self/fd"); err != nil {
		return nil, &os.PathError{Op: "chdir", Path: "/proc/self/fd", Err: err}
	}
	if err := unix.Mount("overlay", at, "overlay", unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		return nil, fmt.Errorf("overlay mount of %d layers: %w", len(fds), err)
	}
	defer func() { err = errors.Join(err, linux.DetachTree(at)) }()
	root, err := linux.CloneTree(at, false)
	if err != nil {
		return nil, err
	}
	return root, linux.SetTree(root, 0, false)
}

// probeOverlay tries the modes, the quickest first, on empty directories.
// The kernel's version would not tell: distributions carry patches over.
func (s *Store) probeOverlay() (overlayMode, error) {
	var errs []error
	for _, mode := range []overlayMode{modeDetached, modeAttached, modeString} {
		err := s.tryOverlay(mode)
		if err == nil {
			return mode, nil
		}
		errs = append(errs, fmt.Errorf("%v: %w", mode, err))
	}
	return 0, sandbox.Errorf(sandbox.ErrUnsupported, "no_overlay", "no overlay can be mounted over %s (is the state directory itself on an overlay or a network filesystem?): %w", s.vol.dir, errors.Join(errs...))
}

func (s *Store) tryOverlay(mode overlayMode) (err error) {
	dir, err := os.MkdirTemp(s.vol.path(stagingDir), "probe")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	rel := filepath.Join(stagingDir, filepath.Base(dir))
	p := overlayPlan{upper: filepath.Join(rel, "u"), work: filepath.Join(rel, "w")}
	for _, l := range []string{"l1", "l2"} {
		p.lowers = append(p.lowers, filepath.Join(rel, l))
	}
	for _, d := range append([]string{p.upper, p.work}, p.lowers...) {
		if err := os.Mkdir(s.vol.path(d), 0o700); err != nil {
			return err
		}
	}
	root, err := s.mountOverlay(p, nil, 0, mode)
	if err != nil {
		return err
	}
	return root.Close()
}
