package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// hostImage is the name of the image made of this host's own /usr.
const hostImage = "host"

// HostImage generates the layer that goes around the host's /usr and returns
// the image. Repeating it is cheap and follows changes of the host; a layer
// that changed has another digest, and the old one stays for those who use it.
// Class ErrUnsupported: the host's /bin is not part of its /usr.
func (s *Store) HostImage(ctx context.Context) (sandbox.Image, error) {
	plan, err := planHost("/")
	if err != nil {
		return sandbox.Image{}, err
	}
	var archive bytes.Buffer
	if err := plan.writeTar(&archive); err != nil {
		return sandbox.Image{}, fmt.Errorf("rootfs: generate the host layer: %w", err)
	}
	info, err := s.importTree(ctx, &archive)
	if err != nil {
		return sandbox.Image{}, fmt.Errorf("rootfs: generate the host layer: %w", err)
	}
	// Fail here rather than in the first sandbox.
	usr, err := s.hostUsr()
	if err != nil {
		return sandbox.Image{}, err
	}
	if err := usr.Close(); err != nil {
		return sandbox.Image{}, err
	}
	return sandbox.Image{
		Name: hostImage, Digest: hostImage + "-" + strings.TrimPrefix(info.Digest, digestPrefix),
		Kind: sandbox.ImageHost, Layers: []string{info.Digest},
		SizeBytes: info.Size, Files: info.Files, CreatedAt: info.Created,
		Config: sandbox.ImageConfig{
			Env: []string{"PATH=" + hostPath, "LANG=C.UTF-8"},
			Cmd: []string{"/bin/bash"},
		},
	}, nil
}

const hostPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// hostPlan is the generated layer, entry by entry, in order.
type hostPlan struct {
	root    string // the host's root; another one in tests
	entries []hostEntry
	taken   map[string]bool
}

type hostEntry struct {
	hdr  tar.Header
	data []byte
}

// Bounds of what is copied from the host's /etc.
const (
	maxHostFile  = 4 << 20
	maxHostFiles = 20000
)

// generatedTime stamps what has no time of its own, so that the same input
// gives the same digest.
var generatedTime = time.Unix(1577836800, 0)

// planHost lists the layer. Nothing of the host's /etc is taken but what
// copied and copiedTrees name, and of that only what the host shows everybody.
func planHost(root string) (*hostPlan, error) {
	p := &hostPlan{root: root, taken: map[string]bool{}}
	p.dir(".", 0o755, 0)
	if err := p.usrLinks(); err != nil {
		return nil, err
	}
	for _, d := range hostDirs {
		p.dir(d.name, d.mode, d.id)
	}
	for _, f := range hostFiles {
		p.file(f.name, f.mode, f.id, []byte(f.data), generatedTime)
	}
	for _, name := range copied {
		if err := p.copy(name); err != nil {
			return nil, err
		}
	}
	for _, pattern := range copiedTrees {
		dirs, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, err
		}
		for _, d := range dirs {
			rel, err := filepath.Rel(root, d)
			if err != nil {
				return nil, err
			}
			if err := p.copyTree(rel, 0); err != nil {
				return nil, err
			}
		}
	}
	return p, nil
}

// usrLinks repeats the links that a merged /usr leaves in the root.
func (p *hostPlan) usrLinks() error {
	p.dir("usr", 0o755, 0)
	for _, name := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		st, err := os.Lstat(filepath.Join(p.root, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("rootfs: host /%s: %w", name, err)
		}
		if st.Mode()&os.ModeSymlink == 0 {
			return sandbox.Errorf(sandbox.ErrUnsupported, "host_not_merged", "the host image needs a merged /usr, but /%s is no link into it: use an imported image", name)
		}
		target, err := os.Readlink(filepath.Join(p.root, name))
		if err != nil {
			return fmt.Errorf("rootfs: host /%s: %w", name, err)
		}
		if !strings.HasPrefix(strings.TrimPrefix(target, "/"), "usr/") {
			return sandbox.Errorf(sandbox.ErrUnsupported, "host_not_merged", "the host image needs a merged /usr, but /%s leads to %s: use an imported image", name, target)
		}
		p.link(name, target, generatedTime)
	}
	return nil
}

func (p *hostPlan) add(e hostEntry) {
	if name := path.Clean(e.hdr.Name); !p.taken[name] {
		p.taken[name] = true
		p.entries = append(p.entries, e)
	}
}

func (p *hostPlan) dir(name string, mode int64, id int) {
	p.add(hostEntry{hdr: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode, Uid: id, Gid: id, ModTime: generatedTime}})
}

func (p *hostPlan) file(name string, mode int64, id int, data []byte, mtime time.Time) {
	p.add(hostEntry{hdr: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Uid: id, Gid: id, Size: int64(len(data)), ModTime: mtime}, data: data})
}

func (p *hostPlan) link(name, target string, mtime time.Time) {
	p.add(hostEntry{hdr: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777, ModTime: mtime}})
}

// copy takes one file or link over; one that the host lacks, or does not
// show everybody, is left out.
func (p *hostPlan) copy(rel string) error {
	full := filepath.Join(p.root, rel)
	st, err := os.Lstat(full)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("rootfs: host /%s: %w", rel, err)
	}
	if len(p.entries) > maxHostFiles {
		return sandbox.Errorf(sandbox.ErrTooLarge, "host_too_large", "the host image would copy over %d files of /etc (at /%s)", maxHostFiles, rel)
	}
	if st.Mode()&os.ModeSymlink != 0 {
		target, err := os.Readlink(full)
		if err != nil {
			return fmt.Errorf("rootfs: host /%s: %w", rel, err)
		}
		p.link(rel, target, st.ModTime().Truncate(time.Second))
		return nil
	}
	data, ok, err := readPublic(full)
	if err != nil {
		return fmt.Errorf("rootfs: host /%s: %w", rel, err)
	}
	if ok {
		p.file(rel, 0o644|int64(st.Mode().Perm()&0o111), 0, data, st.ModTime().Truncate(time.Second))
	}
	return nil
}

// readPublic reads a regular file that everybody on the host may read; it
// looks at the file it has open, not at the name.
func readPublic(name string) (_ []byte, ok bool, err error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Mode().Perm()&0o004 == 0 || st.Size() > maxHostFile {
		return nil, false, err
	}
	b, err := io.ReadAll(io.LimitReader(f, maxHostFile+1))
	return b, err == nil && len(b) <= maxHostFile, err
}

// copyTree takes a directory over with what copy would take in it.
func (p *hostPlan) copyTree(rel string, depth int) error {
	full := filepath.Join(p.root, rel)
	st, err := os.Lstat(full)
	if err != nil || depth > 16 {
		return err
	}
	if !st.IsDir() {
		return p.copy(rel)
	}
	if st.Mode().Perm()&0o005 != 0o005 {
		return nil // the host does not show it to everybody
	}
	p.dir(rel, 0o755, 0)
	names, err := readNames(full)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if err := p.copyTree(filepath.Join(rel, n), depth+1); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (p *hostPlan) writeTar(w io.Writer) error {
	tw := tar.NewWriter(w)
	for _, e := range p.entries {
		e.hdr.Format = tar.FormatPAX
		if err := tw.WriteHeader(&e.hdr); err != nil {
			return err
		}
		if _, err := tw.Write(e.data); err != nil {
			return err
		}
	}
	return tw.Close()
}
