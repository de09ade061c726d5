package rootfs

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Mark is what a volume says of where it belongs; see ADR 17.
type Mark struct {
	ID         string `json:"id"`
	Generation int64  `json:"generation"`
	// Nonce is the generation's own: two that were begun apart from each other
	// have the same number. Next is the one about to be written to the database.
	Nonce string `json:"nonce,omitempty"`
	Next  string `json:"next,omitempty"`
	// LastEvent is the number of an event that the database had. It counts
	// while Boot goes on, and after a Clean end: a power cut takes the newest.
	LastEvent int64  `json:"last_event"`
	Boot      string `json:"boot"`
	Clean     bool   `json:"clean,omitempty"`
	// Place is where the volume was when the mark was written.
	Place Place `json:"place,omitzero"`
}

// Place is a machine, by its system and its hardware, and an object of a file
// system on it. These are hashes: they can be compared, and no more. An empty one
// is not known.
type Place struct {
	System   string `json:"system,omitempty"`
	Hardware string `json:"hardware,omitempty"`
	Object   string `json:"object,omitempty"`
}

// Place is where the volume is now: on which machine, and which directory or
// image it is. That stays the same when the machine or the file system is
// started again, grows or is mounted elsewhere, and when the directory is
// renamed; a copy is another one.
func (s *Store) Place() Place {
	var p Place
	at := filepath.Join(s.dir, "volume.img")
	if !s.vol.mounted {
		at = s.vol.dir
	}
	if h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, at, 0); err == nil {
		p.Object = placeHash(h.Bytes())
	}
	for file, to := range map[string]*string{"/etc/machine-id": &p.System, "/sys/class/dmi/id/product_uuid": &p.Hardware} {
		if b, err := os.ReadFile(file); err == nil && len(bytes.TrimSpace(b)) > 0 {
			*to = placeHash(b)
		}
	}
	return p
}

func placeHash(b []byte) string {
	h := sha256.Sum256(append([]byte("sandboxd place\n"), b...))
	return hex.EncodeToString(h[:8])
}

// MarkFile is where a volume has its mark.
const MarkFile = "installation"

const (
	// markBytes are written at once, in their place: that takes no room on a
	// full disk, and a power cut leaves the old ones or the new.
	markBytes = 512
)

// Mark reads the volume's mark; a zero one where it has none.
func (s *Store) Mark() (Mark, error) { return s.vol.mark() }

// ReadMark reads the mark of the volume beneath a state directory that no Store
// has, changes nothing there, and names this start of the machine.
func ReadMark(dir string) (m Mark, boot string, err error) {
	if boot, err = bootID(); err != nil {
		return m, boot, err
	}
	v := &volume{dir: filepath.Join(dir, "volume")}
	if image := filepath.Join(dir, "volume.img"); unix.Access(image, unix.F_OK) == nil {
		if v, err = v.mountImage(image); err != nil {
			return m, boot, err
		}
		defer func() { err = errors.Join(err, v.close()) }()
	}
	m, err = v.mark()
	return m, boot, err
}

func (v *volume) mark() (m Mark, err error) {
	b, err := os.ReadFile(v.path(MarkFile))
	if errors.Is(err, os.ErrNotExist) {
		return m, nil
	}
	if err == nil {
		err = json.Unmarshal(bytes.TrimSpace(b), &m)
	}
	if err != nil {
		return m, fmt.Errorf("rootfs: read the mark of the volume %s: %w", v.path(MarkFile), err)
	}
	return m, nil
}

// PutMark writes the volume's mark; durable: so that it survives a power cut.
func (s *Store) PutMark(m Mark, durable bool) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	b = append(b, bytes.Repeat([]byte(" "), max(0, markBytes-1-len(b)))...)
	f, err := os.OpenFile(s.vol.path(MarkFile), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return spaceError("write the mark of the volume", err)
	}
	_, err = f.WriteAt(append(b, '\n'), 0)
	if err == nil && durable {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil && durable {
		err = syncDir(s.vol.dir)
	}
	if err != nil {
		return spaceError("write the mark of the volume", err)
	}
	return nil
}

// Boot is this start of the machine, as marks name it.
func (s *Store) Boot() string { return s.boot }

// Empty reports whether the volume holds nothing that anybody could miss.
func (s *Store) Empty() (bool, error) {
	for _, dir := range []string{sandboxesDir, layersDir, volumesDir} {
		names, err := readNames(s.vol.path(dir))
		if err != nil {
			return false, fmt.Errorf("rootfs: look into the volume: %w", err)
		}
		if len(names) > 0 {
			return false, nil
		}
	}
	return true, nil
}

// Hold keeps the volume as it is: from now on nothing of sandboxes, layers and
// volumes is removed, whoever asks. What should have been is where it was.
func (s *Store) Hold() { s.trash.held.Store(true) }

// kept tells of what Hold keeps.
func (t *trash) kept(rel string) bool {
	if !t.held.Load() {
		return false
	}
	for _, dir := range []string{sandboxesDir, layersDir, volumesDir} {
		if strings.HasPrefix(rel, dir+"/") {
			return unix.Access(t.vol.path(rel), unix.F_OK) == nil
		}
	}
	return false
}
