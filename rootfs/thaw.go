package rootfs

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// UpperPrefix begins the names of layers that were uppers.
const UpperPrefix = upperPrefix

// NewLayer returns a fresh name for a layer made of an upper.
func (s *Store) NewLayer() string { return NewUpperLayer() }

// ThawUpper takes a FreezeUpper back: the layer is the sandbox's upper again,
// in place of one that was made since. Nothing may stand on the layer. Where
// FreezeUpper had not come to its rename, nothing happens: repeating is safe.
func (s *Store) ThawUpper(id sandbox.ID, layer string) error {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return err
	}
	from, err := s.upperLayerDir(layer)
	if err != nil {
		return err
	}
	if !s.HasLayer(layer) {
		return nil
	}
	if err := s.Discard(id, -1); err != nil {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, s.vol.path(from), unix.AT_FDCWD, dir, unix.RENAME_NOREPLACE)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("rootfs: make layer %s the upper of %s again: %w", layer, id, err)
	}
	return nil
}
