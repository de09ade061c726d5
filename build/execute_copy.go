package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

// mkdir makes a working directory.
func (s *step) mkdir(ctx context.Context, id sandbox.ID) error {
	f, err := s.inside(ctx, id)
	if err != nil {
		return err
	}
	d := s.op.dir
	anchor, err := f.anchor(ctx, d.path)
	if err != nil || anchor == d.path {
		return err
	}
	as, err := f.owner(ctx, d.user)
	if err != nil {
		return err
	}
	a := &archiver{op: &copyOp{}, anchor: anchor, as: as}
	return f.send(ctx, anchor, func(w io.Writer) error {
		return a.write(w, []placed{{to: d.path, made: true, entry: &entry{kind: dir, mode: 0o755}}})
	})
}

// copy copies out of the context, of another stage or of an image. Files of
// another stage or image are only looked at if the cache does not know the
// copy by where they come from.
func (s *step) copy(ctx context.Context, base sandbox.Image) (sandbox.Image, error) {
	o := s.op.copy
	if o.from.stage < 0 && o.from.image == "" {
		return s.copyTree(ctx, base, s.x.context, nil)
	}
	from, err := s.source(ctx)
	if err != nil {
		return base, err
	}
	link := o.linkKey(base, from)
	made, ok, err := s.lookup(ctx, link)
	if err != nil {
		return base, err
	}
	if ok {
		return made, s.hit()
	}
	t, err := s.gather(ctx, from)
	if err != nil {
		return base, s.failed(err)
	}
	defer s.x.b.close(t)
	return s.copyTree(ctx, base, t, []string{link})
}

// source is the image a COPY --from names.
func (s *step) source(ctx context.Context) (sandbox.Image, error) {
	o := s.op.copy
	if o.from.stage >= 0 {
		return s.x.wait(ctx, o.from.stage)
	}
	img, err := s.x.b.cfg.Images.Image(ctx, o.from.image)
	if errors.Is(err, sandbox.ErrNotFound) {
		return img, s.x.at(sandbox.ErrNotFound, "image_not_found", s.op.line, err)
	}
	return nameless(img), err
}

// copyTree copies out of a tree, unless the cache knows it under the keys or
// by its content.
func (s *step) copyTree(ctx context.Context, base sandbox.Image, t *Tree, keys []string) (sandbox.Image, error) {
	o := s.op.copy
	chosen, err := t.choose(o)
	if err != nil {
		if errors.Is(err, errNoSource) {
			err = fmt.Errorf("%w %s", err, s.where())
		}
		return base, s.x.at(sandbox.ErrInvalid, codeFailed, s.op.line, err)
	}
	keys = append(keys, o.key(base, chosen))
	return s.cached(ctx, base, keys, func(ctx context.Context, id sandbox.ID) error {
		f, err := s.inside(ctx, id)
		if err != nil {
			return err
		}
		return s.place(ctx, f, t, chosen)
	})
}

// where says where the sources of a copy are looked for.
func (s *step) where() string {
	switch o := s.op.copy; {
	case o.from.stage >= 0:
		return "in stage " + s.x.file.stageName(o.from.stage)
	case o.from.image != "":
		return "in image " + o.from.image
	}
	return "in the context: is it left out by .dockerignore?"
}

// place sends what was chosen into the sandbox, in the order of the sources.
func (s *step) place(ctx context.Context, f inside, t *Tree, chosen []selection) error {
	o := s.op.copy
	as, err := f.owner(ctx, o.chown)
	if err != nil {
		return err
	}
	invalid := func(err error) error { return s.x.at(sandbox.ErrInvalid, codeFailed, s.op.line, err) }
	isDir, err := f.isDir(ctx, path.Clean(o.dest))
	if err != nil {
		return err
	}
	if err := o.check(chosen, isDir); err != nil {
		return invalid(err)
	}
	for len(chosen) > 0 {
		n, packed, err := s.next(t, chosen)
		if err != nil {
			return invalid(err)
		}
		if packed {
			err = s.unpack(ctx, f, t, chosen[0].top, as)
		} else {
			err = s.send(ctx, f, t, chosen[:n], as)
		}
		if err != nil {
			return err
		}
		chosen = chosen[n:]
	}
	return nil
}

// next tells how many of the sources go together: one archive to unpack, or
// all files up to it.
func (s *step) next(t *Tree, chosen []selection) (n int, packed bool, err error) {
	if !s.op.copy.unpack {
		return len(chosen), false, nil
	}
	for i, c := range chosen {
		packed, err := t.packed(c)
		if err != nil || packed {
			return max(i, 1), packed && i == 0, err
		}
	}
	return len(chosen), false, nil
}

// send copies files as they are.
func (s *step) send(ctx context.Context, f inside, t *Tree, chosen []selection, as *owner) error {
	o := s.op.copy
	dest := path.Clean(o.dest)
	isDir, err := f.isDir(ctx, dest)
	if err != nil {
		return err
	}
	plan, err := o.plan(chosen, isDir)
	if err != nil {
		return s.x.at(sandbox.ErrInvalid, codeFailed, s.op.line, err)
	}
	anchor := dest
	if !isDir {
		if anchor, err = f.anchor(ctx, path.Dir(dest)); err != nil {
			return err
		}
	}
	a := &archiver{tree: t, op: o, anchor: anchor, as: as}
	return f.send(ctx, anchor, func(w io.Writer) error { return a.write(w, plan) })
}

// gather reads the sources of a copy out of another stage or image, which
// runs in a sandbox meanwhile.
func (s *step) gather(ctx context.Context, from sandbox.Image) (*Tree, error) {
	t, err := newTree(s.x.b.cfg.Dir, s.x.b.bounds())
	if err != nil {
		return nil, err
	}
	err = s.x.sandbox(ctx, from, sandbox.NetworkPolicy{Mode: sandbox.NetworkOff}, func(id sandbox.ID) error {
		f, err := s.inside(ctx, id)
		if err != nil {
			return err
		}
		for _, src := range s.op.copy.sources {
			if err := t.gather(ctx, f, fixed(src)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		s.x.b.close(t)
		return nil, err
	}
	t.seal()
	return t, nil
}

// fixed is the part of a source before its first pattern.
func fixed(src string) string {
	var parts []string
	for p := range strings.SplitSeq(src, "/") {
		if hasPattern(p) {
			break
		}
		parts = append(parts, p)
	}
	return strings.Join(parts, "/")
}

// gather reads one file or directory of a sandbox into the tree, under the
// name it was asked for. What is missing is told when it is looked for.
func (t *Tree) gather(ctx context.Context, f inside, src string) error {
	real, err := f.real(ctx, src)
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	r, err := f.TarOut(ctx, asRoot, real)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }() // read only
	base := path.Base(real)
	return t.fill(ctx, r, true, func(name string) (string, bool) {
		if real == "/" {
			return path.Join(src, name), true
		}
		if name == base {
			return src, true
		}
		rest, ok := strings.CutPrefix(name, base+"/")
		return path.Join(src, rest), ok
	})
}
