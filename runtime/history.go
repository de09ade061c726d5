package runtime

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// keepAuto is how many restore points a sandbox keeps, the newest.
	keepAuto = 100
	// maxUndo bounds the walk back through the snapshots.
	maxUndo = 10000
)

// restorePoint takes a snapshot after a command, if the sandbox wants that and
// the command, or anything since the last one, changed files.
func (m *Manager) restorePoint(b *box, p sandbox.Process) {
	if !b.wantsPoints() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), createTimeout)
	defer cancel()
	if err := b.lock(ctx); err != nil {
		return
	}
	defer b.unlock()
	if m.box(b.id) != b || !b.runs() || b.sawPoint(p.ID) {
		return
	}
	if err := m.tryPoint(ctx, b, p); err != nil {
		m.log.WarnContext(ctx, "take a restore point", "sandbox", b.id, "process", p.ID, "err", err)
		m.record(ctx, sandbox.Event{Sandbox: b.id, Type: "snapshot.failed", Actor: "daemon", Data: map[string]string{
			"kind": string(sandbox.SnapshotAuto), "process": string(p.ID), "detail": explain(err),
		}})
		return
	}
	b.notePoint(p.ID)
}

func (m *Manager) tryPoint(ctx context.Context, b *box, p sandbox.Process) error {
	same, err := m.roots.Unchanged(b.id)
	if err != nil || same {
		return err
	}
	stamp, err := m.stampOf(ctx, b)
	if err != nil || stamp == b.stamp {
		return err
	}
	sb, err := m.state.Sandbox(ctx, b.id)
	if err != nil {
		return err
	}
	snap, err := m.snapshot(ctx, b, sb, sandbox.SnapshotRequest{
		Kind: sandbox.SnapshotAuto, Process: p.ID, Comment: clip(strings.ToValidUTF8(strings.Join(p.Argv, " "), "?"), 1000), Actor: "daemon",
	})
	if err != nil {
		return err
	}
	if b.stamp = ""; snap.Live { // the upper it was taken of goes on
		b.stamp = stamp
	}
	return m.keepNewest(ctx, b.id, sandbox.SnapshotAuto, keepAuto)
}

// stampOf is a stamp of the upper that later ones can equal, where the upper is
// going to stay: else the next command that changes nothing would be taken for
// one that did.
func (m *Manager) stampOf(ctx context.Context, b *box) (string, error) {
	stamp, err := m.roots.UpperStamp(b.id)
	if err != nil || !strings.Contains(stamp, rootfs.FreshStamp) {
		return stamp, err
	}
	if info, err := b.guest.Ping(ctx); err != nil || info.Live == 0 {
		return stamp, err // there will be a new upper
	}
	pause(ctx, rootfs.StampTick)
	return m.roots.UpperStamp(b.id)
}

// keepNewest removes the oldest snapshots of one kind beyond keep.
func (m *Manager) keepNewest(ctx context.Context, id sandbox.ID, kind sandbox.SnapshotKind, keep int) error {
	all, err := m.state.Snapshots(ctx, sandbox.SnapshotFilter{Sandbox: id, Kinds: []sandbox.SnapshotKind{kind}})
	if err != nil || len(all) <= keep {
		return err
	}
	return m.removeAll(ctx, all[keep:])
}

// errEnough ends a walk that knows what it was to find out.
var errEnough = errors.New("enough")

// changedSince reports whether the files of a sandbox differ from a snapshot,
// or, with none, from those it began with.
func (m *Manager) changedSince(ctx context.Context, id sandbox.ID, point sandbox.SnapshotID) (bool, error) {
	r, err := m.state.RootOf(ctx, id)
	if err != nil {
		return false, err
	}
	from := r.Image.Layers
	if point != "" {
		s, err := m.state.Snapshot(ctx, string(point))
		switch {
		case err == nil:
			from = s.Layers
		case !errors.Is(err, sandbox.ErrNotFound): // of one made of a snapshot that is gone: its image has the layers
			return false, err
		}
	}
	if slices.Equal(from, r.Stack) {
		if same, err := m.roots.Unchanged(id); err != nil || same {
			return false, err
		}
	}
	err = m.roots.Diff(ctx, from, r.Stack, id, func(sandbox.FileChange) error { return errEnough })
	if errors.Is(err, errEnough) {
		return true, nil
	}
	return false, err
}

// History returns the snapshots a sandbox's files came through, newest first,
// from the one they were last frozen as or put back on, and whether they
// changed since.
func (m *Manager) History(ctx context.Context, ref string) (sandbox.History, error) {
	m.imports.RLock()
	defer m.imports.RUnlock()
	_, sb, err := m.find(ctx, ref)
	if err != nil {
		return sandbox.History{}, err
	}
	r, err := m.state.RootOf(ctx, sb.ID)
	if err != nil {
		return sandbox.History{}, err
	}
	h := sandbox.History{Sandbox: sb.ID, Point: r.Point, Points: []sandbox.Snapshot{}}
	if h.Changed, err = m.changedSince(ctx, sb.ID, r.Point); err != nil {
		return h, err
	}
	for at := r.Point; at != "" && at != sb.Spec.Snapshot && len(h.Points) < maxUndo; {
		s, err := m.state.Snapshot(ctx, string(at))
		if errors.Is(err, sandbox.ErrNotFound) {
			break
		}
		if err != nil {
			return h, err
		}
		h.Points = append(h.Points, s)
		at = s.Parent
	}
	return h, nil
}

// Undo puts a sandbox back by so many steps: what changed since the last
// snapshot is one, each snapshot before it is another, and the files it began
// with are the last. Processes are killed, as by Rollback. ErrConflict with
// code nothing_to_undo where there are fewer.
func (m *Manager) Undo(ctx context.Context, ref string, steps int, actor string) (sandbox.Sandbox, error) {
	if err := m.open(); err != nil {
		return sandbox.Sandbox{}, err
	}
	if steps == 0 {
		steps = 1
	}
	if steps < 0 || steps > maxUndo {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_steps", "undo %d steps: use 1 to %d", steps, maxUndo)
	}
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if err := replaceable(sb, "undo"); err != nil {
			return sb, err
		}
		if _, err := m.wholeRoot(ctx, b.id, sb); err != nil {
			return sb, err
		}
		h, err := m.History(ctx, string(b.id))
		if err != nil {
			return sb, err
		}
		// The states to go back to, nearest first.
		var back []sandbox.SnapshotID
		for i, p := range h.Points {
			if i > 0 || h.Changed {
				back = append(back, p.ID)
			}
		}
		if len(h.Points) > 0 || h.Changed {
			back = append(back, "") // what it began with
		}
		if steps > len(back) {
			return sb, sandbox.Errorf(sandbox.ErrConflict, "nothing_to_undo", "sandbox %s can go back %d steps, not %d: 'sandbox log %s' shows them", b.id, len(back), steps, b.id)
		}
		b.stamp = ""
		return m.rollback(ctx, b, sb, back[steps-1], actor)
	})
}

// maxResetPaths is how many paths one request can reset.
const maxResetPaths = 1000

// ResetPaths gives some paths of a running sandbox the content they began
// with, and takes away what was not there then; processes go on. Where a path
// leads through a link, is a mount, has one in it or lies in one, none is
// reset. Otherwise it is done path by path: after an error those before it are.
func (m *Manager) ResetPaths(ctx context.Context, ref string, paths []string, actor string) (sandbox.Sandbox, error) {
	if err := m.open(); err != nil {
		return sandbox.Sandbox{}, err
	}
	if len(paths) > maxResetPaths {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_path", "%d paths to reset: at most %d", len(paths), maxResetPaths)
	}
	for _, p := range paths {
		if err := sandbox.ValidateWorkDir(p); err != nil || p == "" || path.Clean(p) == "/" {
			return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_path", "%.200q cannot be reset by itself: use absolute paths below '/', or reset the whole sandbox", p)
		}
	}
	return m.change(ctx, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if sb.Status != sandbox.StatusRunning {
			return sb, wrongState(sb, "reset paths of", sandbox.StatusRunning)
		}
		m.imports.RLock()
		defer m.imports.RUnlock()
		r, err := m.wholeRoot(ctx, b.id, sb)
		if err != nil {
			return sb, err
		}
		for _, p := range paths { // before anything is removed
			if err := b.guest.Reset(ctx, path.Clean(p), nil); err != nil {
				return sb, err
			}
		}
		for _, p := range paths {
			if err := m.resetPath(ctx, b, r.Image.Layers, path.Clean(p)); err != nil {
				return sb, err
			}
		}
		if err := m.resetIdentity(ctx, b, sb, paths); err != nil {
			return sb, err
		}
		m.record(ctx, sandbox.Event{Sandbox: b.id, Type: eventReset, Actor: actor, Data: map[string]string{"only": clip(strings.Join(paths, " "), 500)}})
		return sb, nil
	})
}

// resetPath replaces one path by what the layers show there. PID 1 does all
// of it inside.
func (m *Manager) resetPath(ctx context.Context, b *box, layers []string, name string) error {
	r, w := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		_, err := m.roots.ExportPath(ctx, layers, name, w)
		sent <- errors.Join(err, w.CloseWithError(err))
	}()
	err := b.guest.Reset(ctx, name, r)
	_ = r.CloseWithError(io.ErrClosedPipe) // whoever still writes may stop
	if serr := <-sent; err == nil {
		err = serr
	}
	return err
}

// resetIdentity writes the files that tell a sandbox its name and neighbours, as
// at its start, where a reset of paths took them along.
func (m *Manager) resetIdentity(ctx context.Context, b *box, sb sandbox.Sandbox, paths []string) error {
	identity, err := m.identity(sb)
	if err != nil {
		return err
	}
	for name, content := range identity.Files() {
		name = "/etc/" + name
		taken := slices.ContainsFunc(paths, func(p string) bool { return path.Clean(p) == name || path.Clean(p) == "/etc" })
		if !taken || strings.TrimSpace(content) == "" {
			continue
		}
		var archive bytes.Buffer
		tw := tar.NewWriter(&archive)
		err := tw.WriteHeader(&tar.Header{Name: path.Base(name), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content)), ModTime: time.Now()})
		if err == nil {
			_, err = tw.Write([]byte(content))
		}
		if err = errors.Join(err, tw.Close()); err == nil {
			err = b.guest.Reset(ctx, name, &archive)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
