//go:build root

package rootfs

import (
	"path/filepath"
	"testing"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestBaseOutlastsPowerCut: an upper's base is on disk with it, also where
// nobody wrote to disk but the file system itself; it goes with the upper when that
// is frozen, and comes back with it.
func TestBaseOutlastsPowerCut(t *testing.T) {
	s, disk := openXFSOn(t, 320<<20)
	id, layer := create(t, s), NewUpperLayer()
	if got := s.UpperBase(id); got != FirstBase {
		t.Errorf("of a first upper: %q", got)
	}
	if err := s.FreezeUpper(id, layer); err != nil {
		t.Fatal(err)
	}
	if got := s.UpperBase(id); got != "" {
		t.Errorf("without an upper: %q", got)
	}
	if err := s.CreateUpperOn(id, sandbox.Limits{}, "second"); err != nil {
		t.Fatal(err)
	}
	if err := s.CreateUpperOn(id, sandbox.Limits{}, "third"); err != nil || s.UpperBase(id) != "second" {
		t.Errorf("of one that was there: %q, %v", s.UpperBase(id), err)
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	after := &Store{vol: &volume{dir: powerCut(t, disk)}}
	if got := after.UpperBase(id); got != "second" {
		t.Errorf("after a power cut: %q", got)
	}
	if !exists(filepath.Join(after.vol.dir, layersDir)) {
		t.Error("no layers: this shows nothing")
	}
	if err := s.ThawUpper(id, layer); err != nil || s.UpperBase(id) != FirstBase {
		t.Errorf("thawed: %q, %v", s.UpperBase(id), err)
	}
}
