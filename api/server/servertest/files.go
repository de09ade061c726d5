package servertest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// files is a file system of maps.
type files struct {
	mu    sync.Mutex
	nodes map[string]*node
	watch []chan sandbox.FileEvent
}

type node struct {
	info sandbox.FileInfo
	data []byte
}

func newFiles() *files {
	f := &files{nodes: map[string]*node{}}
	f.put("/", sandbox.FileDir, 0o755, nil)
	f.put("/tmp", sandbox.FileDir, 0o1777, nil)
	return f
}

// put makes a node and its parents; f.mu is held, but by newFiles.
func (f *files) put(p string, t sandbox.FileType, mode uint32, data []byte) *node {
	if dir := path.Dir(p); dir != p && f.nodes[dir] == nil {
		f.put(dir, sandbox.FileDir, 0o755, nil)
	}
	n := &node{info: sandbox.FileInfo{Name: path.Base(p), Path: p, Type: t, Size: int64(len(data)), Mode: mode, User: "root", ModTime: time.Now()}, data: data}
	if strings.HasPrefix(p, "/proc/") {
		n.info.Size = 0 // as the kernel says of its files
	}
	f.nodes[p] = n
	for _, w := range f.watch {
		select {
		case w <- sandbox.FileEvent{Path: p, Op: "write"}:
		default:
		}
	}
	return n
}

// Files implements server.Manager.
func (m *Memory) Files(_ context.Context, ref string) (sandbox.Files, error) {
	b, err := m.running("Files", ref)
	if err != nil {
		return nil, err
	}
	return b.files, nil
}

func (f *files) get(p string) (*node, error) {
	p = path.Clean(p)
	if n := f.nodes[p]; n != nil {
		return n, nil
	}
	return nil, sandbox.Errorf(sandbox.ErrNotFound, "file_not_found", "no file %s in the sandbox", p)
}

func (f *files) Stat(_ context.Context, _, p string) (sandbox.FileInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.get(p)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	return n.info, nil
}

// under lists p and what lies beneath it, sorted.
func (f *files) under(p string) []string {
	var out []string
	for q := range f.nodes {
		if q == p || p == "/" || strings.HasPrefix(q, p+"/") {
			out = append(out, q)
		}
	}
	slices.Sort(out)
	return out
}

func (f *files) List(_ context.Context, _, p string, depth int) ([]sandbox.FileInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p = path.Clean(p)
	n, err := f.get(p)
	if err != nil {
		return nil, err
	}
	if n.info.Type != sandbox.FileDir {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "not_a_directory", "%s is not a directory", p)
	}
	var out []sandbox.FileInfo
	for _, q := range f.under(p) {
		rel := strings.TrimPrefix(strings.TrimPrefix(q, p), "/")
		if rel != "" && strings.Count(rel, "/") < depth {
			out = append(out, f.nodes[q].info)
		}
	}
	return out, nil
}

func (f *files) Each(ctx context.Context, user, p string, depth int, g func(sandbox.FileInfo) error) error {
	all, err := f.List(ctx, user, p, depth)
	for i := 0; err == nil && i < len(all); i++ {
		err = g(all[i])
	}
	return err
}

func (f *files) Read(_ context.Context, _, p string, offset, limit int64) (sandbox.FileInfo, io.ReadCloser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.get(p)
	if err != nil {
		return sandbox.FileInfo{}, nil, err
	}
	if n.info.Type != sandbox.FileRegular {
		return n.info, nil, sandbox.Errorf(sandbox.ErrInvalid, "is_a_directory", "%s is a directory", p)
	}
	data := n.data[min(offset, int64(len(n.data))):]
	if limit >= 0 {
		data = data[:min(limit, int64(len(data)))]
	}
	return n.info, io.NopCloser(bytes.NewReader(data)), nil
}

func (f *files) Write(_ context.Context, _, p string, mode uint32, r io.Reader) (sandbox.FileInfo, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return sandbox.FileInfo{}, sandbox.Errorf(sandbox.ErrUnavailable, "broken_stream", "writing %s: %w", p, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.put(path.Clean(p), sandbox.FileRegular, mode, data).info, nil
}

func (f *files) Mkdir(_ context.Context, _, p string, mode uint32) (sandbox.FileInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.nodes[path.Clean(p)]; n != nil {
		return n.info, nil
	}
	return f.put(path.Clean(p), sandbox.FileDir, mode, nil).info, nil
}

func (f *files) Move(_ context.Context, _, from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.get(from); err != nil {
		return err
	}
	for _, q := range f.under(path.Clean(from)) {
		n := f.nodes[q]
		delete(f.nodes, q)
		f.put(path.Clean(to)+strings.TrimPrefix(q, path.Clean(from)), n.info.Type, n.info.Mode, n.data)
	}
	return nil
}

func (f *files) Remove(_ context.Context, _, p string, recursive bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.get(p); err != nil {
		return err
	}
	all := f.under(path.Clean(p))
	if path.Clean(p) == "/" {
		return sandbox.Errorf(sandbox.ErrConflict, "file_busy", "the root cannot be removed: name what is in it")
	}
	if len(all) > 1 && !recursive {
		return sandbox.Errorf(sandbox.ErrConflict, "directory_not_empty", "%s is not empty: use recursive", p)
	}
	for _, q := range all {
		delete(f.nodes, q)
	}
	return nil
}

func (f *files) Chmod(_ context.Context, _, p string, mode uint32) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.get(p)
	if err == nil {
		n.info.Mode = mode
	}
	return err
}

func (f *files) Watch(_ context.Context, _, p string, _ bool) (sandbox.FileWatch, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.get(p); err != nil {
		return nil, err
	}
	w := &watch{c: make(chan sandbox.FileEvent, 16), done: make(chan struct{})}
	f.watch = append(f.watch, w.c)
	return w, nil
}

type watch struct {
	c    chan sandbox.FileEvent
	once sync.Once
	done chan struct{}
}

func (w *watch) Next() (sandbox.FileEvent, error) {
	select {
	case e := <-w.c:
		return e, nil
	case <-w.done:
		return sandbox.FileEvent{}, io.EOF
	}
}

func (w *watch) Close() error { w.once.Do(func() { close(w.done) }); return nil }

func (f *files) TarOut(_ context.Context, _, p string) (io.ReadCloser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p = path.Clean(p)
	if _, err := f.get(p); err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, q := range f.under(p) {
		n := f.nodes[q]
		h := &tar.Header{Name: strings.TrimPrefix(strings.TrimPrefix(q, path.Dir(p)), "/"), Mode: int64(n.info.Mode), Size: n.info.Size, Typeflag: tar.TypeReg}
		if n.info.Type == sandbox.FileDir {
			h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		}
		if err := errors.Join(tw.WriteHeader(h), second(tw.Write(n.data))); err != nil {
			return nil, err
		}
	}
	return io.NopCloser(&buf), tw.Close()
}

func second(_ int, err error) error { return err }

func (f *files) TarIn(_ context.Context, _, p string, r io.Reader) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.get(p); err != nil {
		return err
	}
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return sandbox.Errorf(sandbox.ErrInvalid, "bad_archive", "reading the archive: %w", err)
		}
		data, err := io.ReadAll(tr)
		if err != nil {
			return sandbox.Errorf(sandbox.ErrInvalid, "bad_archive", "reading the archive: %w", err)
		}
		t := sandbox.FileRegular
		if h.Typeflag == tar.TypeDir {
			t = sandbox.FileDir
		}
		f.put(path.Join(p, h.Name), t, uint32(h.Mode), data)
	}
}
