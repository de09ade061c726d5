//go:build root

package faults

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/integration/harness"
	"github.com/sandboxd/sandboxd/sandbox"
)

// house is a daemon with things to lose: a running and a stopped sandbox, a
// snapshot, and what the daemon keeps of them.
type house struct {
	*harness.Daemon
	run, stopped sandbox.Sandbox
	early        string // a copy of the database, of the run before
	present      string // another, of this run, before the last things were made
	tree         []string
}

// The files of a database, and the volume's mark.
var (
	databaseFiles = []string{"sandboxd.db", "sandboxd.db-wal", "sandboxd.db-shm"}
	keptFiles     = append(slices.Clone(databaseFiles), "volume/installation")
)

func (h *house) path(name string) string { return filepath.Join(h.Dir, "state", name) }

// save copies files of the state directory to a fresh one; load puts them back.
func (h *house) save(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, n := range names {
		if b, err := os.ReadFile(h.path(n)); err == nil {
			need(t, os.WriteFile(filepath.Join(dir, filepath.Base(n)), b, 0o600))
		}
	}
	return dir
}

func (h *house) load(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, n := range names {
		need(t, os.RemoveAll(h.path(n)))
		if b, err := os.ReadFile(filepath.Join(dir, filepath.Base(n))); err == nil {
			need(t, os.WriteFile(h.path(n), b, 0o600))
		}
	}
}

func need(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// precious lists what must not go: the files of both sandboxes, and all layers.
func (h *house) precious(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, dir := range []string{"sandboxes/" + string(h.run.ID), "sandboxes/" + string(h.stopped.ID), "layers"} {
		root := h.path("volume/" + dir)
		need(t, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err == nil && !strings.Contains(path, "/work") {
				out = append(out, strings.TrimPrefix(path, h.Dir))
			}
			return err
		}))
	}
	return out
}

func newHouse(t *testing.T) *house {
	h := &house{Daemon: harness.Install(t, "")}
	if _, err := os.Stat(h.path("volume.img")); err == nil {
		t.Skip("the volume is an image here, mounted where only the daemon sees it")
	}
	h.Shut()
	h.early = h.save(t, databaseFiles...)
	h.Up()
	h.run = h.New(t, sandbox.Spec{Name: "runs"})
	h.Sh(t, "runs", "echo one > /root/one")
	h.present = h.save(t, databaseFiles...)
	h.stopped = h.New(t, sandbox.Spec{Name: "stopped"})
	h.Sh(t, "stopped", "echo two > /root/two")
	_, err := h.Snapshot(t.Context(), "stopped", sandbox.SnapshotRequest{Name: "kept"})
	need(t, err)
	h.Sh(t, "stopped", "echo three > /root/three")
	_, err = h.Stop(t.Context(), "stopped")
	need(t, err)
	<-time.After(300 * time.Millisecond) // the volume hears of it, without an answer
	h.tree = h.precious(t)
	return h
}

// way is one way to damage or lose what a daemon knows.
type way struct {
	name   string
	clean  bool // after an orderly end, not a crash
	damage func(t *testing.T, h *house)
	want   string // quarantine, refused, fine, or any of them
}

func (h *house) change(t *testing.T, name string, f func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(h.path(name))
	need(t, err)
	need(t, os.WriteFile(h.path(name), f(usedPages(b)), 0o600))
}

// usedPages leaves out what a database file has beyond its pages, the room it
// grows into: to damage that damages nothing (sqlite.org/fileformat.html, 1.3).
func usedPages(b []byte) []byte {
	if !bytes.HasPrefix(b, []byte("SQLite format 3\x00")) {
		return b
	}
	size := int(binary.BigEndian.Uint16(b[16:])) * int(binary.BigEndian.Uint32(b[28:]))
	return b[:min(size, len(b))]
}

func scribble(from, to float64) func([]byte) []byte {
	return func(b []byte) []byte {
		for i := int(from * float64(len(b))); i < int(to*float64(len(b))); i++ {
			b[i] = byte(i*31 + 7)
		}
		return b
	}
}

func cut(part float64) func([]byte) []byte {
	return func(b []byte) []byte { return b[:int(part*float64(len(b)))] }
}

func ways(other string) []way {
	gone := func(names ...string) func(*testing.T, *house) {
		return func(t *testing.T, h *house) {
			for _, n := range names {
				need(t, os.RemoveAll(h.path(n)))
			}
		}
	}
	changed := func(name string, f func([]byte) []byte) func(*testing.T, *house) {
		return func(t *testing.T, h *house) { h.change(t, name, f) }
	}
	both := func(fs ...func(*testing.T, *house)) func(*testing.T, *house) {
		return func(t *testing.T, h *house) {
			for _, f := range fs {
				f(t, h)
			}
		}
	}
	db, wal, shm, mark := "sandboxd.db", "sandboxd.db-wal", "sandboxd.db-shm", "volume/installation"
	empty := func([]byte) []byte { return nil }
	of := func(other string) func([]byte) []byte {
		return func([]byte) []byte { return []byte(other) }
	}
	loaded := func(dir func(*house) string) func(*testing.T, *house) {
		return func(t *testing.T, h *house) { h.load(t, dir(h), databaseFiles...) }
	}
	early := loaded(func(h *house) string { return h.early })
	present := loaded(func(h *house) string { return h.present })
	foreign := loaded(func(*house) string { return other })
	return []way{
		{"missing", false, gone(databaseFiles...), "quarantine"},
		{"older of this run", false, present, "quarantine"},
		{"log missing", false, gone(wal), "quarantine"},
		{"page scribbled", true, changed(db, scribble(.3, .6)), "refused"},
		{"another installation's", false, foreign, "quarantine"},
		{"truncated", true, changed(db, cut(.5)), "refused"},
		{"mark missing", false, gone(mark), "quarantine"},
		{"log torn", false, changed(wal, cut(.4)), "quarantine"},
		// From here on at full length alone.
		{"missing after an orderly end", true, gone(databaseFiles...), "quarantine"},
		{"missing, its log left", false, gone(db), "quarantine"},
		{"missing, its log and index left", false, gone(db), "quarantine"},
		{"empty", false, both(changed(db, empty), gone(wal, shm)), "quarantine"},
		{"empty, its log left", false, changed(db, empty), "quarantine"},
		{"empty after an orderly end", true, changed(db, empty), "quarantine"},
		{"log empty", false, changed(wal, empty), "quarantine"},
		{"log scribbled from its start", false, changed(wal, scribble(0, 1)), "quarantine"},
		{"log scribbled in its middle", false, changed(wal, scribble(.3, .4)), "quarantine"},
		{"log of another installation", false, both(gone(shm), func(t *testing.T, h *house) {
			b, err := os.ReadFile(filepath.Join(other, wal))
			need(t, err)
			need(t, os.WriteFile(h.path(wal), b, 0o600))
		}), "any"},
		{"index missing", false, gone(shm), "fine"},
		{"index scribbled", false, changed(shm, scribble(0, 1)), "fine"},
		{"older of the run before", false, early, "quarantine"},
		{"older of the run before, after an orderly end", true, early, "quarantine"},
		{"older of this run, after an orderly end", true, present, "quarantine"},
		{"another installation's, after an orderly end", true, foreign, "quarantine"},
		{"cut to a page", true, changed(db, func(b []byte) []byte { return b[:4096] }), "refused"},
		{"cut by a page", true, changed(db, func(b []byte) []byte { return b[:len(b)-4096] }), "any"},
		{"header scribbled", true, changed(db, func(b []byte) []byte { return append(bytes.Repeat([]byte{7}, 100), b[100:]...) }), "refused"},
		{"first page zero", true, changed(db, func(b []byte) []byte { return append(make([]byte, 4096), b[4096:]...) }), "any"},
		{"end scribbled", true, changed(db, scribble(.9, 1)), "any"},
		{"text", true, changed(db, of("this is no database at all, and never was\n")), "refused"},
		{"a directory", true, both(gone(db), func(t *testing.T, h *house) { need(t, os.Mkdir(h.path(db), 0o700)) }), "refused"},
		{"a link to nowhere", true, both(gone(db), func(t *testing.T, h *house) { need(t, os.Symlink(h.path("elsewhere.db"), h.path(db))) }), "refused"},
		{"read-only", true, func(t *testing.T, h *house) {
			setImmutable(t, h.path(db), true)
		}, "refused"},
		{"mark scribbled", false, changed(mark, scribble(0, 1)), "quarantine"},
		{"mark empty", false, changed(mark, empty), "quarantine"},
		{"mark of another installation", false, changed(mark, of(`{"id":"someoneelse","generation":3}`)), "quarantine"},
		{"volume of long ago", true, changed(mark, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"generation":`), []byte(`"generation":-`), 1)
		}), "quarantine"},
		{"mark and database missing", false, gone(db, wal, shm, mark), "quarantine"},
		{"mark and log missing", false, gone(wal, mark), "quarantine"},
		{"cgroup of another installation", false, func(t *testing.T, h *house) {
			need(t, unix.Setxattr(harness.CgroupRoot()+h.Parent, "trusted.sandboxd.installation", []byte("someoneelse"), 0))
		}, "quarantine"},
	}
}

// setImmutable makes a file one that not even root can change; where the
// filesystem knows no such thing, the test says so and goes on.
func setImmutable(t *testing.T, path string, on bool) {
	t.Helper()
	f, err := os.Open(path)
	need(t, err)
	defer f.Close()
	const immutable = 0x10 // FS_IMMUTABLE_FL
	flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil {
		if flags &^= immutable; on {
			flags |= immutable
		}
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags))
	}
	if err != nil && on {
		t.Skipf("no immutable files here: %v", err)
	}
}

// TestDamagedDatabase: whatever becomes of the database, no start deletes a
// file of a sandbox, a snapshot or a layer, or ends a sandbox; each says what it
// found and what to do, and with the right files back all is as it was.
func TestDamagedDatabase(t *testing.T) {
	all := ways(otherDatabase(t))
	all = all[:harness.Soak(8, len(all))]
	h := newHouse(t)
	for _, w := range all {
		t.Run(w.name, func(t *testing.T) { h.suffer(t, w) })
	}
}

func (h *house) suffer(t *testing.T, w way) {
	pid := h.Sh(t, "runs", "readlink /proc/self/ns/pid")
	h.Sh(t, "runs", "true > /root/one.touched") // something the log alone knows
	<-time.After(150 * time.Millisecond)
	if w.clean {
		h.Shut()
	} else {
		h.Crash()
	}
	mark := harness.CgroupRoot() + h.Parent
	whole := h.save(t, keptFiles...)
	whose := make([]byte, 100)
	n, _ := unix.Getxattr(mark, "trusted.sandboxd.installation", whose)
	said := len(h.Log.String())
	w.damage(t, h)
	err := h.TryUp()
	log := h.Log.String()[said:]
	got := "fine"
	switch {
	case err != nil:
		got = "refused"
	case strings.Contains(log, "QUARANTINE"):
		got = "quarantine"
	}
	if w.want != "any" && got != w.want {
		t.Errorf("the start was %s, want %s:\n%s", got, w.want, harness.Quiet(harness.LastLines(log, 20)))
	}
	t.Logf("%s: %s", got, why(log))
	if got != "fine" && !strings.Contains(log, "sandboxd recover") && !strings.Contains(log, "sandboxd restore") && !strings.Contains(log, h.path("sandboxd.db")) {
		t.Errorf("the start does not say what to do:\n%s", harness.Quiet(harness.LastLines(log, 20)))
	}
	if got == "quarantine" {
		if _, err := h.Create(t.Context(), sandbox.Spec{}, ""); sandbox.CodeOf(err) != "quarantine" {
			t.Errorf("create in quarantine: %v, want code quarantine", err)
		}
	}
	<-time.After(400 * time.Millisecond) // the trash would be emptied
	h.Crash()
	if now := h.precious(t); missing(h.tree, now) != "" {
		t.Fatalf("deleted: %s\nthe daemon said:\n%s", missing(h.tree, now), harness.Quiet(harness.LastLines(log, 30)))
	}
	// With the right files back.
	if w.name == "read-only" {
		setImmutable(t, h.path("sandboxd.db"), false)
	}
	h.load(t, whole, keptFiles...)
	if n > 0 {
		need(t, unix.Setxattr(mark, "trusted.sandboxd.installation", whose[:n], 0))
	}
	said = len(h.Log.String())
	h.Up()
	if log := h.Log.String()[said:]; strings.Contains(log, "QUARANTINE") {
		t.Fatalf("quarantine with the right files back:\n%s", log)
	}
	if now := h.Sh(t, "runs", "readlink /proc/self/ns/pid; cat /root/one"); now != pid+"\none" {
		t.Fatalf("the running sandbox is another now: %q, was %q", now, pid)
	}
	if sb, err := h.Sandbox(t.Context(), "stopped"); err != nil || sb.Status != sandbox.StatusStopped {
		t.Fatalf("the stopped sandbox: %v, %v", sb.Status, err)
	}
}

func why(log string) string {
	for line := range strings.Lines(log) {
		if strings.Contains(line, "QUARANTINE") || strings.HasPrefix(line, "sandboxd: ") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

func missing(want, have []string) string {
	there := map[string]bool{}
	for _, p := range have {
		there[p] = true
	}
	gone := slices.DeleteFunc(slices.Clone(want), func(p string) bool { return there[p] })
	if len(gone) == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d: %s", len(gone), len(want), strings.Join(gone[:min(5, len(gone))], " "))
}

// otherDatabase is one of an installation that was here before.
func otherDatabase(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	need(t, os.Chmod(dir, 0o711))
	t.Run("another installation", func(t *testing.T) {
		o := &house{Daemon: harness.Install(t, "")}
		o.Crash()
		for _, n := range databaseFiles {
			if b, err := os.ReadFile(o.path(n)); err == nil {
				need(t, os.WriteFile(filepath.Join(dir, n), b, 0o600))
			}
		}
	})
	return dir
}
