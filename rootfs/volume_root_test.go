//go:build root

package rootfs

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/linux"
	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

const testVolume = 400 << 20

// openImage opens a Store on a loop image, with quotas.
func openImage(t *testing.T) (*Store, string) {
	t.Helper()
	testenv.Need(t, testenv.Quota)
	dir := t.TempDir()
	return openIn(t, Config{Dir: dir, VolumeBytes: testVolume}), dir
}

// TestQuotaHolds writes beyond the limits through an overlay, in every way of
// mounting; the control is the same write under a higher limit.
func TestQuotaHolds(t *testing.T) {
	s, dir := openImage(t)
	for _, e := range s.Enforcement(sandbox.Limits{DiskBytes: 8 << 20}) {
		if !e.Enforced || e.Why != "" {
			t.Errorf("enforcement %+v", e)
		}
	}
	if st := statOf(t, filepath.Join(dir, "volume.img")); st.Blocks*512 < testVolume {
		t.Errorf("the image has %d bytes allocated of %d", st.Blocks*512, testVolume)
	}
	img := importTest(t, s, tarEntry{name: "low", data: strings.Repeat("x", 1<<20)})
	for _, mode := range modes(t, s) {
		t.Run(mode.String(), func(t *testing.T) {
			s.mode = mode
			quotaHolds(t, s, img)
		})
	}
}

func quotaHolds(t *testing.T, s *Store, img sandbox.Image) {
	in := startInside(t, testBase)
	id := sandbox.NewID()
	small := sandbox.Limits{DiskBytes: 8 << 20, DiskInodes: 100}
	for range 2 { // repeating it changes nothing
		if err := s.CreateUpper(id, 3, small); err != nil {
			t.Fatal(err)
		}
	}
	root := mountTest(t, s, in, id, img)
	in.keep(t, root)
	run := func(check string, args ...string) (n int64, result string) {
		t.Helper()
		if _, err := fmt.Sscan(in.kept(t, check, args...), &n, &result); err != nil {
			t.Fatal(err)
		}
		return n, result
	}
	const want = 16 << 20
	n, result := run("fill", "/big", fmt.Sprint(want))
	if result == "ok" || n > 8<<20 || n < 4<<20 {
		t.Errorf("under 8 MiB, %d bytes were written, then %s", n, result)
	}
	bytes, inodes, known, err := s.Usage(id, 3)
	if err != nil || !known || bytes < uint64(n) || bytes > 9<<20 || inodes < 3 {
		t.Errorf("usage %d bytes, %d inodes, %v, %v after %d bytes", bytes, inodes, known, err, n)
	}
	if err := s.SetLimits(id, 3, sandbox.Limits{DiskBytes: 64 << 20, DiskInodes: 100}); err != nil {
		t.Fatal(err)
	}
	if n, result := run("fill", "/big", fmt.Sprint(want)); n != want || result != "ok" {
		t.Errorf("under 64 MiB: %d bytes, then %s", n, result)
	}
	n, result = run("files", "/many", "150")
	if result == "ok" || n > 100 || n < 50 {
		t.Errorf("under 100 inodes, %d files were made, then %s", n, result)
	}
	if err := s.SetLimits(id, 3, sandbox.Limits{}); err != nil {
		t.Fatal(err)
	}
	if n, result := run("files", "/more", "150"); n != 150 || result != "ok" {
		t.Errorf("without limits: %d files, then %s", n, result)
	}
	project, err := projectOf(s.vol.path(sandboxesDir, string(id)))
	if err != nil || project < firstProject {
		t.Fatalf("project %#x, %v", project, err)
	}
	in.stop()
	root.Close() // the last that holds the upper
	if err := s.Discard(id, 3); err != nil {
		t.Fatal(err)
	}
	// The same slot at once, while the trash may be full of the former
	// owner's files: nothing of them counts.
	next := sandbox.NewID()
	if err := s.CreateUpper(next, 3, small); err != nil {
		t.Fatal(err)
	}
	if bytes, inodes, known, err := s.Usage(next, 3); err != nil || !known || bytes > 64<<10 || inodes != 3 {
		t.Errorf("a fresh upper holds %d bytes, %d inodes, %v, %v", bytes, inodes, known, err)
	}
	if err := s.Discard(next, 3); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 60*time.Second, "quota record cleared", func() bool {
		b, i, err := linux.ProjectLimits(s.vol.root, project)
		if err != nil {
			t.Fatal(err)
		}
		ub, ui, err := linux.ProjectUsage(s.vol.root, project)
		if err != nil {
			t.Fatal(err)
		}
		return b|i|ub|ui == 0
	})
}

// TestQuotaExt4 uses a state directory whose own filesystem has quotas: no
// image is made, and they hold just the same.
func TestQuotaExt4(t *testing.T) {
	testenv.Need(t, testenv.Quota)
	img := filepath.Join(t.TempDir(), "ext4.img")
	dir := t.TempDir()
	script := `truncate -s 300M "$0"; mkfs.ext4 -q -O project,quota -E lazy_itable_init=1 "$0"; mount -o loop,prjquota "$0" "$1"`
	if out, err := exec.Command("sh", "-euc", script, img, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if err := linux.DetachTree(dir); err != nil {
			t.Error(err)
		}
	})
	s := openIn(t, Config{Dir: dir, VolumeBytes: testVolume})
	if _, err := os.Stat(filepath.Join(dir, "volume.img")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an image was made: %v", err)
	}
	quotaHolds(t, s, importTest(t, s, tarEntry{name: "low", data: "x"}))
}

// TestFullRemount: a sandbox that has used up its limits can still be
// stopped and started again, and then make room.
func TestFullRemount(t *testing.T) {
	s, _ := openImage(t)
	img := importTest(t, s, tarEntry{name: "low", data: "x"})
	in := startInside(t, testBase)
	id := sandbox.NewID()
	if err := s.CreateUpper(id, 0, sandbox.Limits{DiskBytes: 4 << 20, DiskInodes: 100}); err != nil {
		t.Fatal(err)
	}
	step := func(check string, args ...string) string {
		t.Helper()
		root := mountTest(t, s, in, id, img)
		out := in.run(t, root, check, args...)
		root.Close()
		if err := s.Clean(id); err != nil {
			t.Fatal(err)
		}
		return out
	}
	if got := step("files", "/d", "200"); strings.HasSuffix(got, "ok") {
		t.Fatalf("the inode limit did not hold: %s", got)
	}
	if got := step("fill", "/d/0", "8000000"); strings.HasSuffix(got, "ok") {
		t.Fatalf("the byte limit did not hold: %s", got)
	}
	if got := step("read", "/low"); got != "x" {
		t.Errorf("/low is %q", got)
	}
	if got := step("remove", "/d"); got != "ok" {
		t.Errorf("remove: %s", got)
	}
	if got := step("write", "/new", "x"); got != "ok" {
		t.Errorf("write: %s", got)
	}
}

// TestVolumeAgain: a daemon dies while a sandbox holds its root; the next one
// finds the same filesystem, with everything in it, and both work on.
func TestVolumeAgain(t *testing.T) {
	s, dir := openImage(t)
	img := importTest(t, s, tarEntry{name: "low", data: "low"})
	in := startInside(t, testBase)
	id := sandbox.NewID()
	if err := s.CreateUpper(id, 0, sandbox.Limits{DiskBytes: 8 << 20}); err != nil {
		t.Fatal(err)
	}
	in.keep(t, mountTest(t, s, in, id, img))
	write := func(name, text string) {
		t.Helper()
		if got := in.kept(t, "write", name, text); got != "ok" {
			t.Fatalf("write: %s", got)
		}
	}
	write("/before", "1")
	project, err := projectOf(s.vol.path(sandboxesDir, string(id)))
	if err != nil {
		t.Fatal(err)
	}
	dev := statOf(t, s.vol.dir).Dev
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "volume", layersDir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the volume is still there after Close: %v", err)
	}
	write("/between", "2")
	s = openIn(t, Config{Dir: dir})
	if got := statOf(t, s.vol.dir).Dev; got != dev {
		t.Errorf("another filesystem: %#x, was %#x", got, dev)
	}
	write("/after", "3")
	for _, f := range []string{"before", "between", "after"} {
		if _, err := os.Stat(s.vol.path(sandboxesDir, string(id), "upper", f)); err != nil {
			t.Error(err)
		}
	}
	if layers, err := s.Layers(); err != nil || len(layers) != 1 || layers[0] != img.Layers[0] {
		t.Errorf("layers %v, %v", layers, err)
	}
	if ids, err := s.Uppers(); err != nil || len(ids) != 1 || ids[0] != id {
		t.Errorf("uppers %v, %v", ids, err)
	}
	if other, err := s.ids.take(); err != nil || other == project {
		t.Errorf("project %#x of a living sandbox was handed out again (%v)", other, err)
	}
}

// TestNoQuota: where quotas are impossible, the default is to refuse.
func TestNoQuota(t *testing.T) {
	testenv.Need(t, testenv.Root, testenv.Userns, testenv.Overlay)
	if testenv.Quota.Missing() == nil {
		t.Skip("this host has quotas: TestQuotaHolds runs instead")
	}
	dir := t.TempDir()
	_, err := Open(t.Context(), Config{Dir: dir, VolumeBytes: testVolume})
	if !errors.Is(err, sandbox.ErrUnsupported) || sandbox.CodeOf(err) != "no_project_quota" {
		t.Fatalf("opened without quotas: %v", err)
	}
	t.Log(err)
	s := openIn(t, Config{Dir: dir, VolumeBytes: testVolume, BestEffort: true})
	for _, e := range s.Enforcement(sandbox.Limits{DiskBytes: 1 << 20, DiskInodes: 100}) {
		if e.Enforced || e.Why == "" || e.Asked == "none" {
			t.Errorf("enforcement %+v", e)
		}
	}
	if names, err := readNames(dir); err != nil || len(names) != 3 {
		t.Errorf("left behind: %v, %v", names, err) // rootfs.lock, mnt, volume
	}
	id := create(t, s)
	if _, _, known, err := s.Usage(id, 0); known || err != nil {
		t.Errorf("usage known %v, %v", known, err)
	}
	if err := s.SetLimits(id, 0, sandbox.Limits{DiskBytes: 1 << 20}); err != nil {
		t.Error(err)
	}
}

// TestOneStore: a second daemon on the same directory is refused, and let in
// once the first has gone.
func TestOneStore(t *testing.T) {
	s := openTest(t)
	if _, err := Open(t.Context(), s.cfg); sandbox.CodeOf(err) != "state_dir_in_use" {
		t.Fatalf("two stores at once: %v", err)
	}
	// The refused one took nothing away from the first.
	if _, err := os.MkdirTemp(s.scratch(), "x"); err != nil {
		t.Error(err)
	}
	if m, err := linux.IsMountRoot(s.scratch()); err != nil || !m {
		t.Errorf("the scratch mount is gone (%v)", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	openIn(t, s.cfg)
}
