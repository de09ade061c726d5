//go:build root

package rootfs

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// importUntilKilled is a daemon that imports an archive without an end.
// It is asked for by the archive's kind and the directory.
func importUntilKilled(arg string) int {
	kind, dir, _ := strings.Cut(arg, ":")
	s, err := Open(context.Background(), Config{Dir: dir, BestEffort: true})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		for i := 0; ; i++ {
			e := tarEntry{name: fmt.Sprintf("d%d/f%d", i%7, i), data: "content"}
			if kind == "layer" && i%2 == 1 {
				e = tarEntry{name: fmt.Sprintf("d%d/.wh.f%d", i%7, i)}
			}
			if err := tw.WriteHeader(e.header()); err != nil {
				return
			}
			if _, err := tw.Write([]byte(e.data)); err != nil {
				return
			}
		}
	}()
	if kind == "layer" {
		_, err = s.ImportLayer(context.Background(), digestN(1), r)
	} else {
		_, err = s.ImportTar(context.Background(), "endless", r)
	}
	fmt.Fprintln(os.Stderr, "the import ended:", err)
	return 1
}

// empty reports whether nothing is left but what was there from the start.
func trashEmpty(t testing.TB, s *Store) bool {
	t.Helper()
	for _, d := range []string{trashDir, stagingDir} {
		names, err := readNames(s.vol.path(d))
		if err != nil {
			t.Fatal(err)
		}
		if len(names) > 0 {
			return false
		}
	}
	return true
}

// TestKilledImport kills a daemon in the middle of an import, several times
// over, and starts another one.
func TestKilledImport(t *testing.T) {
	dir := openTest(t)
	if err := dir.Close(); err != nil {
		t.Fatal(err)
	}
	for round, kind := range []string{"tar", "layer", "tar", "layer"} {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), envKill+"="+kind+":"+dir.dir)
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		staged := func() int {
			found, err := filepath.Glob(filepath.Join(dir.dir, "volume", stagingDir, "import*", "root", "d*", "f*"))
			if err != nil {
				t.Fatal(err)
			}
			return len(found)
		}
		testenv.Eventually(t, 60*time.Second, "an import under way", func() bool { return staged() > 50*(round+1) })
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // killed
		s := openIn(t, Config{Dir: dir.dir, BestEffort: true})
		testenv.Eventually(t, 60*time.Second, "nothing left of the import", func() bool { return trashEmpty(t, s) })
		if layers, err := s.Layers(); err != nil || len(layers) != 0 {
			t.Errorf("half an archive became a layer: %v, %v", layers, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestImportErrors: whatever goes wrong, nothing is left; the same archive
// whole is taken, once, and again without a second copy.
func TestImportErrors(t *testing.T) {
	s := openTest(t)
	good := tarBytes(t, tarEntry{name: "d/f", data: strings.Repeat("x", 5000)})
	for name, r := range map[string]io.Reader{
		"cut":     strings.NewReader(string(good[:2000])),
		"hostile": tarOf(t, tarEntry{name: "a"}, tarEntry{name: "../x"}),
		"broken":  io.MultiReader(strings.NewReader(string(good[:1500])), readerFunc(func([]byte) (int, error) { return 0, errors.New("connection reset") })),
	} {
		if _, err := s.ImportTar(t.Context(), "x", r); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.ImportTar(ctx, "x", strings.NewReader(string(good))); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := s.ImportTar(t.Context(), "host", strings.NewReader(string(good))); sandbox.CodeOf(err) != "image_name_reserved" {
		t.Errorf("named host: %v", err)
	}
	testenv.Eventually(t, 30*time.Second, "nothing left", func() bool { return trashEmpty(t, s) })
	if layers, err := s.Layers(); err != nil || len(layers) != 0 {
		t.Fatalf("layers %v, %v", layers, err)
	}
	var imgs [2]sandbox.Image
	for i := range imgs {
		var err error
		if imgs[i], err = s.ImportTar(t.Context(), "x", strings.NewReader(string(good))); err != nil {
			t.Fatal(err)
		}
	}
	if imgs[0].Digest != imgs[1].Digest || imgs[1].SizeBytes != 5000 || imgs[0].Files != imgs[1].Files {
		t.Errorf("images %+v", imgs)
	}
	if layers, err := s.Layers(); err != nil || len(layers) != 1 || layers[0] != imgs[0].Layers[0] {
		t.Errorf("layers %v, %v", layers, err)
	}
	for range 2 {
		if err := s.RemoveLayer(imgs[0].Digest); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.RemoveLayer("../sandboxes"); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("removed a layer called ../sandboxes: %v", err)
	}
	testenv.Eventually(t, 30*time.Second, "layer deleted", func() bool { return trashEmpty(t, s) })
}

// TestDiscardCycles makes, fills, mounts and discards uppers, and looks for
// anything left: files, descriptors, mounts, project ids.
func TestDiscardCycles(t *testing.T) {
	testenv.Need(t, testenv.Root)
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "d/f", data: "x"})
	in := startInside(t, testBase)
	count := func(path string) int {
		t.Helper()
		names, err := readNames(path)
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	mounts := func() int {
		t.Helper()
		b, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "\n")
	}
	fds, mnts := count("/proc/self/fd"), mounts()
	for i := range testenv.Cycles(t, 300, 20000) {
		id := create(t, s)
		s.mode = modes(t, s)[i%len(modes(t, s))]
		root, err := s.Mount(t.Context(), MountSpec{ID: id, Image: img, UserNS: in.userns, UIDBase: in.base})
		if err != nil {
			t.Fatal(err)
		}
		if i%50 == 0 {
			if got := in.run(t, root, "write", "/d/new", "x"); got != "ok" {
				t.Fatal(got)
			}
		}
		if err := root.Close(); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := s.Discard(id, i); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := s.Discard(sandbox.NewID(), 0); err != nil {
		t.Errorf("discarding what never was: %v", err)
	}
	if ids, err := s.Uppers(); err != nil || len(ids) != 0 {
		t.Errorf("uppers left: %v, %v", ids, err)
	}
	testenv.Eventually(t, 120*time.Second, "trash emptied", func() bool { return trashEmpty(t, s) })
	if got := count("/proc/self/fd"); got > fds+2 {
		t.Errorf("%d descriptors, %d before", got, fds)
	}
	if got := mounts(); got != mnts {
		t.Errorf("%d mounts, %d before", got, mnts)
	}
	if got := count(s.scratch()); got != 0 {
		t.Errorf("%d directories left in %s", got, s.scratch())
	}
	if len(s.ids.used) != 0 {
		t.Errorf("%d project ids still in use", len(s.ids.used))
	}
}

// TestDirty: an upper that was not cleaned is told apart from a broken one.
func TestDirty(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "f"})
	in := startInside(t, testBase)
	id := create(t, s)
	spec := MountSpec{ID: id, Image: img, UserNS: in.userns, UIDBase: in.base}
	mountTest(t, s, in, id, img).Close()
	if _, err := s.Mount(t.Context(), spec); sandbox.CodeOf(err) != "upper_dirty" {
		t.Errorf("mounted without Clean: %v", err)
	}
	for range 2 {
		if err := s.Clean(id); err != nil {
			t.Fatal(err)
		}
	}
	mountTest(t, s, in, id, img).Close()
	gone := spec
	gone.ID = sandbox.NewID()
	if err := s.Clean(gone.ID); err != nil {
		t.Errorf("cleaning what never was: %v", err)
	}
	if _, err := s.Mount(t.Context(), gone); sandbox.CodeOf(err) != "no_upper" {
		t.Errorf("mounted without an upper: %v", err)
	}
	if err := s.Clean(id); err != nil {
		t.Fatal(err)
	}
	gone = spec
	gone.Image.Layers = []string{digestN(7)}
	if _, err := s.Mount(t.Context(), gone); sandbox.CodeOf(err) != "no_layer" {
		t.Errorf("mounted without a layer: %v", err)
	}
}

// TestCleanWritesToDisk: an overlay without sync leaves what it is given in
// memory; what a stopped sandbox holds must not depend on that.
func TestCleanWritesToDisk(t *testing.T) {
	s := openTest(t)
	img := importTest(t, s, tarEntry{name: "f"})
	in := startInside(t, testBase)
	id := create(t, s)
	root := mountTest(t, s, in, id, img)
	if got := in.run(t, root, "write", "/data", strings.Repeat("x", 16<<10)); got != "ok" {
		t.Fatal(got)
	}
	root.Close()
	name := s.vol.path(sandboxesDir, string(id), "upper", "data")
	if !delayed(t, name) {
		t.Fatal("the file is on disk already: this shows nothing")
	}
	if err := s.Clean(id); err != nil {
		t.Fatal(err)
	}
	if delayed(t, name) {
		t.Error("a cleaned upper has data in memory only")
	}
}

// TestCleanOutlastsPowerCut looks at an upper as a power cut right after Clean
// would leave it: in a copy of the block device, which has what was written to
// the disk and nothing that only the file system's memory knows. The control is
// the mark itself, which the device has before Clean.
func TestCleanOutlastsPowerCut(t *testing.T) {
	s, disk := openXFSOn(t, 320<<20)
	img := importTest(t, s, tarEntry{name: "f"})
	in := startInside(t, testBase)
	id := create(t, s)
	root := mountTest(t, s, in, id, img)
	if got := in.run(t, root, "write", "/data", "kept"); got != "ok" {
		t.Fatal(got)
	}
	root.Close()
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	mark := filepath.Join("sandboxes", string(id), "work", "work", "incompat", "volatile")
	if after := powerCut(t, disk); !exists(filepath.Join(after, mark)) {
		t.Fatal("the mark is not on disk before: this shows nothing")
	}
	if err := s.Clean(id); err != nil {
		t.Fatal(err)
	}
	after := powerCut(t, disk)
	if exists(filepath.Join(after, mark)) {
		t.Error("the mark is back after a power cut: the sandbox would not start")
	}
	if b, err := os.ReadFile(filepath.Join(after, "sandboxes", string(id), "upper", "data")); string(b) != "kept" {
		t.Errorf("the file holds %q, %v after a power cut", b, err)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// powerCut mounts a copy of a block device's content, and returns the path of
// the volume in it.
func powerCut(t *testing.T, disk string) string {
	t.Helper()
	at := t.TempDir()
	copied := fmt.Sprintf("%s.%d", disk, time.Now().UnixNano())
	for _, args := range [][]string{{"cp", "--sparse=always", disk, copied}, {"mount", "-o", "loop,nouuid", copied, at}} {
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(at, unix.MNT_DETACH), os.Remove(copied)); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	return filepath.Join(at, "state", "volume")
}

// delayed reports whether a file's data still waits for its place on disk
// (FS_IOC_FIEMAP in Documentation/filesystems/fiemap.rst).
func delayed(t *testing.T, name string) bool {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const fiemap, delalloc = 0xc020660b, 0x4
	var m struct {
		start, length                 uint64
		flags, mapped, count, reserve uint32
		extent                        [32]struct {
			logical, physical, length uint64
			_                         [2]uint64
			flags                     uint32
			_                         [3]uint32
		}
	}
	m.length, m.count = 1<<62, uint32(len(m.extent))
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fiemap, uintptr(unsafe.Pointer(&m))); errno != 0 {
		t.Fatalf("ask where %s lies: %v", name, errno)
	}
	if m.mapped == 0 {
		t.Fatalf("%s has no data", name)
	}
	for _, e := range m.extent[:min(m.mapped, m.count)] {
		if e.flags&delalloc != 0 {
			return true
		}
	}
	return false
}

// plantIn binds a directory over one of the host's, in the test's own mount
// namespace, and returns it.
func plantIn(t *testing.T, dir string) string {
	t.Helper()
	plant := t.TempDir()
	if err := os.Chmod(plant, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(plant, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return plant
}

// TestHostSecrets plants secrets on the host and searches a sandbox for them.
func TestHostSecrets(t *testing.T) {
	testenv.Need(t, testenv.Root)
	const mark = "planted-secret-7f3a"
	plant := func(dir, name string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(plantIn(t, dir), name)
		if err := os.WriteFile(path, []byte(mark), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plant("/etc/opt", "open", 0o644)
	plant("/etc/default", "key", 0o600)
	plant("/var/local", "open", 0o644)
	plant("/opt", "open", 0o644)
	plant("/root", "id_rsa", 0o600)
	plant("/usr/lib/systemd/system", "x.service", 0o644)
	plant("/usr/src", "open", 0o644)
	inUsr := plant("/usr/games", "key", 0o600)

	s := openTest(t)
	img, err := s.HostImage(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	in := startInside(t, testBase)
	in.keep(t, mountTest(t, s, in, create(t, s), img))
	for _, dir := range []string{"/etc", "/var", "/root", "/home", "/run", "/opt", "/srv", "/mnt", "/media", "/tmp", "/usr/games", "/usr/lib/systemd", "/usr/src", "/usr/local/etc"} {
		if got := in.kept(t, "grep", mark, dir); got != "" {
			t.Errorf("found in %s", got)
		}
	}
	if got := in.kept(t, "read", "/usr/games/key"); got != "errno EACCES" {
		t.Errorf("a file of mode 0600: %s", got)
	}
	// The controls: the same search finds what everybody on the host may
	// see, and what the sandbox has of its own.
	if err := os.Chmod(inUsr, 0o644); err != nil {
		t.Fatal(err)
	}
	if got := in.kept(t, "grep", mark, "/usr/games"); got != "/usr/games/key" {
		t.Errorf("an open file was not found: %q", got)
	}
	in.kept(t, "write", "/etc/own", mark)
	if got := in.kept(t, "grep", mark, "/etc"); got != "/etc/own" {
		t.Errorf("the search of /etc found %q", got)
	}
	for _, name := range []string{"/etc/shadow", "/etc/gshadow", "/etc/ssh", "/etc/ssl/private", "/etc/systemd", "/etc/cron.d", "/run/docker.sock", "/run/systemd", "/run/dbus", "/boot"} {
		if got := in.kept(t, "read", name); got != "errno ENOENT" {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got := in.kept(t, "read", "/etc/machine-id"); got != "" {
		t.Errorf("machine-id %q", got)
	}
	if got := in.kept(t, "write", "/usr/games/x", "x"); got != "errno EROFS" {
		t.Errorf("writing to /usr: %s", got)
	}
}

// TestHostImageFollows: an unchanged host gives the same image again, a
// changed one another, and a mask directory made later is masked.
func TestHostImageFollows(t *testing.T) {
	testenv.Need(t, testenv.Root)
	s := openTest(t)
	get := func() sandbox.Image {
		t.Helper()
		img, err := s.HostImage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return img
	}
	first := get()
	if again := get(); again.Digest != first.Digest || !again.CreatedAt.Equal(first.CreatedAt) {
		t.Errorf("the same host: %+v, then %+v", first, again)
	}
	before := len(s.host.masked)
	s.host.masked = s.host.masked[1:] // as if one of them had just been made
	usr, err := s.hostUsr()
	if err != nil {
		t.Fatal(err)
	}
	usr.Close()
	if len(s.host.masked) != before {
		t.Error("a new directory was not masked")
	}
	if names, err := readNames(s.scratch()); err != nil || len(names) != 1 {
		t.Errorf("views of /usr: %v, %v", names, err)
	}
	if err := os.WriteFile(filepath.Join(plantIn(t, "/etc/ld.so.conf.d"), "x.conf"), []byte("/opt/lib\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if changed := get(); changed.Digest == first.Digest {
		t.Error("a changed host has the same image")
	}
	if layers, err := s.Layers(); err != nil || len(layers) != 2 {
		t.Errorf("layers %v, %v: the old one must stay", layers, err)
	}
}

// fakeLayers makes n layers of one file each without importing them.
func fakeLayers(t testing.TB, s *Store, n int) sandbox.Image {
	t.Helper()
	img := sandbox.Image{Kind: sandbox.ImageTar, Layers: layersN(n)}
	for i := range n {
		dir := s.vol.path(layersDir, fmt.Sprintf("%064x", i), "root")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, f := range []string{fmt.Sprint(i), "top"} {
			if err := os.WriteFile(filepath.Join(dir, f), []byte(fmt.Sprint(i)), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, m := range mountPoints { // else the skeleton is one layer more
		if err := os.MkdirAll(s.vol.path(layersDir, fmt.Sprintf("%064x", 0), "root", m.name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return img
}

// TestManyLayers stacks as many layers as the kernel takes, in every way.
func TestManyLayers(t *testing.T) {
	s := openTest(t)
	img := fakeLayers(t, s, 500)
	in := startInside(t, testBase)
	for _, mode := range modes(t, s) {
		for _, n := range []int{1, 32, 200, 500} {
			s.mode = mode
			img := img
			img.Layers = img.Layers[:n]
			root := mountTest(t, s, in, create(t, s), img)
			if got := in.run(t, root, "read", "/top"); got != fmt.Sprint(n-1) {
				t.Errorf("%v, %d layers: the top one is %q", mode, n, got)
			}
			root.Close()
		}
	}
}
