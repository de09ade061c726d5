package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/bench/report"
	"github.com/sandboxd/sandboxd/sandbox"
)

// fork makes each sandbox of a snapshot, against the peers' fresh ones on the
// same files.
func fork(ctx context.Context, b *bench) (err error) {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	snap, remove, err := d.frozen(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	cs := []contestant{
		{report.Floor, func(ctx context.Context) (float64, error) {
			return b.output(b.onHost(ctx, hello...), time.Now())
		}},
		{report.Us, func(ctx context.Context) (float64, error) {
			return d.createOf(ctx, sandbox.Spec{Snapshot: snap})
		}},
	}
	for _, p := range b.peers() {
		if err := p.Prepare("echo", hello...); err != nil {
			return err
		}
		cs = append(cs, contestant{p.Name(), b.runs(p, "echo")})
	}
	err = b.rounds(ctx, setting{
		name: "create-fork", title: "new sandbox of a snapshot → first byte of echo", unit: "ms", note: "peers: run, on the snapshot's image",
	}, b.plan.warm/2, b.plan.warmUp, b.settled, cs...)
	if err != nil {
		return err
	}
	return b.rounds(ctx, setting{
		name: "fork", title: "fork of a snapshot, until it runs", unit: "ms", note: "one request",
	}, b.plan.reset, b.plan.warmUp, b.settled, contestant{report.Us, func(ctx context.Context) (float64, error) {
		return d.forked(ctx, string(snap), 1)
	}})
}

// frozen is a snapshot with a file of its own.
func (d *daemon) frozen(ctx context.Context) (sandbox.SnapshotID, func() error, error) {
	id, remove, err := d.inUse(ctx)
	if err != nil {
		return "", nil, err
	}
	_, err = d.Files(id).Write(ctx, "", "/root/frozen", 0o600, strings.NewReader("frozen"))
	var s sandbox.Snapshot
	if err == nil {
		s, err = d.Snapshot(ctx, id, sandbox.SnapshotRequest{Sync: true})
	}
	if err = errors.Join(err, remove()); err != nil {
		return "", nil, err
	}
	return s.ID, func() error { _, err := d.RemoveSnapshot(context.WithoutCancel(ctx), string(s.ID)); return err }, nil
}

// forked times a fork and removes what it made.
func (d *daemon) forked(ctx context.Context, snap string, count int) (float64, error) {
	start := time.Now()
	made, err := d.Fork(ctx, snap, sandbox.ForkRequest{Count: count, NeedsAll: true})
	took := millis(start)
	if err != nil {
		return 0, err
	}
	return took, each(4, made, func(f sandbox.Fork) error { _, err := d.Remove(ctx, string(f.Sandbox.ID)); return err })
}

// forks makes many sandboxes of one snapshot with one request.
func forks(ctx context.Context, b *bench) (err error) {
	d, err := b.ours(ctx, b.plan.pool)
	if err != nil {
		return err
	}
	snap, remove, err := d.frozen(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	return b.rounds(ctx, setting{
		name: "forks", title: fmt.Sprintf("%d forks of one snapshot, all running", b.plan.burst), unit: "s",
		note: fmt.Sprintf("one request; %d shells ready", b.plan.pool),
	}, b.plan.bursts, 1, b.settled, contestant{report.Us, func(ctx context.Context) (float64, error) {
		took, err := d.forked(ctx, string(snap), b.plan.burst)
		return took / 1000, err
	}})
}

// rollback goes back to a snapshot in place.
func rollback(ctx context.Context, b *bench, d *daemon, id string) error {
	s, err := d.Snapshot(ctx, id, sandbox.SnapshotRequest{Sync: true})
	if err != nil {
		return err
	}
	return b.rounds(ctx, setting{name: "rollback", title: "rollback of a sandbox with a changed file", unit: "ms"},
		b.plan.reset, b.plan.warmUp, b.settled, contestant{report.Us, func(ctx context.Context) (float64, error) {
			if _, err := d.Files(id).Write(ctx, "", "/root/changed", 0o600, strings.NewReader("changed")); err != nil {
				return 0, err
			}
			start := time.Now()
			_, err := d.Rollback(ctx, id, string(s.ID))
			took := millis(start)
			if err != nil {
				return 0, err
			}
			if _, err = d.Files(id).Stat(ctx, "", "/root/changed"); !errors.Is(err, sandbox.ErrNotFound) {
				return 0, fmt.Errorf("the changed file outlived the rollback: %w", err)
			}
			return took, nil
		}})
}

// Names of our own contestants in the scenarios of snapshots.
const (
	emptyUpper = report.Us + ", nothing written"
	fullUpper  = report.Us + ", written much"
	cpReflink  = "cp -a" // with reflinks, as coreutils 9 does by itself
	cpData     = "cp -a, without reflinks"
	freshUpper = report.Us + ", just written"
	cpFresh    = "cp -a, just written"
)

// snapshots freezes an idle sandbox that wrote nothing and one that wrote
// much; and one at work that wrote much, against cp -a of the same files, the
// first time and again.
func snapshots(ctx context.Context, b *bench) (err error) {
	unmount, err := b.onXFS(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stopDaemon(context.WithoutCancel(ctx)), unmount()) }()
	d, err := b.ours(ctx, noPool)
	if err != nil {
		return err
	}
	much := fmt.Sprintf("%d MiB in %d files", b.plan.fileBytes>>20, b.plan.smallFiles)
	of := func(st upperState, reflink string) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) { return b.snapshotOf(ctx, d, st, reflink) }
	}
	err = b.rounds(ctx, setting{name: "snapshot", title: "snapshot of an idle sandbox", unit: "ms", note: "much is " + much},
		max(b.plan.transfers, 5), 1, b.settled, contestant{emptyUpper, of(upperState{}, "")}, contestant{fullUpper, of(upperState{written: true}, "")})
	if err != nil {
		return err
	}
	err = b.rounds(ctx, setting{
		name: "snapshot-live", title: "snapshot of a sandbox at work", unit: "ms",
		note: much + ", on XFS with reflinks, all on disk unless just written; cp -a of the same files on the same volume",
	}, max(b.plan.transfers, 5), 1, b.settled,
		contestant{report.Us, of(upperState{written: true, busy: true}, "")},
		contestant{cpReflink, of(upperState{written: true}, "always")},
		contestant{cpData, of(upperState{written: true}, "never")},
		contestant{freshUpper, of(upperState{written: true, busy: true, dirty: true}, "")},
		contestant{cpFresh, of(upperState{written: true, dirty: true}, "always")})
	if err != nil {
		return err
	}
	return b.snapshotsAgain(ctx, d)
}

// snapshotsAgain takes one snapshot after another of one sandbox at work, after
// some of its files changed; cp -a copies the same files, each time all.
func (b *bench) snapshotsAgain(ctx context.Context, d *daemon) (err error) {
	id, remove, err := d.inUse(ctx)
	if err != nil {
		return err
	}
	var taken []sandbox.SnapshotID
	defer func() {
		for _, s := range taken {
			_, rerr := d.RemoveSnapshot(context.WithoutCancel(ctx), string(s))
			err = errors.Join(err, rerr)
		}
		err = errors.Join(err, remove())
	}()
	if err := b.writeMuch(ctx, d, id, 1, 0); err != nil {
		return err
	}
	if _, err := d.StartProcess(ctx, id, sandbox.ProcessSpec{Argv: forever}); err != nil {
		return err
	}
	take := func(ctx context.Context) (float64, error) {
		start := time.Now()
		s, err := d.Snapshot(ctx, id, sandbox.SnapshotRequest{})
		took := millis(start)
		if err == nil {
			taken = append(taken, s.ID)
		}
		if err == nil && !s.Live {
			err = fmt.Errorf("snapshot %s was not taken live", s.ID)
		}
		return took, err
	}
	if _, err := take(ctx); err != nil {
		return err
	}
	turn := 0
	changed := func(oneIn int, then func(context.Context) (float64, error)) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			turn++
			if err := b.writeMuch(ctx, d, id, oneIn, turn); err != nil {
				return 0, err
			}
			if err := errors.Join(b.synced(), b.quiet(ctx, b.plan.calm, 100*b.plan.calm)); err != nil {
				return 0, err
			}
			return then(ctx)
		}
	}
	cs := []contestant{{report.Us, changed(100, take)}}
	for _, oneIn := range []int{1000, 10} {
		cs = append(cs, contestant{fmt.Sprintf("%s, 1 file in %d changed", report.Us, oneIn), changed(oneIn, take)})
	}
	cs = append(cs, contestant{cpReflink, changed(100, func(ctx context.Context) (float64, error) { return b.copyUpper(ctx, id, "always") })})
	return b.rounds(ctx, setting{
		name: "snapshot-again", title: "snapshot of a sandbox at work, again, after 1 file in 100 changed", unit: "ms",
		note: fmt.Sprintf("of %d files, on XFS with reflinks; cp -a of all of them on the same volume", b.plan.smallFiles),
	}, max(b.plan.transfers, 5), 1, b.settled, cs...)
}

// upperState is what a sandbox is like when its snapshot is taken.
type upperState struct {
	written bool // much
	busy    bool // a process runs
	dirty   bool // what was written is not on disk yet
}

// snapshotOf times the snapshot of a sandbox made for it, or, with reflink, a
// copy of its files with cp.
func (b *bench) snapshotOf(ctx context.Context, d *daemon, st upperState, reflink string) (took float64, err error) {
	id, remove, err := d.inUse(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	if st.dirty { // nobody else's is
		if err := b.synced(); err != nil {
			return 0, err
		}
	}
	if st.written {
		if err := b.writeMuch(ctx, d, id, 1, 0); err != nil {
			return 0, err
		}
	}
	if st.busy {
		if _, err := d.StartProcess(ctx, id, sandbox.ProcessSpec{Argv: forever}); err != nil {
			return 0, err
		}
	}
	if !st.dirty {
		err = b.synced()
	}
	if err := errors.Join(err, b.quiet(ctx, b.plan.calm, 100*b.plan.calm)); err != nil {
		return 0, err
	}
	if reflink != "" {
		return b.copyUpper(ctx, id, reflink)
	}
	start := time.Now()
	s, err := d.Snapshot(ctx, id, sandbox.SnapshotRequest{})
	took = millis(start)
	if err != nil {
		return 0, err
	}
	if s.Live != st.busy {
		return 0, fmt.Errorf("snapshot %s: live %v, want %v", s.ID, s.Live, st.busy)
	}
	_, err = d.RemoveSnapshot(ctx, string(s.ID))
	return took, err
}

// writeMuch fills a sandbox with files whose bytes are all different, or
// writes one in so many of them anew.
func (b *bench) writeMuch(ctx context.Context, d *daemon, id string, oneIn, turn int) error {
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		each := b.plan.fileBytes / int64(b.plan.smallFiles)
		body := slices.Repeat([]byte("0123456789abcdef"), int(each/16)+1)[:each]
		var err error
		for i := 0; i < b.plan.smallFiles && err == nil; i += oneIn {
			copy(body, fmt.Sprintf("%d %d", turn, i))
			err = tw.WriteHeader(&tar.Header{Name: fmt.Sprintf("d%03d/f%06d", i/100, i), Mode: 0o644, Size: each, Typeflag: tar.TypeReg})
			if err == nil {
				_, err = tw.Write(body)
			}
		}
		if err == nil {
			err = tw.Close()
		}
		_ = w.CloseWithError(err)
	}()
	return d.Files(id).TarIn(ctx, "", "/root", r)
}

// copyUpper times cp -a of what a sandbox wrote.
func (b *bench) copyUpper(ctx context.Context, id, reflink string) (took float64, err error) {
	ways, err := b.volume("sandboxes/" + id + "/upper")
	if err != nil {
		return 0, err
	}
	from := ways[0]
	to := filepath.Join(filepath.Dir(filepath.Dir(filepath.Dir(from))), "copy")
	took, err = b.ran(exec.CommandContext(ctx, "cp", "-a", "--reflink="+reflink, from, to))
	return took, errors.Join(err, os.RemoveAll(to))
}

// onXFS gives the daemon that starts next a state directory on an XFS with
// reflinks of its own, and with project quotas where the kernel has them:
// without, a daemon that enforces limits would make a volume of its own in it.
func (b *bench) onXFS(ctx context.Context) (unmount func() error, err error) {
	if err := b.stopDaemon(ctx); err != nil {
		return nil, err
	}
	image, at := filepath.Join(b.dir, "xfs.img"), filepath.Join(b.dir, "xfs")
	f, err := os.Create(image)
	if err != nil {
		return nil, err
	}
	size := 6*b.plan.fileBytes + 2<<30
	err = errors.Join(f.Truncate(size), f.Close(), os.Mkdir(at, 0o700))
	if err == nil {
		err = command(ctx, "mkfs.xfs", "-q", "-m", "reflink=1", image)
	}
	if err == nil && command(ctx, "mount", "-o", "loop,noatime,prjquota", image, at) != nil {
		err = command(ctx, "mount", "-o", "loop,noatime", image, at)
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(at), os.Remove(image))
	}
	b.stateDir = filepath.Join(at, "state")
	return func() error {
		b.stateDir = filepath.Join(b.dir, "state")
		return errors.Join(command(context.WithoutCancel(ctx), "umount", at), os.Remove(at), os.Remove(image))
	}, nil
}
