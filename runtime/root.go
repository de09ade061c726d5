package runtime

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/runtime/guest"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// A sandbox's files are a stack of read-only layers and one upper. Both change
// in place:
//
//	freeze   [image, a] + upper   →  [image, a, upper] + fresh upper
//	replace  [image, a] + upper   →  [any stack]       + fresh upper
//
// The intent goes to the row first, without PID 1, so that a crash leaves the
// sandbox to be stopped. Whether a freeze had come to its rename the volume
// tells; a replacement is simply done again.
//
// Of a sandbox that runs neither row nor files wait for the disk, and a power
// cut may find either of them first. So each upper carries what it lies on
// (base), and after a power cut the row is made to say that: the files are those
// before the change or after it.

const (
	eventReset      = "sandbox.reset"
	eventRolledBack = "sandbox.rolled_back"
	codeRootBusy    = "root_busy"   // of PID 1
	codeMountPoint  = "mount_point" // of PID 1: the workload put something in the way of a volume
)

// stacked is the image of a root with the layers it stands on now.
func stacked(r state.Root) sandbox.Image {
	img := r.Image
	img.Layers = r.Stack
	return img
}

// replace gives a sandbox a fresh upper on another stack. Its processes, if
// it has any, are killed; id, address, name, limits and deadline stay.
type replace struct {
	stack []string
	point sandbox.SnapshotID
	event state.Change
}

// replaceRoot carries a replacement out, whatever status the sandbox is in.
func (m *Manager) replaceRoot(ctx context.Context, b *box, sb sandbox.Sandbox, r state.Root, to replace) (sandbox.Sandbox, error) {
	p := state.PendingRoot{Op: state.RootReplace, Stack: to.stack, Point: to.point, InitPID: sb.InitPID}
	stopped := sb.Status == sandbox.StatusStopped
	if err := m.roots.Room(); err != nil { // before anything is given up
		return sb, err
	}
	if err := m.state.BeginRoot(ctx, b.id, p, stopped); err != nil {
		return sb, err
	}
	r.Stack = to.stack
	var err error
	if stopped {
		// On disk before the row, which a power cut may not find beside the
		// upper there was.
		if err = m.replaceFiles(ctx, b.id, sb, p); err == nil {
			err = m.roots.Sync()
		}
	} else {
		err = m.newRoot(ctx, b, sb, stacked(r), baseFor(r.Image, p))
		b.reach.closeAll() // their servers are gone
	}
	if err == nil {
		err = m.state.FinishRoot(ctx, b.id, p, sb.InitPID, "", to.event, stopped)
	}
	if err != nil {
		return sb, m.rootFailed(ctx, b, sb, p, err)
	}
	return sb, nil
}

// rootFailed brings a change of root that failed half-way to an end: of
// files, always; of a shell that may stand on the wrong ones, by a stop.
func (m *Manager) rootFailed(ctx context.Context, b *box, sb sandbox.Sandbox, p state.PendingRoot, cause error) error {
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	if sb.Status == sandbox.StatusStopped {
		if err := m.completeRoot(clean, b.id, sb, p); err != nil {
			m.log.ErrorContext(ctx, "change the files of a sandbox: tried again when it starts", "sandbox", b.id, "err", err)
		}
		return cause
	}
	sb.InitPID, p.InitPID = 0, 0
	detail := "changing its files failed: " + explain(cause)
	_, _ = m.halt(clean, b, sb, state.Change{Detail: &detail, Actor: "daemon"}) // logs, and tries again by itself
	if err := m.completeRoot(clean, b.id, sb, p); err != nil {
		m.log.ErrorContext(ctx, "change the files of a sandbox: tried again when it starts", "sandbox", b.id, "err", err)
	}
	return cause
}

// completeRoot finishes a change of root that was cut off, or takes it back
// where it had not begun. Repeating it is safe.
func (m *Manager) completeRoot(ctx context.Context, id sandbox.ID, sb sandbox.Sandbox, p state.PendingRoot) error {
	switch {
	case p.Op == state.RootReplace:
		if err := m.replaceFiles(ctx, id, sb, p); err != nil {
			return err
		}
	case p.Layer != "" && !m.roots.HasLayer(p.Layer):
		return m.state.AbandonRoot(ctx, id, p)
	default:
		r, err := m.state.RootOf(ctx, id)
		if err == nil {
			err = m.roots.CreateUpperOn(id, sb.Spec.Limits, baseFor(r.Image, p))
		}
		if err != nil {
			return err
		}
	}
	if err := m.roots.Sync(); err != nil {
		return err
	}
	if p.Snapshot != nil {
		p.Snapshot.Durable = true
	}
	return m.state.FinishRoot(ctx, id, p, 0, "", state.Change{}, true)
}

// completeRoots finishes what an earlier daemon had begun, before anything of
// it is looked at. It returns the rows as they are then.
func (m *Manager) completeRoots(ctx context.Context, rows []state.Row) ([]state.Row, error) {
	changed := false
	for _, row := range rows {
		r, err := m.state.RootOf(ctx, row.ID)
		if err != nil || r.Pending == nil {
			continue // a sandbox without an image has no root to change
		}
		changed = true
		if row.Status != sandbox.StatusStopped && row.BootID != m.cfg.BootID {
			stack, _, known := m.baseOf(row.Sandbox, r.Image)
			switch {
			case known && slices.Equal(stack, r.Pending.Stack): // it was done
				r.Pending.Op = state.RootFreeze
			case known && !slices.Equal(stack, r.Stack): // others were done after it, or before: see fitRoot
				if err := m.state.AbandonRoot(ctx, row.ID, *r.Pending); err != nil {
					return rows, err
				}
				continue
			}
		}
		if err := m.completeRoot(ctx, row.ID, row.Sandbox, *r.Pending); err != nil {
			m.log.ErrorContext(ctx, "finish a change of a sandbox's files: tried again when it starts", "sandbox", row.ID, "err", err)
			continue
		}
		m.log.InfoContext(ctx, "finished a change of a sandbox's files", "sandbox", row.ID, "change", r.Pending.Op)
	}
	if !changed {
		return rows, nil
	}
	return m.state.Living(ctx)
}

// replaceFiles gives a sandbox without a shell a fresh upper.
func (m *Manager) replaceFiles(ctx context.Context, id sandbox.ID, sb sandbox.Sandbox, p state.PendingRoot) error {
	r, err := m.state.RootOf(ctx, id)
	if err == nil {
		err = m.roots.Discard(id, sb.Slot)
	}
	if err != nil {
		return err
	}
	return m.roots.CreateUpperOn(id, sb.Spec.Limits, baseFor(r.Image, p))
}

// newRoot puts a running sandbox on other layers and a fresh upper; every
// process is killed.
func (m *Manager) newRoot(ctx context.Context, b *box, sb sandbox.Sandbox, image sandbox.Image, base string) error {
	release, err := m.roots.SetAside(b.id, sb.Slot)
	if err != nil {
		return err
	}
	defer release()
	told, err := m.freshFiles(b.id, sb, image, base)
	if err != nil {
		return err
	}
	o, err := m.outfit(ctx, b, sb, image, told != rootfs.Identity{})
	if err != nil {
		return err
	}
	defer o.Close()
	var done guest.Timings
	o.config.Timings = &done
	b.setCut(cutReset)
	defer b.setCut(cutNone)
	err = b.guest.Configure(ctx, o.config)
	b.setBefore(done.Before)
	return err
}

// freezeRoot makes a sandbox's upper a layer and goes on with a fresh one: the
// quiesced snapshot, at a price that does not depend on what was written. It
// is class ErrConflict with code root_busy or mount_point, and nothing changed,
// where something is at work in the root, or its volumes could not be mounted
// once more.
func (m *Manager) freezeRoot(ctx context.Context, b *box, sb sandbox.Sandbox, r state.Root, snap sandbox.Snapshot) (sandbox.Snapshot, error) {
	stopped := sb.Status == sandbox.StatusStopped
	snap.Durable = stopped
	p := state.PendingRoot{
		Op: state.RootFreeze, Layer: snap.Layers[len(snap.Layers)-1], Stack: snap.Layers, Point: snap.ID,
		InitPID: sb.InitPID, Snapshot: &snap,
	}
	if err := m.state.BeginRoot(ctx, b.id, p, stopped); err != nil {
		return snap, err
	}
	takeBack := func(cause error) error {
		if err := m.roots.ThawUpper(b.id, p.Layer); err != nil {
			return m.rootFailed(ctx, b, sb, p, cause)
		}
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
		defer cancel()
		if err := m.state.AbandonRoot(clean, b.id, p); err != nil {
			m.log.ErrorContext(ctx, "take a snapshot back: the sandbox stops at the next start of the daemon", "sandbox", b.id, "err", err)
		}
		return cause
	}
	if err := m.roots.FreezeUpper(b.id, p.Layer); err != nil {
		return snap, takeBack(err)
	}
	if err := m.roots.CreateUpperOn(b.id, sb.Spec.Limits, baseFor(r.Image, p)); err != nil {
		return snap, takeBack(err)
	}
	boot := m.cfg.BootID
	if stopped {
		boot = ""
		if err := m.roots.Sync(); err != nil {
			return snap, takeBack(err)
		}
	} else if err := m.restack(ctx, b, sb, r, p.Stack); err != nil {
		switch sandbox.CodeOf(err) {
		case codeRootBusy, codeNotTried, codeMountPoint: // it stands where it stood
			return snap, takeBack(err)
		}
		return snap, m.rootFailed(ctx, b, sb, p, err)
	}
	if err := m.state.FinishRoot(ctx, b.id, p, sb.InitPID, boot, state.Change{}, stopped); err != nil {
		return snap, m.rootFailed(ctx, b, sb, p, err)
	}
	return snap, nil
}

// codeNotTried marks an error met before PID 1 was asked for anything.
const codeNotTried = "root_not_mounted"

// restack lets an idle PID 1 take a root of the same files on one layer more.
func (m *Manager) restack(ctx context.Context, b *box, sb sandbox.Sandbox, r state.Root, stack []string) error {
	r.Stack = stack
	o, err := m.outfit(ctx, b, sb, stacked(r), true)
	if err != nil {
		return sandbox.Errorf(sandbox.ErrUnavailable, codeNotTried, "mounting the files of sandbox %s anew: %w", b.id, err)
	}
	defer o.Close()
	o.config.IfIdle = true
	return b.guest.Configure(ctx, o.config)
}

// shorten puts one layer in place of those a stack begins with above its
// image, where the background has made one: for long stacks, and full ones.
func (m *Manager) shorten(ctx context.Context, base, stack []string, full bool) []string {
	if len(stack) < flattenAt && !full || len(stack) < len(base) || !slices.Equal(stack[:len(base)], base) {
		return stack
	}
	own := stack[len(base):]
	for n := len(own); n > 1; n-- {
		layer, err := m.state.Flattened(ctx, own[:n])
		if err == nil && layer != "" && m.roots.HasLayer(layer) {
			return slices.Concat(base, []string{layer}, own[n:])
		}
	}
	return stack
}

// base is what an upper lies on, as a change of root writes it beside it: the
// first layers of the sandbox's image, and others.
type base struct {
	Image int                `json:"image"`
	Own   []string           `json:"own"`
	Point sandbox.SnapshotID `json:"point,omitempty"`
}

// baseFor is the base of the upper that a change of root makes.
func baseFor(img sandbox.Image, p state.PendingRoot) string {
	n := 0
	for n < min(len(img.Layers), len(p.Stack)) && img.Layers[n] == p.Stack[n] {
		n++
	}
	text, _ := json.Marshal(base{Image: n, Own: p.Stack[n:], Point: p.Point}) // strings and a number
	return string(text)
}

// baseOf reads it; not known of an upper of an earlier version, or one that
// lies on something that is not there.
func (m *Manager) baseOf(sb sandbox.Sandbox, img sandbox.Image) (stack []string, point sandbox.SnapshotID, known bool) {
	text := m.roots.UpperBase(sb.ID)
	if text == rootfs.FirstBase {
		return img.Layers, sb.Spec.Snapshot, true
	}
	var b base
	if json.Unmarshal([]byte(text), &b) != nil || b.Image > len(img.Layers) || b.Image < 0 {
		return nil, "", false
	}
	for _, l := range b.Own {
		if isUpper(l) && !m.roots.HasLayer(l) {
			return nil, "", false
		}
	}
	return slices.Concat(img.Layers[:b.Image], b.Own), b.Point, true
}
