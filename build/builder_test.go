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
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandboxd/sandboxd/sandbox"
)

// world is sandboxes, images and a cache in memory. A command's argv says what
// it does: fail, hang, or anything else, which is noted in the layer.
type world struct {
	mu     sync.Mutex
	images map[string]sandbox.Image
	cache  map[string]sandbox.Image
	boxes  map[sandbox.ID]*fakeBox
	layers map[string][]string // what each layer holds, a line for each file
	made   int                 // sandboxes ever
	held   int
	most   int // sandboxes at the same time
	log    []string
	fail   map[string]error // by method
}

type fakeBox struct {
	w      *world
	base   sandbox.Image
	wrote  []string
	spec   sandbox.CreateRequest
	frozen bool
}

func newWorld() *world {
	return &world{
		images: map[string]sandbox.Image{"base": base}, cache: map[string]sandbox.Image{}, boxes: map[sandbox.ID]*fakeBox{},
		layers: map[string][]string{"sha256:base": {"/etc/passwd"}}, fail: map[string]error{},
	}
}

func (w *world) note(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

func (w *world) CreateOn(ctx context.Context, req sandbox.CreateRequest, base sandbox.Image) (sandbox.Sandbox, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := errors.Join(w.fail["create"], ctx.Err()); err != nil {
		return sandbox.Sandbox{}, err
	}
	id := sandbox.NewID()
	w.boxes[id] = &fakeBox{w: w, base: base, spec: req}
	w.made++
	w.most = max(w.most, len(w.boxes))
	w.note("create")
	return sandbox.Sandbox{ID: id}, nil
}

func (w *world) box(ref string) *fakeBox {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.boxes[sandbox.ID(ref)]
}

func (w *world) Exec(_ context.Context, ref string, spec sandbox.ProcessSpec) (sandbox.ProcessIO, error) {
	b := w.box(ref)
	command := spec.Argv[len(spec.Argv)-1]
	p := &fakeProcess{closed: make(chan struct{}), out: "ran " + command}
	switch command {
	case "fail":
		p.code = 3
	case "hang":
		p.hangs = true
	case "unknown":
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "command_not_found", "command unknown is not in the sandbox")
	default:
		w.mu.Lock()
		b.wrote = append(b.wrote, "/ran/"+strings.Join(spec.Argv, " "))
		w.mu.Unlock()
	}
	return p, nil
}

func (w *world) Files(_ context.Context, ref string) (sandbox.Files, error) {
	return &fakeFiles{b: w.box(ref)}, nil
}

func (w *world) FreezeStep(ctx context.Context, ref string, base sandbox.Image) (sandbox.Image, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := errors.Join(w.fail["freeze"], ctx.Err()); err != nil {
		return base, err
	}
	b := w.boxes[sandbox.ID(ref)]
	layer := fmt.Sprintf("upper:%d", len(w.layers))
	w.layers[layer] = slices.Clone(b.wrote)
	base.Layers = append(slices.Clone(base.Layers), layer)
	base.Files += int64(len(b.wrote))
	b.frozen = true
	w.note("freeze")
	return base, nil
}

func (w *world) Remove(ctx context.Context, ref, _ string) (sandbox.Sandbox, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return sandbox.Sandbox{}, err
	}
	delete(w.boxes, sandbox.ID(ref))
	w.note("remove")
	return sandbox.Sandbox{}, nil
}

func (w *world) Image(_ context.Context, name string) (sandbox.Image, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	img, ok := w.images[name]
	if !ok {
		return img, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %q", name)
	}
	return img, nil
}

func (w *world) Scratch(context.Context) (sandbox.Image, error) {
	return sandbox.Image{Kind: sandbox.ImageTar, Layers: []string{"sha256:nothing"}}, nil
}

func (w *world) PutBuilt(_ context.Context, img sandbox.Image) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.images[img.Name] = img
	return w.fail["put"]
}

func (w *world) HoldLayers() func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held++
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.held--
	}
}

func (w *world) BuildStep(_ context.Context, key string) (sandbox.Image, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	made, ok := w.cache[key]
	if !ok {
		return made, sandbox.Errorf(sandbox.ErrNotFound, "build_step_not_found", "none")
	}
	return made, nil
}

func (w *world) PutBuildStep(ctx context.Context, key string, made sandbox.Image) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held == 0 {
		return errors.New("layers are not held")
	}
	if err := errors.Join(w.fail["remember"], ctx.Err()); err != nil {
		return err
	}
	w.cache[key] = made
	w.note("remember")
	return nil
}

// fakeProcess says one thing and ends, or hangs until it is closed.
type fakeProcess struct {
	out    string
	code   int
	hangs  bool
	once   sync.Once
	closed chan struct{}
}

func (p *fakeProcess) Process() sandbox.Process { return sandbox.Process{} }

func (p *fakeProcess) Next() (sandbox.Output, error) {
	if p.out != "" {
		o := sandbox.Output{Stream: sandbox.Stdout, Data: []byte(p.out)}
		p.out = ""
		return o, nil
	}
	if p.hangs {
		<-p.closed
		return sandbox.Output{}, errors.New("closed")
	}
	return sandbox.Output{}, io.EOF
}

func (p *fakeProcess) Exit() (sandbox.ExitStatus, bool) {
	return sandbox.ExitStatus{Code: p.code}, true
}
func (p *fakeProcess) WriteStdin([]byte) (int, error)  { return 0, io.ErrClosedPipe }
func (p *fakeProcess) CloseStdin() error               { return nil }
func (p *fakeProcess) Resize(sandbox.WindowSize) error { return nil }
func (p *fakeProcess) Signal(string) error             { return nil }
func (p *fakeProcess) Close() error                    { p.once.Do(func() { close(p.closed) }); return nil }

// fakeFiles is the files of a box: those of its layers and what was written.
type fakeFiles struct {
	sandbox.Files // what is not here, no build does
	b             *fakeBox
}

func (f *fakeFiles) all() []string {
	f.b.w.mu.Lock()
	defer f.b.w.mu.Unlock()
	var all []string
	for _, l := range f.b.base.Layers {
		all = append(all, f.b.w.layers[l]...)
	}
	return append(all, f.b.wrote...)
}

func (f *fakeFiles) Stat(_ context.Context, _, name string) (sandbox.FileInfo, error) {
	for _, have := range f.all() {
		if have == name {
			return sandbox.FileInfo{Path: name, Type: sandbox.FileRegular}, nil
		}
		if have == name+"/" || name == "/" || strings.HasPrefix(have, name+"/") {
			return sandbox.FileInfo{Path: name, Type: sandbox.FileDir}, nil
		}
	}
	return sandbox.FileInfo{}, sandbox.Errorf(sandbox.ErrNotFound, "file_not_found", "no %s", name)
}

func (f *fakeFiles) Read(_ context.Context, _, name string, _, _ int64) (sandbox.FileInfo, io.ReadCloser, error) {
	return sandbox.FileInfo{}, io.NopCloser(strings.NewReader("root:x:0:0::/:\napp:x:5:6::/:\n")), nil
}

func (f *fakeFiles) TarIn(_ context.Context, _, at string, r io.Reader) error {
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := path.Join(at, h.Name)
		if h.Typeflag == tar.TypeDir {
			name += "/"
		}
		f.b.w.mu.Lock()
		f.b.wrote = append(f.b.wrote, name)
		f.b.w.mu.Unlock()
	}
}

func (f *fakeFiles) TarOut(_ context.Context, _, name string) (io.ReadCloser, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, have := range f.all() {
		if have == name {
			_ = w.WriteHeader(&tar.Header{Name: path.Base(name), Typeflag: tar.TypeReg, Mode: 0o644}) // to memory
		}
	}
	return io.NopCloser(&b), w.Close()
}

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
