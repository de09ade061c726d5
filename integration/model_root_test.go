//go:build root

package integration

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/sandbox"
)

// workTree is the part of a sandbox's files that the model has copies of.
const workTree = "/work"

// model is what sandboxes and snapshots should be: plain directories, and who
// comes from whom.
type model struct {
	t     *testing.T
	d     *daemon
	r     *treeWriter
	dir   string
	probe string
	made  int // names given so far

	lively bool // something runs in the sandboxes most of the time

	boxes []*modelBox
	snaps []*modelSnap // removed ones too
	past  []string     // what was done
	done  map[string]int
}

// modelSnap is a snapshot, or, with no id, the image.
type modelSnap struct {
	id     sandbox.SnapshotID
	kind   sandbox.SnapshotKind
	of     *modelBox
	parent *modelSnap
	dir    string
	files  listing
	gone   bool
}

type modelBox struct {
	name  string
	dir   string
	files listing
	base  *modelSnap // what it began with
	point *modelSnap // what it was last frozen as or put back on
	busy  sandbox.ProcessID

	live []string // layers of the last snapshot taken while something ran
}

// TestModel does random things to sandboxes and snapshots and, after each,
// compares all files with copies of directories to which the same was done.
// SANDBOXD_SEED repeats a run, on machines with the same fs.protected_regular.
func TestModel(t *testing.T) { testModel(t, false) }

// TestModelLive does that where something runs in the sandboxes, on a volume
// that shares blocks: most snapshots have what changed since the one before.
func TestModelLive(t *testing.T) {
	onXFS(t)
	testModel(t, true)
}

func testModel(t *testing.T, lively bool) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("SANDBOXD_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("SANDBOXD_SEED=%d", seed)
	m := newModel(t, seed)
	m.lively = lively
	steps := soak(40, 1500)
	began := time.Now()
	for i := range steps {
		if i == steps/3 || i > 0 && i%400 == 0 {
			m.manySnapshots()
		}
		m.step()
		if i%50 == 49 {
			m.checkAll()
		}
		if t.Failed() {
			m.tell()
			t.FailNow()
		}
	}
	if b := m.boxes[0]; lively && m.done["snapshot of changes"] == 0 { // few steps may have had none
		if b.busy == "" {
			m.background(b)
		}
		for range 2 {
			m.write(b)
			m.snapshot(b)
		}
	}
	m.checkSnapshots()
	if n := m.done["left to copy"]; n > steps/100 {
		t.Errorf("%d renames of directories were left to programs that copy: only those of very long paths may be", n)
	}
	if lively && m.done["snapshot of changes"] == 0 {
		t.Error("no snapshot was one of what changed")
	}
	t.Logf("%d steps in %v: %v", steps, time.Since(began).Round(time.Millisecond), m.done)
	m.removeEverything()
	if t.Failed() {
		m.tell()
	}
}

func newModel(t *testing.T, seed uint64) *model {
	m := &model{
		t: t, d: install(t, "default_limits: {pids: 64}\n"), probe: probeBinary(t), done: map[string]int{},
		r: &treeWriter{Rand: rand.New(rand.NewPCG(seed, 0)), now: 1_500_000_000_000_000_000},
	}
	m.dir = filepath.Join(m.d.Dir, "model")
	first := &modelSnap{dir: filepath.Join(m.dir, "image")}
	if err := os.MkdirAll(first.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	first.files = m.outside(first.dir)
	m.r.plain = true
	for range 60 {
		m.change(first.dir, &first.files)
	}
	m.r.plain = false
	m.odd(first.dir)
	first.files = m.outside(first.dir)
	// The archive's top is called as the tree is inside.
	work := filepath.Join(m.dir, filepath.Base(workTree))
	copyModel(t, first.dir, work)
	if _, err := m.d.ImportImage(t.Context(), "model", bytes.NewReader(modelImage(t, m.probe, work))); err != nil {
		t.Fatal(err)
	}
	m.snaps = append(m.snaps, first)
	m.d.create(t, sandbox.Spec{Name: "first", Image: "model"})
	b := m.begin("first", first)
	m.check(b)
	m.writeOdd(b)
	if t.Failed() {
		t.FailNow()
	}
	return m
}

// stickyName is one of two names of a file of somebody, in a directory of
// somebody else in which all may make files and take none away.
const stickyName = "sticky/f"

// odd adds to a directory what writeOdd changes.
func (m *model) odd(dir string) {
	m.t.Helper()
	name := filepath.Join(dir, stickyName)
	top := filepath.Dir(name)
	for i, err := range []error{
		os.Mkdir(top, 0o755), os.Chown(top, 1, 1), os.Chmod(top, 0o777|os.ModeSticky),
		os.WriteFile(name, []byte("text"), 0o644), os.Chown(name, 1000, 1000), os.Link(name, filepath.Join(dir, "other name")),
		os.MkdirAll(filepath.Join(dir, "into", "gone"), 0o755), os.Mkdir(filepath.Join(dir, "moves"), 0o755),
	} {
		if err != nil {
			m.t.Fatalf("step %d of what is odd: %v", i, err)
		}
	}
}

// writeOdd does what is odd in some kernels. It opens a file as if to make it,
// which fs.protected_regular refuses even root: where it does, the file must
// stay what it was. It moves a directory to where an overlay has a whiteout.
func (m *model) writeOdd(b *modelBox) {
	m.t.Helper()
	for _, c := range []treeChange{
		{Do: "write", Path: []byte(stickyName), Size: 9, Mode: 0o644},
		{Do: "rmdir", Path: []byte("into/gone")},
		{Do: "rename", Path: []byte("moves"), To: []byte("into/gone")},
	} {
		m.r.now += 1_000_000_007
		c.Time = m.r.now
		m.writeThis(b, c)
	}
}

// tell shows how it came to this.
func (m *model) tell() {
	m.t.Logf("the last steps:\n%s", strings.Join(m.past[max(0, len(m.past)-40):], "\n"))
}

func (m *model) note(format string, args ...any) {
	m.past = append(m.past, fmt.Sprintf("%d: ", len(m.past))+fmt.Sprintf(format, args...))
}

func (m *model) fresh(kind string) string { m.made++; return fmt.Sprintf("%s%d", kind, m.made) }

// begin adds a sandbox that shows the files of a snapshot.
func (m *model) begin(name string, base *modelSnap) *modelBox {
	b := &modelBox{name: name, base: base, dir: filepath.Join(m.dir, m.fresh("box"))}
	m.boxes = append(m.boxes, b)
	m.put(b, base)
	return b
}

// put gives a sandbox of the model the files of a snapshot.
func (m *model) put(b *modelBox, s *modelSnap) {
	if err := os.RemoveAll(b.dir); err != nil {
		m.t.Fatal(err)
	}
	copyModel(m.t, s.dir, b.dir)
	lower(m.t, b.dir)
	b.files, b.point, b.busy = s.files, s, ""
}

// outside runs the probe on a directory of the model.
func (m *model) outside(dir string) listing {
	m.t.Helper()
	text := m.probeOutside("tree", dir)
	return parseListing(m.t, text)
}

func (m *model) probeOutside(args ...string) string {
	m.t.Helper()
	var stderr strings.Builder
	cmd := exec.Command(m.probe, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		m.t.Fatalf("probe %q: %v: %s", args, err, stderr.String())
	}
	return string(out)
}

func (m *model) probeInside(b *modelBox, args ...string) string {
	m.t.Helper()
	r, err := m.d.try(m.t.Context(), b.name, sandbox.ProcessSpec{Argv: append([]string{"/probe"}, args...), OutputBytes: 1 << 20})
	if err != nil || r.exit.Code != 0 || r.dropped != 0 {
		m.tell()
		m.t.Fatalf("probe %q in %s: %v, %+v, %d bytes dropped: %s", args, b.name, err, r.exit, r.dropped, r.stderr)
	}
	return r.stdout
}

// change changes a directory of the model and returns what was done and what
// came of it.
func (m *model) change(dir string, l *listing) (treeChange, string) {
	m.t.Helper()
	c := m.r.next(*l)
	return c, m.apply(dir, l, c)
}

func (m *model) apply(dir string, l *listing, c treeChange) string {
	m.t.Helper()
	if p := c.parts(*l); p != nil && !c.refused(dir) {
		part(m.t, filepath.Join(dir, string(p)), m.dir)
	}
	outcome, text, _ := strings.Cut(m.probeOutside("tree", dir, c.String()), "\n")
	*l = parseListing(m.t, text)
	return outcome
}

// write does one change to the files of a sandbox and of its model.
func (m *model) write(b *modelBox) {
	m.t.Helper()
	m.writeThis(b, m.r.next(b.files))
}

func (m *model) writeThis(b *modelBox, c treeChange) {
	m.t.Helper()
	outcome, text, _ := strings.Cut(m.probeInside(b, "tree", workTree, c.String()), "\n")
	if outcome == "EXDEV" && c.movesDir(b.files) {
		m.note("%s: %s: left to programs that copy", b.name, c.brief())
		m.done["left to copy"]++
		c.Do = "touch"
		outcome, text, _ = strings.Cut(m.probeInside(b, "tree", workTree, c.String()), "\n")
	}
	want := m.apply(b.dir, &b.files, c)
	m.note("%s: %s: %s", b.name, c.brief(), want)
	m.done[c.Do]++
	if notEmpty(outcome) != notEmpty(want) {
		m.t.Errorf("%s in %s: %s, in the model %s", c.brief(), b.name, outcome, want)
	}
	m.same(b, text)
}

// notEmpty makes one of two ways to refuse a rename: rename(2) leaves the
// choice to the filesystem, and the model may lie on another.
func notEmpty(outcome string) string {
	if outcome == "EEXIST" {
		return "ENOTEMPTY"
	}
	return outcome
}

func (m *model) same(b *modelBox, text string) {
	m.t.Helper()
	if text != b.files.text {
		m.t.Errorf("the files of %s (- is the model):\n%s", b.name, lineDiff(b.files.text, text))
	}
}

// check compares a running sandbox with its model.
func (m *model) check(b *modelBox) {
	m.t.Helper()
	m.same(b, m.probeInside(b, "tree", workTree))
}

func (m *model) checkAll() {
	m.t.Helper()
	for _, b := range m.boxes {
		m.check(b)
		m.compare(b)
	}
	m.d.agree(m.t)
}

// compare wants the daemon's comparison of two states to tell how their
// models differ.
func (m *model) compare(b *modelBox) {
	m.t.Helper()
	from, to := "", b.name
	a, z := b.base.files, b.files
	if s := pick(m.r.Rand, m.snaps); !s.gone && s.id != "" {
		from, a = string(s.id), s.files
		if s := pick(m.r.Rand, m.snaps); m.r.IntN(3) == 0 && !s.gone && s.id != "" {
			to, z = string(s.id), s.files
		}
	}
	want := differing(workTree, a, z)
	got, more, err := m.d.Diff(m.t.Context(), from, to, 10000)
	if err != nil || more {
		m.t.Errorf("compare %q with %s: %v, more %v", from, to, err, more)
		return
	}
	m.done["diff"]++
	var lines [2]strings.Builder
	for i, all := range [][]sandbox.FileChange{want, got} {
		for _, c := range all {
			fmt.Fprintf(&lines[i], "%+v\n", c)
		}
	}
	if lines[0].String() != lines[1].String() {
		m.t.Errorf("%q compared with %s (- is the model):\n%s", from, to, lineDiff(lines[0].String(), lines[1].String()))
	}
}

// step does one thing.
func (m *model) step() {
	m.t.Helper()
	b := pick(m.r.Rand, m.boxes)
	if m.lively && b.busy == "" && m.r.IntN(2) == 0 {
		m.background(b)
	}
	switch roll := m.r.IntN(100); {
	case roll < 58:
		m.write(b)
		return
	case roll < 64:
		m.writeAPI(b)
		return
	case roll < 67:
		m.compare(b)
		return
	case roll < 70:
		m.background(b)
	case roll < 72:
		m.restart()
	case roll < 74:
		m.removeSnapshot()
		return
	case roll < 76:
		b = m.fork(b, nil)
	case roll < 78:
		b = m.fork(b, pick(m.r.Rand, m.snaps))
	case roll < 79 && len(m.boxes) > 1:
		m.remove(b)
		return
	case roll < 82:
		m.paused(b)
	case roll < 84:
		m.stopped(b)
	default:
		m.onRoot(b)
	}
	m.check(b)
}

// onRoot does one thing that changes what a sandbox's files stand on.
func (m *model) onRoot(b *modelBox) {
	m.t.Helper()
	switch roll := m.r.IntN(10); {
	case roll < 5:
		m.snapshot(b)
	case roll < 7:
		m.rollback(b)
	case roll < 9:
		m.undo(b)
	default:
		m.note("reset %s", b.name)
		m.done["reset"]++
		if _, err := m.d.Reset(m.t.Context(), b.name); err != nil {
			m.t.Errorf("reset %s: %v", b.name, err)
		}
		m.put(b, b.base)
	}
}

func (m *model) snapshot(b *modelBox) {
	m.t.Helper()
	name := m.fresh("snap")
	s, err := m.d.Snapshot(m.t.Context(), b.name, sandbox.SnapshotRequest{Name: name})
	if err != nil {
		m.t.Errorf("snapshot %s: %v", b.name, err)
		return
	}
	m.note("snapshot %s: %s, live %v, %d layers", b.name, s.ID, s.Live, len(s.Layers))
	m.took(b, s)
	if b.busy != "" && !s.Live {
		sb, err := m.d.Sandbox(m.t.Context(), b.name)
		if err != nil || sb.Status != sandbox.StatusStopped {
			m.t.Errorf("snapshot %s was not taken live, although %s runs in it: %v", s.ID, b.busy, err)
		}
	}
}

// took writes down a snapshot that was taken of a sandbox.
func (m *model) took(b *modelBox, s sandbox.Snapshot) *modelSnap {
	snap := &modelSnap{id: s.ID, kind: s.Kind, of: b, parent: b.point, dir: filepath.Join(m.dir, m.fresh("snap")), files: b.files}
	copyModel(m.t, b.dir, snap.dir)
	if s.Parent != b.point.id {
		m.t.Errorf("snapshot %s of %s has parent %q, want %q", s.ID, b.name, s.Parent, b.point.id)
	}
	m.snaps = append(m.snaps, snap)
	b.point = snap
	if s.Live {
		m.done["snapshot live"]++
		if slices.Equal(b.live, s.Layers[:len(s.Layers)-1]) {
			m.done["snapshot of changes"]++
		}
		b.live = s.Layers
		return snap
	}
	m.done["snapshot"]++
	lower(m.t, b.dir) // the sandbox goes on above it
	return snap
}

// forget removes a snapshot of the model. What came after it now comes after
// what was before it; but what was made of it has no more before it.
func (m *model) forget(s *modelSnap) {
	s.gone = true
	for _, after := range m.snaps {
		if after.parent == s && after.of.base != s {
			after.parent = s.parent
		}
	}
	for _, b := range m.boxes {
		if b.point == s && b.base != s {
			b.point = s.parent
		}
	}
}

// back returns the snapshots that undo can go back to, nearest first.
func (m *model) back(b *modelBox) (history []*modelSnap) {
	for s := b.point; s.id != "" && s != b.base && !s.gone; s = s.parent {
		history = append(history, s)
	}
	return history
}

func (m *model) undo(b *modelBox) {
	m.t.Helper()
	history := m.back(b)
	since := b.base
	if len(history) > 0 {
		since = history[0]
	}
	changed := len(differing(workTree, since.files, b.files)) > 0
	h, err := m.d.History(m.t.Context(), b.name)
	if err != nil {
		m.t.Errorf("history of %s: %v", b.name, err)
	}
	var ids []sandbox.SnapshotID
	for _, s := range history {
		ids = append(ids, s.id)
	}
	if h.Changed != changed || !slices.EqualFunc(h.Points, history, func(a sandbox.Snapshot, b *modelSnap) bool { return a.ID == b.id }) {
		m.t.Errorf("history of %s: %+v, want %v, changed %v", b.name, h, ids, changed)
		return
	}
	back := history
	if !changed && len(back) > 0 {
		back = back[1:]
	}
	if changed || len(history) > 0 {
		back = append(slices.Clone(back), b.base)
	}
	steps := 1 + m.r.IntN(min(4, len(back)+1))
	_, err = m.d.Undo(m.t.Context(), b.name, steps)
	m.note("undo %s %d: %v", b.name, steps, err)
	if steps > len(back) {
		wantCode(m.t, "undo more than there is", err, "nothing_to_undo")
		return
	}
	if err != nil {
		m.t.Errorf("undo %d of %d: %v", steps, len(back), err)
	}
	m.done["undo"]++
	m.put(b, back[steps-1])
}

func (m *model) rollback(b *modelBox) {
	m.t.Helper()
	s := pick(m.r.Rand, m.snaps)
	if s.id == "" {
		return
	}
	m.note("roll %s back to %s (gone: %v)", b.name, s.id, s.gone)
	_, err := m.d.Rollback(m.t.Context(), b.name, string(s.id))
	if s.gone {
		wantCode(m.t, "roll back to what was removed", err, "snapshot_not_found")
		return
	}
	if err != nil {
		m.t.Errorf("roll %s back to %s: %v", b.name, s.id, err)
	}
	m.done["rollback"]++
	m.put(b, s)
}

// fork makes a sandbox of a snapshot, or of another sandbox.
func (m *model) fork(b *modelBox, s *modelSnap) *modelBox {
	m.t.Helper()
	if len(m.boxes) >= 5 || s != nil && (s.gone || s.id == "") {
		return b
	}
	name, ref := m.fresh("fork"), b.name
	if s != nil {
		ref = string(s.id)
	}
	m.note("fork %s: %s", ref, name)
	made, err := m.d.Fork(m.t.Context(), ref, sandbox.ForkRequest{Name: name})
	if err != nil || len(made) != 1 || made[0].Sandbox == nil {
		m.t.Fatalf("fork %s: %+v, %v", ref, made, err)
	}
	m.done["fork"]++
	if s == nil {
		taken, err := m.d.SnapshotOf(m.t.Context(), string(made[0].Sandbox.Spec.Snapshot))
		if err != nil {
			m.t.Fatal(err)
		}
		s = m.took(b, taken)
	}
	return m.begin(name, s)
}

func (m *model) remove(b *modelBox) {
	m.t.Helper()
	m.note("remove %s", b.name)
	m.done["remove"]++
	if _, err := m.d.Remove(m.t.Context(), b.name); err != nil {
		m.t.Errorf("remove %s: %v", b.name, err)
	}
	m.boxes = slices.DeleteFunc(m.boxes, func(o *modelBox) bool { return o == b })
	for _, s := range slices.Backward(m.snaps) {
		if s.of == b && !s.gone && s.kind != sandbox.SnapshotManual {
			m.forget(s)
		}
	}
}

func (m *model) removeSnapshot() {
	m.t.Helper()
	s := pick(m.r.Rand, m.snaps)
	if s.id == "" || s.gone {
		return
	}
	m.note("remove snapshot %s", s.id)
	m.done["remove snapshot"]++
	if _, err := m.d.RemoveSnapshot(m.t.Context(), string(s.id)); err != nil {
		m.t.Errorf("remove snapshot %s: %v", s.id, err)
	}
	m.forget(s)
}

// background starts a process that goes on, or ends it.
func (m *model) background(b *modelBox) {
	m.t.Helper()
	if b.busy != "" {
		m.note("end what runs in %s", b.name)
		if err := m.d.SignalProcess(m.t.Context(), b.name, b.busy, "SIGKILL"); err != nil {
			m.t.Errorf("kill %s in %s: %v", b.busy, b.name, err)
		}
		testenv.Eventually(m.t, 10*time.Second, "the process ends", func() bool {
			p, err := m.d.Process(m.t.Context(), b.name, b.busy)
			return err == nil && p.Exit != nil
		})
		b.busy = ""
		return
	}
	m.note("start something in %s", b.name)
	p, err := m.d.StartProcess(m.t.Context(), b.name, sandbox.ProcessSpec{Argv: []string{"/probe", "wait"}})
	if err != nil {
		m.t.Fatalf("start a process in %s: %v", b.name, err)
	}
	m.done["background"]++
	b.busy = p.ID
}

func (m *model) restart() {
	m.t.Helper()
	if m.r.IntN(2) == 0 {
		m.note("stop the daemon")
		m.d.stop()
	} else {
		m.note("kill the daemon")
		m.d.kill()
	}
	m.done["restart"]++
	m.d.start()
}

// paused does something to a paused sandbox and lets it go on.
func (m *model) paused(b *modelBox) {
	m.t.Helper()
	m.note("pause %s", b.name)
	m.done["pause"]++
	if _, err := m.d.Pause(m.t.Context(), b.name); err != nil {
		m.t.Errorf("pause %s: %v", b.name, err)
	}
	m.meanwhile(b)
	sb, err := m.d.Sandbox(m.t.Context(), b.name)
	if err == nil && sb.Status == sandbox.StatusPaused {
		_, err = m.d.Resume(m.t.Context(), b.name)
	}
	m.note("resume %s", b.name)
	if err != nil {
		m.t.Errorf("resume %s: %v", b.name, err)
	}
}

// stopped does something to a stopped sandbox and starts it again.
func (m *model) stopped(b *modelBox) {
	m.t.Helper()
	m.note("stop %s", b.name)
	m.done["stop"]++
	if _, err := m.d.Stop(m.t.Context(), b.name); err != nil {
		m.t.Errorf("stop %s: %v", b.name, err)
	}
	b.busy = ""
	m.meanwhile(b)
	m.note("start %s", b.name)
	if _, err := m.d.Start(m.t.Context(), b.name); err != nil {
		m.t.Errorf("start %s: %v", b.name, err)
	}
}

func (m *model) meanwhile(b *modelBox) {
	m.t.Helper()
	for m.r.IntN(3) != 0 {
		m.onRoot(b)
	}
	if m.r.IntN(5) == 0 {
		m.restart()
	}
}

// writeAPI changes files by the files API.
func (m *model) writeAPI(b *modelBox) {
	m.t.Helper()
	files := m.d.Files(b.name)
	c := m.r.next(b.files)
	inside := filepath.Join(workTree, string(c.Path))
	c.Mode = c.Mode&0o777 | 0o400 // 0 would stand for a default
	var err error
	switch {
	case strings.ContainsFunc(string(c.Path)+string(c.To), func(r rune) bool { return r == '\uFFFD' }):
		return
	case slices.ContainsFunc(b.files.files, func(f treeFile) bool { return f.path == string(c.Path) }):
		c.Do = "unlink"
		if err = files.Remove(m.t.Context(), "root", inside, true); err == nil {
			c.Do = "removeall"
		}
	case m.r.IntN(2) == 0:
		c.Do = "mkdir"
		_, err = files.Mkdir(m.t.Context(), "root", inside, c.Mode)
	default:
		c.Do = "replace"
		_, err = files.Write(m.t.Context(), "root", inside, c.Mode, bytes.NewReader(treeContent(c)))
	}
	m.done["api "+c.Do]++
	want := m.apply(b.dir, &b.files, c)
	m.note("%s by the API: %s: %s, %v", b.name, c.brief(), want, err)
	if (err == nil) != (want == "ok") {
		m.t.Errorf("%s by the API in %s: %v, in the model %s", c.brief(), b.name, err, want)
		return
	}
	c.Do = "touch" // the API sets no times
	_, text, _ := strings.Cut(m.probeInside(b, "tree", workTree, c.String()), "\n")
	m.same(b, text)
}

// treeContent is what the probe writes.
func treeContent(c treeChange) []byte {
	b := make([]byte, c.Size)
	r := rand.New(rand.NewPCG(c.Seed, 1))
	for i := range b {
		b[i] = byte(r.UintN(256))
	}
	return b
}

// manySnapshots takes so many snapshots that their layers are made one.
func (m *model) manySnapshots() {
	m.t.Helper()
	b := pick(m.r.Rand, m.boxes)
	for range 34 {
		m.write(b)
		m.snapshot(b)
		if m.t.Failed() {
			return
		}
	}
	last := m.snaps[len(m.snaps)-1]
	testenv.Eventually(m.t, 30*time.Second, "the layers are made one", func() bool {
		s, err := m.d.SnapshotOf(m.t.Context(), string(last.id))
		if err != nil {
			m.t.Fatal(err)
		}
		return len(s.Layers) < 32
	})
	m.note("flattened")
	m.done["flatten"]++
	m.compare(b)
	m.check(b)
	f := m.fork(b, last)
	m.check(f)
	m.rollback(f)
	m.check(f)
}

// checkSnapshots looks into every snapshot there is.
func (m *model) checkSnapshots() {
	m.t.Helper()
	for _, b := range slices.Clone(m.boxes[1:]) {
		m.remove(b)
	}
	var want int
	for _, s := range m.snaps {
		if s.id == "" || s.gone {
			continue
		}
		want++
		b := m.boxes[0]
		m.note("look into %s", s.id)
		if _, err := m.d.Rollback(m.t.Context(), b.name, string(s.id)); err != nil {
			m.t.Errorf("roll back to %s: %v", s.id, err)
			continue
		}
		m.put(b, s)
		m.check(b)
	}
	// What an ended sandbox left goes after its removal was answered.
	testenv.Eventually(m.t, 30*time.Second, fmt.Sprintf("%d snapshots are left", want), func() bool {
		return len(m.d.snapshots(m.t, "")) == want
	})
}

func (m *model) removeEverything() {
	m.t.Helper()
	for len(m.boxes) > 0 {
		m.remove(m.boxes[0])
	}
	for _, s := range m.snaps {
		if s.id == "" || s.gone {
			continue
		}
		if _, err := m.d.RemoveSnapshot(m.t.Context(), string(s.id)); err != nil {
			m.t.Error(err)
		}
	}
	m.d.noUpperLayers(m.t)
	m.d.agree(m.t)
}
