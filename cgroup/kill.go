package cgroup

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Freeze stops the workload where it stands, memory kept, and returns when
// the kernel reports all of it stopped. Repeating it is safe. Only work is
// frozen: PID 1 goes on, so that a paused sandbox still answers, lists its
// processes and serves files, and so that its socket does not fill up with
// unanswered calls. If ctx ends first the workload is thawed again and the
// error is ErrDeadline.
func (t *Tree) Freeze(ctx context.Context, id sandbox.ID) error {
	work, err := t.at(id, partWork)
	if err != nil {
		return err
	}
	err = write(work, "cgroup.freeze", "1")
	if err == nil {
		err = await(ctx, work, "frozen", 1)
	}
	if errors.Is(err, sandbox.ErrDeadline) {
		err = errors.Join(err, write(work, "cgroup.freeze", "0"))
	}
	if err != nil {
		return fmt.Errorf("freezing %s: %w", id, notFound(id, err))
	}
	return nil
}

// Thaw lets a frozen workload go on. Repeating it is safe.
func (t *Tree) Thaw(ctx context.Context, id sandbox.ID) error {
	work, err := t.at(id, partWork)
	if err != nil {
		return err
	}
	err = write(work, "cgroup.freeze", "0")
	if err == nil {
		err = await(ctx, work, "frozen", 0)
	}
	if err != nil {
		return fmt.Errorf("thawing %s: %w", id, notFound(id, err))
	}
	return nil
}

// Frozen reports whether the workload is frozen.
func (t *Tree) Frozen(id sandbox.ID) (bool, error) {
	work, err := t.at(id, partWork)
	if err != nil {
		return false, err
	}
	n, err := readFlat(work, "cgroup.events", "frozen")
	return n == 1, notFound(id, err)
}

// KillWork kills every process of the workload, forks in flight included, and
// returns when none is left; PID 1 lives on and may start others. A frozen
// workload dies too. A sandbox that is gone has none, which is success.
// ErrDeadline when ctx ends first.
func (t *Tree) KillWork(ctx context.Context, id sandbox.ID) error {
	return t.killPart(ctx, id, partWork)
}

// Kill kills every process of the sandbox, PID 1 included; otherwise like
// KillWork. Where none is left it only looks: cgroup.kill takes the lock of all
// cgroups, which whoever moves a process elsewhere holds for milliseconds.
func (t *Tree) Kill(ctx context.Context, id sandbox.ID) error {
	dir, err := t.at(id, partID)
	if err != nil {
		return err
	}
	if n, err := readFlat(dir, "cgroup.events", "populated"); err == nil && n == 0 || gone(err) {
		return nil
	}
	return t.killPart(ctx, id, partID)
}

func (t *Tree) killPart(ctx context.Context, id sandbox.ID, part string) error {
	dir, err := t.at(id, part)
	if err != nil {
		return err
	}
	if err := t.kill(ctx, dir); err != nil {
		return fmt.Errorf("killing processes of %s: %w", id, err)
	}
	return nil
}

// kill empties dir and everything beneath (cgroup-v2.rst, cgroup.kill; Linux
// 5.14).
func (t *Tree) kill(ctx context.Context, dir string) error {
	err := write(dir, "cgroup.kill", "1")
	if err == nil {
		err = await(ctx, dir, "populated", 0)
	}
	if gone(err) {
		return nil
	}
	return err
}

// await waits until a key of the cgroup's cgroup.events has a value.
func await(ctx context.Context, dir, key string, want uint64) error {
	return poll(ctx, func() (bool, error) {
		n, err := readFlat(dir, "cgroup.events", key)
		return err != nil || n == want, err
	})
}

// endNote is where a sandbox's cgroup says that it is about to end: an extended
// attribute that goes with it (xattr(7); cgroup2 keeps those of trusted.*).
const endNote = "trusted.sandboxd.end"

// NoteEnd notes at a sandbox's cgroup that it is being ended, and how, for a
// daemon that finds it after this one died. Repeating it replaces the note.
func (t *Tree) NoteEnd(id sandbox.ID, how []byte) error {
	dir, err := t.at(id, partID)
	if err != nil {
		return err
	}
	if err := unix.Setxattr(dir, endNote, how, 0); err != nil {
		return fmt.Errorf("noting the end of %s: %w", id, err)
	}
	return nil
}

// EndNote returns what NoteEnd noted, nil where it did not or the cgroup is
// gone.
func (t *Tree) EndNote(id sandbox.ID) []byte {
	dir, err := t.at(id, partID)
	if err != nil {
		return nil
	}
	how := make([]byte, 4096)
	n, err := unix.Getxattr(dir, endNote, how)
	if err != nil {
		return nil
	}
	return how[:n]
}
