package build

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// builder is a Builder in a world, and how its builds are asked for.
type builder struct {
	*Builder
	w   *world
	dir string
}

func newBuilder(t *testing.T, w *world) *builder {
	t.Helper()
	dir := t.TempDir()
	b, err := New(Config{
		Dir: dir, Sandboxes: w, Images: w, Cache: w, Log: slog.New(slog.DiscardHandler),
		AtOnce: 2, ContextBytes: 1 << 20, ContextFiles: 100, TimeLimit: time.Minute,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &builder{Builder: b, w: w, dir: dir}
}

// do builds and returns how each step went.
func (b *builder) do(ctx context.Context, text string, files ...f) (img sandbox.Image, steps []string, err error) {
	return b.ask(ctx, sandbox.BuildRequest{Names: []string{"made"}, Dockerfile: text, Actor: "uid:7"}, files...)
}

func (b *builder) ask(ctx context.Context, req sandbox.BuildRequest, files ...f) (img sandbox.Image, steps []string, err error) {
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	for _, f := range files {
		_ = w.WriteHeader(&tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(f.data))}) // to memory
		_, _ = io.WriteString(w, f.data)
	}
	_ = w.Close()
	img, err = b.Build(ctx, req, &data, func(e sandbox.BuildEvent) error {
		switch {
		case e.Type == sandbox.BuildStep && e.Step > 1 && e.Cached:
			steps = append(steps, fmt.Sprintf("%s%d cached", e.Stage, e.Step))
		case e.Type == sandbox.BuildStep && e.Step > 1:
			steps = append(steps, fmt.Sprintf("%s%d", e.Stage, e.Step))
		}
		return nil
	})
	slices.Sort(steps) // stages go side by side
	return img, steps, err
}

// clean wants that nothing of a build is left but images and the cache.
func (b *builder) clean(t *testing.T) {
	t.Helper()
	left, err := os.ReadDir(b.dir)
	if err != nil || len(left) > 0 || len(b.w.boxes) > 0 || b.w.held != 0 {
		t.Errorf("left: files %v (%v), %d sandboxes, %d holds on layers", left, err, len(b.w.boxes), b.w.held)
	}
}

func TestBuildRunsOnceAndThenNothing(t *testing.T) {
	w := newWorld()
	b := newBuilder(t, w)
	const text = "FROM base AS a\nWORKDIR /w\nCOPY x /w/x\nRUN one\nFROM base\nRUN other\nCOPY --from=a /w/x /y\nRUN last\nENV A=1"
	file := f{name: "x", data: "X"}
	first, steps, err := b.do(t.Context(), text, file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"12", "13", "14", "a2", "a3", "a4"}, steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	if len(first.Layers) != 4 || first.Kind != sandbox.ImageBuild || !slices.Contains(first.Config.Env, "A=1") || first.Name != "made" {
		t.Errorf("image %+v", first)
	}
	if w.most > stagesAtOnce+1 { // and one that gives files
		t.Errorf("%d sandboxes at the same time", w.most)
	}
	made := w.made
	again, steps, err := b.do(t.Context(), text, file)
	if err != nil || w.made != made || again.Digest != first.Digest {
		t.Errorf("again: %d sandboxes, digest %s and %s, %v", w.made-made, first.Digest, again.Digest, err)
	}
	if diff := cmp.Diff([]string{"12 cached", "13 cached", "14 cached", "a2 cached", "a3 cached", "a4 cached"}, steps); diff != "" {
		t.Errorf("again (-want +got):\n%s", diff)
	}
	// Another content changes what follows it, and no more.
	_, steps, err = b.do(t.Context(), text, f{name: "x", data: "Y"})
	if diff := cmp.Diff([]string{"12 cached", "13 cached", "14 cached", "a2 cached", "a3", "a4"}, steps); diff != "" || err != nil {
		// The fake's TarOut gives no content: what is copied on is the same.
		t.Errorf("with another file (-want +got):\n%s%v", diff, err)
	}
	// A last line that only says something runs nothing.
	other, steps, err := b.do(t.Context(), text+"\nLABEL l=1", file)
	if err != nil || len(other.Config.Labels) != 1 || other.Digest == first.Digest || slices.ContainsFunc(steps, func(s string) bool { return !strings.HasSuffix(s, "cached") }) {
		t.Errorf("with a label: %v, %+v, %v", steps, other, err)
	}
	b.clean(t)
}

// TestStepsAreRememberedFirst: between a layer's making and the end of what
// holds it stands the row that keeps it.
func TestStepsAreRememberedFirst(t *testing.T) {
	w := newWorld()
	b := newBuilder(t, w)
	if _, _, err := b.do(t.Context(), "FROM base\nRUN one"); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"create", "freeze", "remember", "remove"}, w.log); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestSandboxesOfBuildsAreMarked(t *testing.T) {
	w := newWorld()
	b := newBuilder(t, w)
	var seen []sandbox.CreateRequest
	_, err := b.Build(t.Context(), sandbox.BuildRequest{
		Dockerfile: "FROM base\nRUN one\nRUN --network=none two\nWORKDIR /x", Actor: "uid:7",
		Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen}, Limits: sandbox.Limits{PIDs: 9},
	}, nil, func(e sandbox.BuildEvent) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if e.Type == sandbox.BuildOutput || e.Type == sandbox.BuildDone {
			for _, box := range w.boxes {
				seen = append(seen, box.spec)
			}
		}
		return nil
	})
	if err != nil || len(seen) != 2 {
		t.Fatalf("%d sandboxes seen, %v", len(seen), err)
	}
	for i, mode := range []sandbox.NetworkMode{sandbox.NetworkOpen, sandbox.NetworkOff} {
		s := seen[i]
		if s.Actor != ActorPrefix+"uid:7" || s.Spec.Labels[LabelBuild] == "" || s.Spec.TTLSeconds <= 0 || s.Spec.Limits.PIDs != 9 || s.Spec.Network.Mode != mode {
			t.Errorf("sandbox %d of a build: %+v", i, s)
		}
		if err := s.Spec.Validate(); err != nil {
			t.Error(err)
		}
	}
}

// TestFailuresLeaveNothing: whatever fails, no image comes of it, no sandbox
// stays, and the steps before are kept.
func TestFailuresLeaveNothing(t *testing.T) {
	for _, c := range []struct {
		name, text, fail, code string
		tells                  []string
		steps                  int // in the cache
	}{
		{name: "nothing", text: "FROM base\nRUN one", steps: 1},
		{name: "a command", text: "FROM base\nRUN one\nRUN fail", code: codeFailed, tells: []string{"line 3", "exit status 3", "ran fail", "RUN fail"}, steps: 1},
		{name: "the start of a command", text: "FROM base\nRUN unknown", code: codeFailed, tells: []string{"line 2", "unknown"}},
		{name: "a source that is not there", text: "FROM base\nCOPY none /x", code: codeFailed, tells: []string{"line 2", "none", "context"}},
		{name: "an owner that is not there", text: "FROM base\nCOPY --chown=ghost x /x", code: "invalid_user", tells: []string{"line 2", "ghost"}},
		{name: "an owner beyond range", text: "FROM base\nCOPY --chown=4294967296 x /x", code: "invalid_user", tells: []string{"line 2", "0 to 65535"}},
		{name: "a group beyond range", text: "FROM base\nCOPY --chown=0:65536 x /x", code: "invalid_user", tells: []string{"line 2", "0 to 65535"}},
		{name: "an image that is not there", text: "FROM base\nCOPY --from=ghost /x /x", code: "image_not_found", tells: []string{"line 2"}},
		{name: "a base that is not there", text: "FROM ghost", code: "image_not_found", tells: []string{"line 1"}},
		{name: "a stage others wait for", text: "FROM base AS a\nRUN fail\nFROM base\nCOPY --from=a /x /y", code: codeFailed, tells: []string{"line 2"}},
		{name: "making a sandbox", text: "FROM base\nRUN one", fail: "create", code: "injected", tells: []string{"line 2"}},
		{name: "freezing", text: "FROM base\nRUN one", fail: "freeze", code: "injected", tells: []string{"line 2"}},
		{name: "remembering", text: "FROM base\nRUN one", fail: "remember", code: "injected", tells: []string{"line 2"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			if c.fail != "" {
				w.fail[c.fail] = sandbox.Errorf(sandbox.ErrExhausted, "injected", "injected")
			}
			b := newBuilder(t, w)
			_, _, err := b.do(t.Context(), c.text, f{name: "x", data: "X"})
			if c.code == "" {
				if err != nil || w.images["made"].Digest == "" {
					t.Errorf("the control: %v", err)
				}
			} else if sandbox.CodeOf(err) != c.code || w.images["made"].Digest != "" {
				t.Errorf("%v, want code %s and no image", err, c.code)
			}
			for _, s := range c.tells {
				if err != nil && !strings.Contains(err.Error(), s) {
					t.Errorf("%q does not tell %q", err, s)
				}
			}
			if len(w.cache) != c.steps {
				t.Errorf("%d steps in the cache, want %d", len(w.cache), c.steps)
			}
			b.clean(t)
		})
	}
}

func TestBuildsEnd(t *testing.T) {
	w := newWorld()
	b := newBuilder(t, w)
	ctx, cancel := context.WithCancel(t.Context())
	const text = "FROM base AS a\nRUN hang\nFROM base AS b\nRUN hang\nFROM a\nCOPY --from=b /x /y"
	done := make(chan error, 1)
	running := make(chan struct{}, 2)
	go func() {
		_, err := b.Build(ctx, sandbox.BuildRequest{Names: []string{"made"}, Dockerfile: text}, nil, func(e sandbox.BuildEvent) error {
			if e.Type == sandbox.BuildOutput {
				running <- struct{}{}
			}
			return nil
		})
		done <- err
	}()
	<-running
	<-running
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) || w.images["made"].Digest != "" {
		t.Errorf("cancelled: %v", err)
	}
	b.clean(t)
	_, _, err := b.ask(t.Context(), sandbox.BuildRequest{Dockerfile: text, TimeoutSeconds: 1})
	if sandbox.CodeOf(err) != "build_timeout" {
		t.Errorf("after its time: %v", err)
	}
	b.clean(t)
	gone := errors.New("the client is gone")
	_, err = b.Build(t.Context(), sandbox.BuildRequest{Dockerfile: "FROM base\nRUN one"}, nil, func(sandbox.BuildEvent) error { return gone })
	if !errors.Is(err, gone) {
		t.Errorf("nobody listens: %v", err)
	}
	b.clean(t)
}

// TestNewEmptiesItsDirectory: what a killed predecessor left is gone.
func TestNewEmptiesItsDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(path.Join(dir, "context-1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// TestPlatforms: only the host's, however it is written.
func TestPlatforms(t *testing.T) {
	b := newBuilder(t, newWorld())
	for p, ok := range map[string]bool{"": true, hostPlatform(): true, strings.ToUpper(hostPlatform()): true, "linux": true, "plan9/mips": false, "windows/amd64": false} {
		_, _, err := b.ask(t.Context(), sandbox.BuildRequest{Dockerfile: "FROM base", Platform: p})
		if ok != (err == nil) || !ok && sandbox.CodeOf(err) != "build_platform" {
			t.Errorf("platform %q: %v", p, err)
		}
	}
}
