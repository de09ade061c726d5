package rootfs

import (
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

// layerInfo is what layer.json keeps beside a layer's root.
type layerInfo struct {
	Digest  string    `json:"digest"`
	Size    int64     `json:"size_bytes"` // of the regular files
	Files   int64     `json:"files"`
	Created time.Time `json:"created_at"`
}

const digestPrefix = "sha256:"

// parseDigest returns the hexadecimal part, which names the layer on disk.
func parseDigest(d string) (string, error) {
	h, ok := strings.CutPrefix(d, digestPrefix)
	if b, err := hex.DecodeString(h); !ok || err != nil || len(b) != sha256.Size || h != strings.ToLower(h) {
		return "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_digest", "%.80q is no layer digest: want sha256: and 64 hexadecimal digits", d)
	}
	return h, nil
}

// Layers lists the digests of the layers on the volume.
func (s *Store) Layers() ([]string, error) {
	names, err := readNames(s.vol.path(layersDir))
	if err != nil {
		return nil, fmt.Errorf("rootfs: list layers: %w", err)
	}
	out := make([]string, 0, len(names))
	for _, n := range names {
		if _, err := parseDigest(digestPrefix + n); err == nil {
			out = append(out, digestPrefix+n)
		}
	}
	return out, nil
}

// RemoveLayer puts a layer into the trash; one that is not there is no
// error. The caller knows that no image and no sandbox stacks it. Running
// sandboxes would keep it open, but lose its files as the trash is emptied.
func (s *Store) RemoveLayer(digest string) error {
	h, err := parseDigest(digest)
	if err != nil {
		return err
	}
	return s.trash.add(filepath.Join(layersDir, h))
}

// layer reads the record of a layer.
func (s *Store) layer(hexDigest string) (layerInfo, error) {
	var info layerInfo
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
func (s *Store) commit(stage string, info layerInfo) (layerInfo, error) {
	h, err := parseDigest(info.Digest)
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
