package build

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"sync"

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

func (w *world) HoldLayers(ctx context.Context) (context.Context, func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held++
	return ctx, func() {
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
