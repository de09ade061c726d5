package rootfs

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// LayerInfo is what is known of a layer. It is kept in layer.json, beside the
// layer's root.
type LayerInfo struct {
	Digest  string    `json:"digest"`
	Size    int64     `json:"size_bytes"` // of the regular files
	Files   int64     `json:"files"`
	Created time.Time `json:"created_at"`

	// Directories in which the layer deletes something; see withMates.
	Deletes []string `json:"deletes_in,omitempty"`
}

// A layer's name says what it is, and where below layersDir it lies.
const (
	digestPrefix = "sha256:" // an imported one: 64 hexadecimal digits, its directory
	upperPrefix  = "upper:"  // a frozen upper: 26 characters of a-z and 2-7
	upperDirs    = "upper-"  // goes before those 26 as its directory
	upperRandom  = 26
)

// NewUpperLayer returns a fresh name for a layer made of an upper.
func NewUpperLayer() string {
	// 26 base32 characters, upper case; 130 random bits.
	return upperPrefix + strings.ToLower(rand.Text()[:upperRandom])
}

// parseLayer returns the name of a layer's directory.
func parseLayer(name string) (dir string, err error) {
	if u, ok := strings.CutPrefix(name, upperPrefix); ok {
		strange := func(c rune) bool { return (c < 'a' || c > 'z') && (c < '2' || c > '7') }
		if len(u) != upperRandom || strings.ContainsFunc(u, strange) {
			return "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_layer", "%.80q is no layer: want upper: and %d characters of a-z and 2-7", name, upperRandom)
		}
		return upperDirs + u, nil
	}
	h, ok := strings.CutPrefix(name, digestPrefix)
	if b, err := hex.DecodeString(h); !ok || err != nil || len(b) != sha256.Size || h != strings.ToLower(h) {
		return "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_digest", "%.80q is no layer digest: want sha256: and 64 hexadecimal digits", name)
	}
	return h, nil
}

// layerName is parseLayer backwards; false for a directory that is no layer.
func layerName(dir string) (string, bool) {
	name := digestPrefix + dir
	if u, ok := strings.CutPrefix(dir, upperDirs); ok {
		name = upperPrefix + u
	}
	_, err := parseLayer(name)
	return name, err == nil
}

func isUpperLayer(name string) bool { return strings.HasPrefix(name, upperPrefix) }

// layerTree returns where the files of a layer lie, beneath the volume.
func layerTree(name string) (string, error) {
	dir, err := parseLayer(name)
	if err != nil {
		return "", err
	}
	if isUpperLayer(name) {
		return filepath.Join(layersDir, dir, "upper"), nil
	}
	return filepath.Join(layersDir, dir, "root"), nil
}

// Layers lists the layers on the volume, of both forms.
func (s *Store) Layers() ([]string, error) {
	names, err := readNames(s.vol.path(layersDir))
	if err != nil {
		return nil, fmt.Errorf("rootfs: list layers: %w", err)
	}
	out := make([]string, 0, len(names))
	for _, n := range names {
		if name, ok := layerName(n); ok {
			out = append(out, name)
		}
	}
	return out, nil
}

// HasLayer reports whether a layer is there, with its files.
func (s *Store) HasLayer(layer string) bool {
	tree, err := layerTree(layer)
	if err != nil {
		return false
	}
	st, err := os.Lstat(s.vol.path(tree))
	return err == nil && st.IsDir()
}

// RemoveLayer puts a layer into the trash; one that is not there is no
// error. The caller knows that no image, no snapshot and no sandbox stacks
// it. Running sandboxes would keep it open, but lose its files as the trash
// is emptied. What a frozen upper counts against goes with it.
func (s *Store) RemoveLayer(layer string) error {
	dir, err := parseLayer(layer)
	if err != nil {
		return err
	}
	if tree, err := layerTree(layer); err == nil {
		s.facts.Delete(tree)
	}
	return s.trash.add(filepath.Join(layersDir, dir))
}

// Layer returns the record of a layer. Of a frozen upper that says little: see
// LayerUsage. Class ErrNotFound: it is not there.
func (s *Store) Layer(name string) (LayerInfo, error) {
	dir, err := parseLayer(name)
	if err != nil {
		return LayerInfo{}, err
	}
	if !s.HasLayer(name) {
		return LayerInfo{}, sandbox.Errorf(sandbox.ErrNotFound, "no_layer", "layer %s is not there: import its image again", name)
	}
	if isUpperLayer(name) {
		return LayerInfo{Digest: name}, nil
	}
	info, err := s.layer(dir)
	if err != nil {
		return info, fmt.Errorf("rootfs: read the record of layer %s: %w", name, err)
	}
	return info, nil
}

// layer reads the record of a layer.
func (s *Store) layer(hexDigest string) (LayerInfo, error) {
	var info LayerInfo
	b, err := os.ReadFile(s.vol.path(layersDir, hexDigest, "layer.json"))
	if err == nil {
		err = json.Unmarshal(b, &info)
	}
	return info, err
}

// commit turns a staged directory, with the layer's tree in root, into the
// layer. If that layer is there already, the staged copy is thrown away. The
// rename is the last step and comes after everything is on disk, so a layer
// that exists is whole.
func (s *Store) commit(stage string, info LayerInfo) (LayerInfo, error) {
	h, err := parseLayer(info.Digest)
	if err != nil {
		return info, err
	}
	b, err := json.Marshal(info)
	if err == nil {
		err = os.WriteFile(s.vol.path(stage, "layer.json"), b, 0o600)
	}
	if err == nil {
		err = s.vol.sync()
	}
	if err != nil {
		return info, spaceError("write layer "+info.Digest, err)
	}
	to := s.vol.path(layersDir, h)
	err = unix.Renameat2(unix.AT_FDCWD, s.vol.path(stage), unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EEXIST) {
		if err := s.trash.add(stage); err != nil {
			return info, err
		}
		return s.layer(h)
	}
	if err == nil {
		err = syncDir(s.vol.path(layersDir))
	}
	if err != nil {
		return info, fmt.Errorf("rootfs: keep layer %s: %w", info.Digest, err)
	}
	return info, nil
}
