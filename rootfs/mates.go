package rootfs

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/linux"
)

// An overlay looks for whiteouts only where it joins directories. One that a
// single layer has it shows as it is, with the names of the whiteouts in it,
// though there is nothing behind them. An image may delete in such a directory,
// if only by mistake. So a layer that deletes has a mate: the directories in
// which it does, empty. Stacked beneath it, it makes the overlay join them.
const mateDir = "mate"

// maxMated is how many stacks are remembered by withMates.
const maxMated = 1024

// withMates puts the mates of those layers that need them into a stack, topmost
// first. Most images need none, which is found out once for each stack: layers
// do not change.
func (s *Store) withMates(lowers []string, facts []layerFacts) ([]string, error) {
	if !slices.ContainsFunc(facts, func(f layerFacts) bool { return len(f.deletes) > 0 }) {
		return lowers, nil
	}
	key := strings.Join(lowers, "\n")
	s.mu.Lock()
	mated, ok := s.mated[key]
	s.mu.Unlock()
	if ok {
		return slices.Clone(mated), nil
	}
	for i, l := range lowers {
		mated = append(mated, l)
		if alone, err := s.deletesAlone(facts[i].deletes, lowers[i+1:]); err != nil {
			return nil, err
		} else if alone {
			mated = append(mated, filepath.Join(filepath.Dir(l), mateDir))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mated == nil || len(s.mated) >= maxMated {
		s.mated = map[string][]string{}
	}
	s.mated[key] = mated
	return slices.Clone(mated), nil
}

// deletesAlone reports whether some of these directories are in no layer below.
func (s *Store) deletesAlone(dirs, below []string) (bool, error) {
	var roots []*os.File
	defer func() {
		for _, r := range roots {
			_ = r.Close() // read only
		}
	}()
	for _, l := range below {
		if len(dirs) == 0 {
			break
		}
		r, err := os.Open(s.vol.path(l))
		if err != nil {
			return false, err
		}
		roots = append(roots, r)
	}
	for _, d := range dirs {
		there, err := joined(roots, d)
		if err != nil || !there {
			return !there, err
		}
	}
	return false, nil
}

// joined reports whether a directory that lies over these layers is joined
// with one of theirs.
func joined(roots []*os.File, path string) (bool, error) {
	for _, r := range roots {
		there, hides, err := lookDown(int(r.Fd()), path)
		if err != nil || there || hides {
			return there, err
		}
	}
	return false, nil
}

// lookDown looks for a directory in a layer. If it is not there, hides tells
// whether the layer keeps those below from being looked at.
func lookDown(root int, path string) (there, hides bool, err error) {
	for end := 0; end < len(path); {
		if next := strings.IndexByte(path[end+1:], '/'); next >= 0 {
			end += 1 + next
		} else {
			end = len(path)
		}
		fd, err := linux.OpenBeneath(root, path[:end], openDirFlags, 0, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS)
		switch {
		case errors.Is(err, unix.ENOENT):
			return false, hides, nil
		case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
			return false, true, nil
		case err != nil:
			return false, false, &os.PathError{Op: "open", Path: path[:end], Err: err}
		}
		mark, err := getXattr(fd, overlayOpaque)
		_ = unix.Close(fd) // read only
		if err != nil {
			return false, false, err
		}
		hides = hides || mark != nil
	}
	return true, hides, nil
}
