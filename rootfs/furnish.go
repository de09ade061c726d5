package rootfs

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Identity is what the files of /etc say that every root gets.
type Identity struct {
	Hostname   string // of /etc/hostname, without the end of line
	Hosts      string // /etc/hosts
	ResolvConf string // /etc/resolv.conf
}

// Files returns the contents by name in /etc.
func (i Identity) Files() map[string]string {
	return map[string]string{"hostname": i.Hostname + "\n", "hosts": i.Hosts, "resolv.conf": i.ResolvConf}
}

// Furnish puts into a fresh upper, one CreateUpper just made and nobody has
// mounted yet, what PID 1 would else have to make through the overlay, at
// several times the price. had is what an earlier Furnish of the same upper
// was given, the zero value for none: files that say so already stay.
//
// It reports false, and takes back what lies in /etc, where the image has no
// /etc to which these files can simply be added: a directory of root's that
// everybody may read. PID 1 must then write them.
func (s *Store) Furnish(id sandbox.ID, image sandbox.Image, had, want Identity) (bool, error) {
	dir, err := s.sandboxDir(id)
	if err != nil {
		return false, err
	}
	upper := filepath.Join(dir, "upper")
	etc := filepath.Join(upper, "etc")
	if len(image.Layers) > 0 { // else a guess: the image is not known yet
		plain, err := s.plainEtc(id, image)
		if err != nil {
			return false, err
		}
		if !plain {
			return false, os.RemoveAll(etc)
		}
	}
	before := map[string]string{}
	if had != (Identity{}) {
		before = had.Files()
	} else if err := makeDir(etc); err != nil {
		return false, spaceError("furnish "+string(id), err)
	}
	for name, content := range want.Files() {
		if old, ok := before[name]; ok && old == content {
			continue
		}
		if err := writeFresh(filepath.Join(etc, name), content); err != nil {
			return false, spaceError("furnish "+string(id), err)
		}
	}
	return true, nil
}

func makeDir(path string) error {
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return os.Chmod(path, 0o755) // whatever the umask took
}

// writeFresh writes a file of a directory only we have written to.
func writeFresh(path, content string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	err = unix.Fchmod(fd, 0o644)
	if err == nil {
		_, err = unix.Write(fd, []byte(content))
	}
	return errors.Join(err, unix.Close(fd))
}

// plainEtc reports whether the topmost layer that has an /etc has it as a
// directory of mode 0755 that belongs to root, without attributes: one an upper
// may have too without changing it.
func (s *Store) plainEtc(id sandbox.ID, image sandbox.Image) (bool, error) {
	plan, err := s.planRoot(id, image.Layers)
	if err != nil {
		return false, err
	}
	for _, lower := range plan.lowers {
		var st unix.Stat_t
		err := unix.Lstat(s.vol.path(lower, "etc"), &st)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return false, &os.PathError{Op: "lstat", Path: lower, Err: err}
		}
		return plainDir(s.vol.path(lower, "etc"), isOverlayMark)
	}
	return true, nil // nobody has one: it is the upper's alone
}
