package runtime

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/internal/testenv"
	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

func (h *house) root(t *testing.T, id sandbox.ID) state.Root {
	t.Helper()
	r, err := h.db.RootOf(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func snap(t *testing.T, h *house, ref string) sandbox.Snapshot {
	t.Helper()
	s, err := h.Snapshot(t.Context(), ref, sandbox.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// layersAgree checks that the model's volume has exactly the upper layers
// that something needs.
func (h *house) layersAgree(t *testing.T) {
	t.Helper()
	h.collectSoon()
	var have, want []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-time.After(2 * time.Millisecond) {
		used, err := h.db.LayersInUse(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		have, _ = fakeRoots{h.k}.Layers()
		upper := func(l string) bool {
			return len(l) < len(rootfs.UpperPrefix) || l[:len(rootfs.UpperPrefix)] != rootfs.UpperPrefix
		}
		have, want = slices.DeleteFunc(have, upper), slices.DeleteFunc(used, upper)
		slices.Sort(have)
		slices.Sort(want)
		if slices.Equal(have, want) {
			return
		}
	}
	t.Errorf("%d layers on the volume, %d needed: %.500v, %.500v", len(have), len(want), have, want)
}

// TestSnapshotSurvivesAKillAnywhere kills the daemon before and after every
// step of a snapshot and of a rollback: afterwards it happened or it did not,
// the sandbox lives, and nothing is left over.
func TestSnapshotSurvivesAKillAnywhere(t *testing.T) {
	for _, c := range []struct {
		verb, status string
		steps        []string
	}{
		{"snapshot", "running", []string{"guest.ping", "rootfs.freeze", "rootfs.upper", "rootfs.mount", "guest.configure"}},
		{"snapshot", "stopped", []string{"rootfs.freeze", "rootfs.upper", "rootfs.sync"}},
		{"rollback", "running", []string{"rootfs.discard", "rootfs.upper", "rootfs.furnish", "rootfs.mount", "guest.configure"}},
		{"rollback", "stopped", []string{"rootfs.discard", "rootfs.upper", "rootfs.sync"}},
	} {
		for _, step := range c.steps {
			for _, after := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/%s/after=%v", c.verb, c.status, step, after), func(t *testing.T) {
					k, dir := newKernel(t), t.TempDir()
					h := open(t, k, dir)
					sb := create(t, h, sandbox.Spec{Name: "dev"})
					first := snap(t, h, "dev")
					second := snap(t, h, "dev")
					if c.status == "stopped" {
						if _, err := h.Stop(t.Context(), "dev", ""); err != nil {
							t.Fatal(err)
						}
					}
					k.killAt(step, after)
					killed := h
					go func() { // and nobody hears of what it comes to
						if c.verb == "snapshot" {
							_, _ = killed.Snapshot(t.Context(), "dev", sandbox.SnapshotRequest{Name: "third"})
						} else {
							_, _ = killed.Rollback(t.Context(), "dev", string(first.ID), "")
						}
					}()
					k.waitDead(t, step)
					h.crash()
					k.revive()
					h = open(t, k, dir)
					h.agree(t)
					r := h.root(t, sb.ID)
					third, terr := h.SnapshotOf(t.Context(), "third")
					switch {
					case r.Pending != nil:
						t.Errorf("left pending: %+v", r.Pending)
					case c.verb == "rollback" && !slices.Equal(r.Stack, first.Layers):
						t.Errorf("it stands on %v, want %v", r.Stack, first.Layers)
					case c.verb == "snapshot" && terr == nil && !slices.Equal(r.Stack, third.Layers):
						t.Errorf("it stands on %v, the snapshot on %v", r.Stack, third.Layers)
					case c.verb == "snapshot" && terr != nil && !slices.Equal(r.Stack, second.Layers):
						t.Errorf("without a snapshot it stands on %v, want %v", r.Stack, second.Layers)
					}
					got := h.get(t, sb.ID)
					if got.Status == sandbox.StatusStopped {
						if _, err := h.Start(t.Context(), "dev", ""); err != nil {
							t.Error(err)
						}
					} else if got.Status != sandbox.StatusRunning {
						t.Errorf("it is %s (%s)", got.Status, got.Detail)
					}
					if _, err := h.Snapshot(t.Context(), "dev", sandbox.SnapshotRequest{Name: "fourth"}); err != nil {
						t.Error(err)
					}
					h.agree(t)
					h.layersAgree(t)
				})
			}
		}
	}
}

// TestSnapshotThatFailsChangesNothing: where a step before the switch of the
// root fails, the sandbox runs on as it was.
func TestSnapshotThatFailsChangesNothing(t *testing.T) {
	for _, step := range []string{"guest.ping", "rootfs.freeze", "rootfs.upper", "rootfs.mount"} {
		t.Run(step, func(t *testing.T) {
			k := newKernel(t)
			h := open(t, k, t.TempDir())
			sb := create(t, h, sandbox.Spec{Name: "dev"})
			before := h.root(t, sb.ID)
			k.setFail(step, true)
			if _, err := h.Snapshot(t.Context(), "dev", sandbox.SnapshotRequest{Name: "x"}); !errors.Is(err, errInjected) {
				t.Fatalf("snapshot: %v", err)
			}
			k.setFail(step, false)
			if got := h.get(t, sb.ID); got.Status != sandbox.StatusRunning || got.InitPID != sb.InitPID {
				t.Errorf("it is %s with PID 1 %d", got.Status, got.InitPID)
			}
			if r := h.root(t, sb.ID); !slices.Equal(r.Stack, before.Stack) || r.Pending != nil {
				t.Errorf("it stands on %+v", r)
			}
			if _, err := h.Snapshot(t.Context(), "dev", sandbox.SnapshotRequest{Name: "x"}); err != nil { // the name is free
				t.Error(err)
			}
			h.agree(t)
			h.layersAgree(t)
		})
	}
}

// TestLiveSnapshotHoldsTheWorkload: with a process at work the files are
// copied while it is frozen, and it goes on whatever comes of that.
func TestLiveSnapshotHoldsTheWorkload(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "dev"})
	k.setLive(1)
	before := h.root(t, sb.ID).Stack
	s := snap(t, h, "dev")
	if !s.Live || len(s.Layers) != len(before)+1 || !slices.Equal(h.root(t, sb.ID).Stack, before) {
		t.Errorf("snapshot %+v of %v", s, before)
	}
	for _, step := range []string{"cgroup.freeze", "rootfs.copy"} {
		k.setFail(step, true)
		if _, err := h.Snapshot(t.Context(), "dev", sandbox.SnapshotRequest{Name: "x"}); !errors.Is(err, errInjected) {
			t.Errorf("with %s failing: %v", step, err)
		}
		k.setFail(step, false)
		if k.isFrozen(sb.ID) {
			t.Errorf("with %s failing, the workload stays frozen", step)
		}
	}
	h.layersAgree(t)
}

// TestSnapshotsThatWereNotOnDisk are gone after the host restarted; durable
// ones stay.
func TestSnapshotsThatWereNotOnDisk(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	create(t, h, sandbox.Spec{Name: "dev"})
	durable, err := h.Snapshot(t.Context(), "dev", sandbox.SnapshotRequest{Sync: true})
	if err != nil || !durable.Durable {
		t.Fatalf("%+v, %v", durable, err)
	}
	k.setFail("rootfs.sync", true)
	lost := snap(t, h, "dev")
	h.crash()
	h = open(t, k, dir)
	if _, err := h.SnapshotOf(t.Context(), string(lost.ID)); err != nil {
		t.Errorf("after a kill of the daemon: %v", err)
	}
	h.crash()
	k.setFail("rootfs.sync", false)
	sqlDo(t, dir, `UPDATE snapshots SET boot_id = 'boot-0' WHERE boot_id <> ''`)
	h = open(t, k, dir)
	if _, err := h.SnapshotOf(t.Context(), string(lost.ID)); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("after a power cut: %v", err)
	}
	if _, err := h.SnapshotOf(t.Context(), string(durable.ID)); err != nil {
		t.Error(err)
	}
}

// TestFlattenedStack: a deep stack becomes a short one with the next change
// of root, and what needs the old layers keeps them.
func TestFlattenedStack(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "dev"})
	first := snap(t, h, "dev")
	for range flattenAt {
		snap(t, h, "dev")
	}
	for deadline := time.Now().Add(time.Minute); ; <-time.After(10 * time.Millisecond) { // it is made in the background
		snap(t, h, "dev")
		if len(h.root(t, sb.ID).Stack) < flattenAt {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("still %d layers", len(h.root(t, sb.ID).Stack))
		}
	}
	again, err := h.SnapshotOf(t.Context(), string(first.ID))
	if err != nil || !slices.Equal(again.Layers, first.Layers) {
		t.Errorf("the first snapshot stands on %v, %v", again.Layers, err)
	}
	if _, err := h.Rollback(t.Context(), "dev", string(first.ID), ""); err != nil {
		t.Error(err)
	}
	h.layersAgree(t)
}

func TestForkOfARemovedSnapshot(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	create(t, h, sandbox.Spec{Name: "dev"})
	s := snap(t, h, "dev")
	made, err := h.Fork(t.Context(), string(s.ID), sandbox.ForkRequest{Count: 2, Name: "f"})
	if err != nil || len(made) != 2 || made[0].Sandbox == nil || made[0].Sandbox.Spec.Name != "f-1" || made[0].Sandbox.Spec.Snapshot != s.ID {
		t.Fatalf("%+v, %v", made, err)
	}
	if _, err := h.RemoveSnapshot(t.Context(), string(s.ID), ""); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Fork(t.Context(), string(s.ID), sandbox.ForkRequest{}); sandbox.CodeOf(err) != "snapshot_not_found" {
		t.Errorf("fork of a removed one: %v", err)
	}
	if _, err := h.Reset(t.Context(), "f-1", ""); err != nil { // it keeps what it began with
		t.Error(err)
	}
	h.layersAgree(t)
	if _, err := h.Fork(t.Context(), "dev", sandbox.ForkRequest{Count: 9, NeedsAll: true}); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("more forks than slots: %v", err)
	}
	h.agree(t)
	if page, err := h.List(t.Context(), sandbox.Filter{}); err != nil || len(page.Items) != 3 {
		t.Errorf("%d sandboxes, %v", len(page.Items), err)
	}
}

// TestReplacedFilesAreOnDiskBeforeTheRow: a power cut must not leave the row
// of a stopped sandbox's new files beside the old upper.
func TestReplacedFilesAreOnDiskBeforeTheRow(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "dev"})
	s := snap(t, h, "dev")
	snap(t, h, "dev")
	if _, err := h.Stop(t.Context(), "dev", ""); err != nil {
		t.Fatal(err)
	}
	k.setFail("rootfs.sync", true)
	if _, err := h.Rollback(t.Context(), "dev", string(s.ID), ""); !errors.Is(err, errInjected) {
		t.Errorf("rollback that is not on disk: %v", err)
	}
	if r := h.root(t, sb.ID); r.Pending == nil {
		t.Errorf("the row says it is done: %+v", r)
	}
	k.setFail("rootfs.sync", false)
	if _, err := h.Start(t.Context(), "dev", ""); err != nil { // which finishes it
		t.Fatal(err)
	}
	if r := h.root(t, sb.ID); r.Pending != nil || !slices.Equal(r.Stack, s.Layers) {
		t.Errorf("it stands on %+v, want %v", r, s.Layers)
	}
}

// TestSnapshotOfAKilledDaemonReachesTheDisk: the next daemon of the same boot
// sees to it, or the next boot would remove a snapshot that is whole.
func TestSnapshotOfAKilledDaemonReachesTheDisk(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	create(t, h, sandbox.Spec{Name: "dev"})
	k.killAt("rootfs.sync", false)
	s := snap(t, h, "dev")
	k.waitDead(t, "rootfs.sync")
	h.crash()
	k.revive()
	h = open(t, k, dir)
	for deadline := time.Now().Add(5 * time.Second); !s.Durable; <-time.After(2 * time.Millisecond) {
		var err error
		if s, err = h.SnapshotOf(t.Context(), string(s.ID)); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatal("it is not on disk")
		}
	}
}

// TestKnownEndsMakeNoRestorePoints: PID 1 tells a new daemon again what it
// told the one before.
func TestKnownEndsMakeNoRestorePoints(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{AutoSnapshot: true})
	ended := sandbox.Process{ID: "p1", Argv: []string{"x"}, Exit: &sandbox.ExitStatus{}}
	h.eventsToldTo(t, sb.ID, ended)
	points := func(want int) {
		t.Helper()
		if all, err := h.Snapshots(t.Context(), string(sb.ID), sandbox.SnapshotAuto); err != nil || len(all) != want {
			t.Errorf("%d restore points, %v; want %d", len(all), err, want)
		}
	}
	points(1)
	h.crash()
	h = open(t, k, dir)
	h.eventsToldTo(t, sb.ID, ended)
	points(1)
	ended.ID = "p2"
	k.eventsOf(sb.ID) <- guest.Event{Seq: 3, Type: processExited, Process: ended}
	k.eventsOf(sb.ID) <- guest.Event{Seq: 4, Type: "started"}
	for deadline := time.Now().Add(5 * time.Second); len(k.eventsOf(sb.ID)) > 0; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nobody listens to PID 1")
		}
	}
	points(2)
}

// TestCollectionsDoNotPileUp: behind a client that takes hours to send an
// archive one collection waits, however many things are removed.
func TestCollectionsDoNotPileUp(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	create(t, h, sandbox.Spec{Name: "dev"})
	var all []sandbox.Snapshot
	for range 60 {
		all = append(all, snap(t, h, "dev"))
	}
	h.imports.RLock()
	before := goruntime.NumGoroutine()
	for _, s := range all {
		if _, err := h.RemoveSnapshot(t.Context(), string(s.ID), ""); err != nil {
			t.Fatal(err)
		}
	}
	if now := goruntime.NumGoroutine(); now > before+30 {
		t.Errorf("%d goroutines, %d before 60 removals", now, before)
	}
	h.imports.RUnlock()
	h.layersAgree(t)
}

// TestExportsHoldUpNoCollection: while a client reads an archive slowly, what
// others remove goes, and what the archive is made of stays until it ends.
func TestExportsHoldUpNoCollection(t *testing.T) {
	h, _ := openWithLibrary(t)
	pulled(t, h, "app")
	for kind, export := range map[string]func(ref string) (io.ReadCloser, error){
		"snapshot": func(ref string) (io.ReadCloser, error) { return h.ExportSnapshot(t.Context(), ref) },
		"image": func(ref string) (io.ReadCloser, error) {
			return h.ExportImage(t.Context(), sandbox.ExportRequest{Source: ref})
		},
	} {
		var snaps []sandbox.Snapshot
		for _, name := range []string{kind + "-sent", kind + "-other"} {
			create(t, h, sandbox.Spec{Name: name, Image: "app"})
			snaps = append(snaps, snap(t, h, name))
			if _, err := h.Remove(t.Context(), name, ""); err != nil {
				t.Fatal(err)
			}
		}
		gone := func(s sandbox.Snapshot) func() bool {
			return func() bool {
				have, _ := fakeRoots{h.k}.Layers()
				return !slices.Contains(have, s.Layers[len(s.Layers)-1])
			}
		}
		r, err := export(string(snaps[0].ID))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		for _, s := range snaps {
			if _, err := h.RemoveSnapshot(t.Context(), string(s.ID), ""); err != nil {
				t.Fatal(err)
			}
		}
		if !testenv.Within(10*time.Second, gone(snaps[1])) {
			t.Errorf("%s: a slow export keeps another's layer", kind)
		}
		if gone(snaps[0])() {
			t.Errorf("%s: the layer under export is gone", kind)
		}
		if _, err := io.Copy(io.Discard, r); err != nil {
			t.Errorf("%s: the rest of the export: %v", kind, err)
		}
		if !testenv.Within(10*time.Second, gone(snaps[0])) {
			t.Errorf("%s: the layer stays after the export", kind)
		}
	}
}

// stalled is an archive whose sender stops in its middle until let go.
type stalled struct {
	io.Reader
	at   chan struct{} // closed when it stops
	rest chan struct{}
}

func stallIn(b []byte, n int) *stalled {
	s := &stalled{at: make(chan struct{}), rest: make(chan struct{})}
	s.Reader = io.MultiReader(bytes.NewReader(b[:n]), readerFunc(func([]byte) (int, error) {
		close(s.at)
		<-s.rest
		return 0, io.EOF
	}), bytes.NewReader(b[n:]))
	return s
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

// TestImportsAndBuildsHoldUpNoCollection: while one sends an archive slowly, a
// registry answers one slowly or one builds, what another removes goes. What
// the operation made, or found there, stays until it ends.
func TestImportsAndBuildsHoldUpNoCollection(t *testing.T) {
	for name, begin := range map[string]func(t *testing.T, h *house, s sandbox.Snapshot, archive []byte) (mine []string, end func() error){
		"snapshot import": func(t *testing.T, h *house, s sandbox.Snapshot, archive []byte) ([]string, func() error) {
			last := bytes.LastIndex(archive, []byte(carriedRecord)) // all layers came
			in, done := stallIn(archive, last), make(chan error, 1)
			go func() {
				_, err := h.ImportSnapshot(t.Context(), "copy", "uid:1", in)
				done <- err
			}()
			<-in.at
			return []string{fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(s.Layers[len(s.Layers)-1])))}, func() error { close(in.rest); return <-done }
		},
		"pull": func(t *testing.T, h *house, _ sandbox.Snapshot, _ []byte) ([]string, func() error) {
			lib, done := h.cfg.Library.(*slowLibrary), make(chan error, 1)
			go func() {
				_, err := h.PullImage(t.Context(), sandbox.PullRequest{Reference: "slow"}, nil)
				done <- err
			}()
			<-lib.at
			return []string{"layer of docker.io/library/slow:latest"}, func() error { close(lib.rest); return <-done }
		},
		"build": func(t *testing.T, h *house, _ sandbox.Snapshot, _ []byte) ([]string, func() error) {
			ctx, release := h.HoldLayers(t.Context())
			if _, err := h.ImportImage(t.Context(), sandbox.ImportRequest{Name: "base"}, strings.NewReader("base")); err != nil {
				t.Fatal(err)
			}
			base, err := h.Image(ctx, "base")
			if err != nil {
				t.Fatal(err)
			}
			empty, err := h.Scratch(ctx)
			if err != nil {
				t.Fatal(err)
			}
			base.Name = ""
			sb := step(t, h, base)
			made, err := h.FreezeStep(ctx, string(sb.ID), base)
			if err == nil {
				err = h.PutBuildStep(ctx, "k", made)
			}
			if err == nil {
				_, err = h.Remove(t.Context(), string(sb.ID), "")
			}
			if err == nil {
				err = h.RemoveImage(t.Context(), "base")
			}
			if err == nil {
				_, err = h.PruneBuildCache(t.Context(), sandbox.BuildCachePrune{})
			}
			if err != nil {
				t.Fatal(err)
			}
			made.Name, made.Digest = "built", "sha256:x"
			return append(made.Layers, empty.Layers...), func() error { defer release(); return h.PutBuilt(ctx, made) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := open(t, newKernel(t), t.TempDir())
			h.cfg.Library = &slowLibrary{at: make(chan struct{}), rest: make(chan struct{}), roots: fakeRoots{h.k}}
			img, err := h.ImportImage(t.Context(), sandbox.ImportRequest{Name: "app"}, strings.NewReader("app"))
			if err != nil {
				t.Fatal(err)
			}
			create(t, h, sandbox.Spec{Name: "dev", Image: img.Name})
			kept, other := snap(t, h, "dev"), snap(t, h, "dev")
			r, err := h.ExportSnapshot(t.Context(), string(kept.ID))
			if err != nil {
				t.Fatal(err)
			}
			archive, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := h.Remove(t.Context(), "dev", ""); err != nil {
				t.Fatal(err)
			}
			has := func(layers ...string) bool {
				have, _ := fakeRoots{h.k}.Layers()
				return !slices.ContainsFunc(layers, func(l string) bool { return !slices.Contains(have, l) })
			}
			mine, end := begin(t, h, kept, archive)
			if _, err := h.RemoveSnapshot(t.Context(), string(other.ID), ""); err != nil {
				t.Fatal(err)
			}
			if !testenv.Within(10*time.Second, func() bool { return !has(other.Layers[len(other.Layers)-1]) }) {
				t.Error("another's layer is not collected")
			}
			if !has(mine...) {
				t.Errorf("of what is held, %v, something is gone", mine)
			}
			if err := end(); err != nil {
				t.Errorf("the operation: %v", err)
			}
			if !has(mine[0]) {
				t.Error("what the operation named is gone")
			}
			h.layersAgree(t)
		})
	}
}

// slowLibrary brings a layer, and waits for the next.
type slowLibrary struct {
	fakeLibrary
	roots    fakeRoots
	at, rest chan struct{}
}

func (l *slowLibrary) Import(ctx context.Context, req sandbox.ImportRequest, r io.Reader) (sandbox.Image, error) {
	return l.roots.ImportTar(ctx, req.Name, r)
}

func (l *slowLibrary) Pull(ctx context.Context, req sandbox.PullRequest, report func(sandbox.ImageProgress)) (sandbox.Image, error) {
	layer := "layer of docker.io/library/slow:latest"
	sandbox.HoldLayers(ctx, layer)
	err := l.roots.step("rootfs.import", func() { l.roots.layers[layer] = true })
	close(l.at)
	<-l.rest
	img, perr := l.fakeLibrary.Pull(ctx, req, report)
	return img, errors.Join(err, perr)
}

// TestSnapshotBesideABlockedVolume: what a workload put in the way of a mount
// stops no sandbox that is only to be frozen.
func TestSnapshotBesideABlockedVolume(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "dev"})
	before := h.root(t, sb.ID).Stack
	k.setFail("guest.place", true)
	if s := snap(t, h, "dev"); !s.Live || !slices.Equal(s.Layers[:len(s.Layers)-1], before) {
		t.Errorf("it was not copied: %+v", s)
	}
	k.setFail("guest.place", false)
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusRunning || got.InitPID != sb.InitPID {
		t.Errorf("it is %s with PID 1 %d (%s)", got.Status, got.InitPID, got.Detail)
	}
	if s := snap(t, h, "dev"); s.Live {
		t.Errorf("with nothing in the way it was copied: %+v", s)
	}
	h.agree(t)
	h.layersAgree(t)
}

// TestForkOfASandboxNamedAsASnapshot: who asks for a sandbox gets its files as
// they are now.
func TestForkOfASandboxNamedAsASnapshot(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{Name: "dev"})
	old, err := h.Snapshot(t.Context(), "dev", sandbox.SnapshotRequest{Name: "dev"})
	if err != nil {
		t.Fatal(err)
	}
	for of, want := range map[string]bool{"": true, sandbox.ForkOfSandbox: false} {
		made, err := h.Fork(t.Context(), "dev", sandbox.ForkRequest{ForkOf: of})
		if err != nil {
			t.Fatal(err)
		}
		if got := made[0].Sandbox.Spec.Snapshot == old.ID; got != want {
			t.Errorf("fork of %q: of the snapshot is %v, want %v", of, got, want)
		}
	}
	if _, err := h.Fork(t.Context(), string(old.ID), sandbox.ForkRequest{ForkOf: sandbox.ForkOfSandbox}); sandbox.CodeOf(err) != "sandbox_not_found" {
		t.Errorf("fork of a snapshot as a sandbox: %v", err)
	}
	if _, err := h.Fork(t.Context(), string(sb.ID), sandbox.ForkRequest{}); err != nil {
		t.Error(err)
	}
}

// TestOneRestorePointForOneCommand: its end is told twice, by its stream and
// by PID 1.
func TestOneRestorePointForOneCommand(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{AutoSnapshot: true})
	k.setLive(1) // so that the files stay where they are
	p, err := h.Exec(t.Context(), string(sb.ID), sandbox.ProcessSpec{Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = p.Next()
	}
	h.eventsToldTo(t, sb.ID, sandbox.Process{ID: "p1", Argv: []string{"x"}, Exit: &sandbox.ExitStatus{}})
	if all, err := h.Snapshots(t.Context(), string(sb.ID)); err != nil || len(all) != 1 {
		t.Errorf("%d restore points, %v; want 1", len(all), err)
	}
}

// TestNoRestorePointOfNothing: a command that changes nothing makes none, also
// right after one that did and while something runs.
func TestNoRestorePointOfNothing(t *testing.T) {
	k := newKernel(t)
	h := open(t, k, t.TempDir())
	sb := create(t, h, sandbox.Spec{AutoSnapshot: true})
	k.setLive(1)
	k.mu.Lock()
	k.stamps = []string{"3.a.b+fresh", "3.a.b", "3.a.b", "3.c.d"}
	k.mu.Unlock()
	for i, want := range []int{1, 1, 2} {
		h.restorePoint(h.box(sb.ID), sandbox.Process{ID: sandbox.ProcessID(fmt.Sprint("p", i+1)), Argv: []string{"x"}})
		if all, err := h.Snapshots(t.Context(), string(sb.ID)); err != nil || len(all) != want {
			t.Errorf("after command %d: %d restore points, %v; want %d", i+1, len(all), err, want)
		}
	}
}
