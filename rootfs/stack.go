package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// The skeleton is a layer of the package's own: the mount points of a sandbox
// and nothing else. It goes beneath stacks that lack some of them, as layers
// of images may.
var (
	skeletonDir  = "skeleton"
	skeletonRoot = filepath.Join(skeletonDir, "root")
	emptyLower   = filepath.Join(skeletonDir, "empty") // overlay wants two lower layers, or an upper one
)

// makeSkeleton makes the skeleton, or completes one that was cut short.
func (s *Store) makeSkeleton() error {
	make := func(rel string, mode uint32) error {
		path := s.vol.path(rel)
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return spaceError("make the skeleton", err)
		}
		if err := unix.Chmod(path, mode); err != nil { // os.Chmod has other bits
			return spaceError("make the skeleton", err)
		}
		return nil
	}
	errs := []error{make(skeletonDir, 0o700), make(skeletonRoot, 0o755), make(emptyLower, 0o755)}
	for _, m := range mountPoints {
		errs = append(errs, make(filepath.Join(skeletonRoot, m.name), m.mode))
	}
	return errors.Join(errs...)
}

// layerFacts is what mounting must know about a layer beforehand. Layers do
// not change, so it is looked up once.
type layerFacts struct {
	opaque bool         // its root hides all below, which overlay does not heed in a root
	points []pointState // by index of mountPoints

	deletes []string // directories with whiteouts
}

type pointState int

const (
	pointAbsent pointState = iota
	pointDir
	pointGone // a whiteout
	pointOther
)

// factsOf returns the facts of a layer by its directory on the volume.
func (s *Store) factsOf(lower string) (layerFacts, error) {
	if f, ok := s.facts.Load(lower); ok {
		return f.(layerFacts), nil //nolint:errcheck // nothing else is ever stored
	}
	root := s.vol.path(lower)
	f := layerFacts{points: make([]pointState, len(mountPoints))}
	var mark [4]byte
	n, err := unix.Lgetxattr(root, overlayOpaque, mark[:])
	switch {
	case err == nil:
		f.opaque = n == 1 && mark[0] == 'y'
	case !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.EOPNOTSUPP):
		return f, &os.PathError{Op: "getxattr", Path: root, Err: err}
	}
	for i, m := range mountPoints {
		var st unix.Stat_t
		err := unix.Lstat(filepath.Join(root, m.name), &st)
		switch {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			return f, &os.PathError{Op: "lstat", Path: filepath.Join(root, m.name), Err: err}
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			f.points[i] = pointDir
		case isWhiteout(&st):
			f.points[i] = pointGone
		default:
			f.points[i] = pointOther
		}
	}
	if dir, base := filepath.Split(lower); base == "root" { // not an upper
		info, err := s.layer(filepath.Base(dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return f, err
		}
		f.deletes = info.Deletes
	}
	s.facts.Store(lower, f)
	return f, nil
}

// underlay looks through the facts of a stack, topmost first. It returns how
// many layers count, from the top, and whether the skeleton must go beneath
// them. Class ErrInvalid (image_bad_path): a layer of an image has something
// else where a sandbox mounts. With a frozen upper, which ours says, that is
// no error: PID 1 replaces what a sandbox put there.
func underlay(facts []layerFacts, ours []bool) (count int, skeleton bool, err error) {
	count = len(facts)
	for i, f := range facts {
		if f.opaque {
			count = i + 1
			break
		}
	}
	for p, m := range mountPoints {
		state := pointAbsent
		for i := 0; i < count && state == pointAbsent; i++ {
			if state = facts[i].points[p]; state == pointAbsent || state == pointDir || ours[i] {
				continue
			}
			what := "it is no directory there"
			if state == pointGone {
				what = "it is deleted there"
			}
			return 0, false, sandbox.Errorf(sandbox.ErrInvalid, "image_bad_path", "the image has no directory /%s, where a sandbox mounts or writes (%s, in layer %d from the top): use an image that leaves it alone", m.name, what, i+1)
		}
		skeleton = skeleton || state == pointAbsent
	}
	return count, skeleton, nil
}

// planRoot plans the overlay of a sandbox's root. A layer that is not there
// is left for the mount to stumble over.
func (s *Store) planRoot(id sandbox.ID, layers []string) (overlayPlan, error) {
	p, err := planOverlay(id, layers)
	if err != nil {
		return p, err
	}
	facts := make([]layerFacts, len(p.lowers))
	ours := make([]bool, len(p.lowers))
	for i, l := range p.lowers {
		f, err := s.factsOf(l)
		if errors.Is(err, os.ErrNotExist) {
			return p, nil
		}
		if err != nil {
			return p, fmt.Errorf("rootfs: look at layer %s: %w", layers[len(layers)-1-i], err)
		}
		facts[i], ours[i] = f, isUpperLayer(layers[len(layers)-1-i])
	}
	n, skeleton, err := underlay(facts, ours)
	if err != nil {
		return p, err
	}
	if p.lowers, err = s.withMates(p.lowers[:n], facts[:n]); err != nil {
		return p, err
	}
	if skeleton {
		p.lowers = append(p.lowers, skeletonRoot)
	}
	if len(p.lowers) > MaxLayers {
		return p, sandbox.Errorf(sandbox.ErrInvalid, "image_layers", "an image of %d layers without the directories a sandbox mounts on: %d can be stacked", n, MaxLayers-1)
	}
	return p, nil
}

// planView plans a read-only view of a stack, without the skeleton. Directories
// given as above lie over the stack, topmost first.
func (s *Store) planView(stack []string, above ...string) (overlayPlan, error) {
	p := overlayPlan{lowers: slices.Clone(above)}
	if len(stack) > 0 {
		below, err := planLayers(stack)
		if err != nil {
			return p, err
		}
		p.lowers = append(p.lowers, below.lowers...)
	}
	facts := make([]layerFacts, len(above), len(p.lowers)) // none of uppers: they change, and no root of one is opaque
	for i, l := range p.lowers {
		if i < len(above) {
			continue
		}
		f, err := s.factsOf(l)
		if errors.Is(err, os.ErrNotExist) {
			return p, sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "%s is not there: import its image again: %w", l, err)
		}
		if err != nil {
			return p, fmt.Errorf("rootfs: look at %s: %w", l, err)
		}
		facts = append(facts, f)
		if f.opaque {
			p.lowers = p.lowers[:i+1]
			break
		}
	}
	var err error
	if p.lowers, err = s.withMates(p.lowers, facts); err != nil {
		return p, err
	}
	if len(p.lowers) < 2 {
		p.lowers = append(p.lowers, emptyLower)
	}
	if len(p.lowers) > MaxLayers {
		return p, sandbox.Errorf(sandbox.ErrInvalid, "image_layers", "%d layers: %d can be stacked", len(p.lowers), MaxLayers)
	}
	return p, nil
}

// mountView mounts a read-only view, with ids as they are on the volume.
func (s *Store) mountView(p overlayPlan) (*os.File, error) {
	root, err := s.mountOverlay(p, nil, 0, s.mode)
	if err != nil {
		return nil, fmt.Errorf("rootfs: mount a view of %d layers: %w", len(p.lowers), err)
	}
	return root, nil
}
