package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/sandbox"
)

// createFresh runs each sandbox on files that no sandbox was ever made of:
// whatever is kept per image or per root is not there yet. Importing, copying
// and removing them is not timed.
func createFresh(ctx context.Context, b *bench) error {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	cs := []contestant{{report.Us, func(ctx context.Context) (float64, error) { return b.onFreshImage(ctx, d) }}}
	for _, p := range b.peers() {
		cs = append(cs, contestant{p.Name(), func(ctx context.Context) (float64, error) { return b.onFreshRoot(ctx, p) }})
	}
	return b.rounds(ctx, setting{
		name: "create-fresh", title: "new sandbox → first byte of echo, files never used before", unit: "ms",
		note: "sandboxd: an image imported just before, which is not timed; peers: a fresh copy of the root",
	}, b.plan.fresh, b.plan.warmUp, b.settled, cs...)
}

// freshRoot copies the root into a directory that differs from all others by
// one file, and waits until both are on the disk.
func (b *bench) freshRoot(ctx context.Context) (dir string, remove func() error, err error) {
	if dir, err = os.MkdirTemp(b.dir, "fresh-"); err != nil {
		return "", nil, fmt.Errorf("fresh root: %w", err)
	}
	remove = func() error { return os.RemoveAll(dir) }
	b.copies++
	err = errors.Join(
		os.Chmod(dir, 0o755),
		command(ctx, "cp", "-a", b.root+"/.", dir),
		os.WriteFile(filepath.Join(dir, "etc/unique"), []byte(strconv.Itoa(b.copies)+"\n"), 0o644),
	)
	if err == nil {
		err = b.synced()
	}
	if err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}

// synced writes what is dirty on the scratch directory's disk, and on the
// volume of the daemon, which may be another filesystem in a file on it: that
// one first.
func (b *bench) synced() error {
	for _, path := range []string{b.stateDir, b.dir} {
		dir, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) { // no daemon was started yet
			continue
		}
		if err != nil {
			return err
		}
		err = unix.Syncfs(int(dir.Fd()))
		if err := errors.Join(err, dir.Close()); err != nil {
			return fmt.Errorf("write the disk's dirty pages: %w", err)
		}
	}
	return nil
}

func (b *bench) onFreshImage(ctx context.Context, d *daemon) (took float64, err error) {
	dir, remove, err := b.freshRoot(ctx)
	if err != nil {
		return 0, err
	}
	image := filepath.Base(dir)
	err = errors.Join(d.importDir(ctx, image, dir), remove())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, d.RemoveImage(context.WithoutCancel(ctx), image)) }()
	b.owes = true
	if err := errors.Join(b.synced(), b.settled(ctx)); err != nil {
		return 0, err
	}
	return d.createOf(ctx, sandbox.Spec{Image: image})
}

func (b *bench) onFreshRoot(ctx context.Context, p runner) (took float64, err error) {
	dir, remove, err := b.freshRoot(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if err := errors.Join(p.PrepareOn(dir, "fresh", hello...), b.settled(ctx)); err != nil {
		return 0, err
	}
	return b.runs(p, "fresh")(ctx)
}
