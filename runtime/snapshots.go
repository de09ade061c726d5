package runtime

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

const (
	// flattenAt is how many layers a stack may have before those above its
	// image are made one in the background.
	flattenAt = 32
	// forksAtOnce is how many sandboxes of one fork are made at the same time.
	forksAtOnce = 16
	// maxForks is how many one request can ask for.
	maxForks = 1000
	// syncDelay lets snapshots taken in a row reach the disk together.
	syncDelay = 200 * time.Millisecond
)

// Snapshot freezes the files of a sandbox and returns what holds them. Where
// nothing is at work in it this takes the same short time whatever was
// written; else its processes are held while the upper is copied, by
// reference where the volume can. Memory and processes are no part of it.
//
// A crash of the daemon never loses a snapshot this returned; a power cut may
// until it is durable, which Sync waits for. ErrConflict with code
// snapshot_name_taken or wrong_state, ErrExhausted with code volume_full.
func (m *Manager) Snapshot(ctx context.Context, ref string, req sandbox.SnapshotRequest) (snap sandbox.Snapshot, err error) {
	if err := req.Validate(); err != nil {
		return snap, err
	}
	_, err = m.changeAs(ctx, WorkSnapshot, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		snap, err = m.snapshot(ctx, b, sb, req)
		return sb, err
	})
	if err != nil || !req.Sync || snap.Durable {
		return snap, err
	}
	if err := m.harden(context.WithoutCancel(ctx), snap.ID); err != nil {
		return snap, err
	}
	return m.state.Snapshot(ctx, string(snap.ID))
}

// snapshot is Snapshot for a caller that holds the box.
func (m *Manager) snapshot(ctx context.Context, b *box, sb sandbox.Sandbox, req sandbox.SnapshotRequest) (sandbox.Snapshot, error) {
	switch sb.Status {
	case sandbox.StatusRunning, sandbox.StatusPaused, sandbox.StatusStopped:
	default:
		return sandbox.Snapshot{}, wrongState(sb, "snapshot", sandbox.StatusRunning)
	}
	key := snapshotKey(req)
	if before, err := m.snapshotBefore(ctx, b.id, req, key); err != nil || before.ID != "" {
		return before, err
	}
	// No layer is collected between its making and the row that names it.
	m.imports.RLock()
	defer m.imports.RUnlock()
	r, err := m.wholeRoot(ctx, b.id, sb)
	if err == nil {
		err = m.filesOf(ctx, &sb)
	}
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	snap := sandbox.Snapshot{
		ID: sandbox.NewSnapshotID(), Name: req.Name, Owner: sb.Owner, Kind: req.Kind, Sandbox: b.id, Parent: r.Point,
		CreatedAt: time.Now().UTC(), Comment: req.Comment, Process: req.Process, Spec: sb.Spec, Image: m.imageBelow(ctx, sb, r),
		Key: key,
	}
	if snap.Kind == "" {
		snap.Kind = sandbox.SnapshotManual
	}
	bytes, files, known, err := m.roots.Usage(b.id, sb.Slot)
	if err == nil && known {
		snap.SizeBytes, snap.Files = int64(bytes), int64(files)
	}
	f := frozen{m: m, sb: sb, known: known, base: r.Image.Layers}
	if err := f.count(ctx, r.Stack); err != nil {
		return snap, err
	}
	snap.Layers = append(slices.Clone(m.shorten(ctx, snap.Image.Layers, r.Stack, f.full())), m.roots.NewLayer())
	snap, err = m.freezeOrCopy(ctx, b, sb, r, snap, &f)
	if err != nil {
		return snap, err
	}
	m.afterSnapshot(snap, f.full())
	return snap, nil
}

// snapshotKey is an idempotency key as a snapshot's record has it.
func snapshotKey(req sandbox.SnapshotRequest) string {
	if req.IdempotencyKey == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(req.IdempotencyKey))
	return hex.EncodeToString(sum[:16])
}

// snapshotBefore returns the snapshot of a sandbox that an idempotency key made
// before, or none.
func (m *Manager) snapshotBefore(ctx context.Context, id sandbox.ID, req sandbox.SnapshotRequest, key string) (sandbox.Snapshot, error) {
	if key == "" {
		return sandbox.Snapshot{}, nil
	}
	all, err := m.state.Snapshots(ctx, sandbox.SnapshotFilter{Sandbox: id})
	for _, s := range all {
		switch {
		case s.Key != key:
		case s.Name != req.Name || s.Comment != req.Comment:
			return s, sandbox.Errorf(sandbox.ErrConflict, "idempotency_mismatch", "the idempotency key was used for another request, which made snapshot %s: use a new key", s.ID)
		default:
			return s, nil
		}
	}
	return sandbox.Snapshot{}, err
}

// imageBelow is the image a sandbox's files stand on, without what other
// sandboxes wrote over it: the layers of one made of a snapshot are flattened
// together with those below, or stacks would grow with every fork of a fork.
func (m *Manager) imageBelow(ctx context.Context, sb sandbox.Sandbox, r state.Root) sandbox.Image {
	img := r.Image
	if sb.Spec.Snapshot == "" {
		return img
	}
	s, err := m.state.Snapshot(ctx, string(sb.Spec.Snapshot))
	if n := len(s.Image.Layers); err == nil && n <= len(img.Layers) && slices.Equal(s.Image.Layers, img.Layers[:n]) {
		img.Layers = s.Image.Layers
	} else if n := slices.IndexFunc(img.Layers, isUpper); n >= 0 { // that is gone
		img.Layers = img.Layers[:n]
	}
	return img
}

// isUpper tells layers that sandboxes wrote from those that were imported.
func isUpper(layer string) bool { return strings.HasPrefix(layer, rootfs.UpperPrefix) }

func (m *Manager) freezeOrCopy(ctx context.Context, b *box, sb sandbox.Sandbox, r state.Root, snap sandbox.Snapshot, f *frozen) (sandbox.Snapshot, error) {
	idle := sb.Status == sandbox.StatusStopped
	if !idle {
		info, err := b.guest.Ping(ctx)
		if err != nil {
			return snap, err
		}
		idle = info.Live == 0
	}
	if idle {
		if err := f.room(ctx, snap.Layers, snap.SizeBytes); err != nil {
			return snap, err
		}
		frozen, err := m.freezeRoot(ctx, b, sb, r, snap)
		if code := sandbox.CodeOf(err); code != codeRootBusy && code != codeMountPoint {
			return frozen, err
		}
	}
	// A copy lies on what the sandbox stands on, not on what it could.
	snap.Layers = append(slices.Clone(r.Stack), snap.Layers[len(snap.Layers)-1])
	return m.copyRoot(ctx, b, sb, snap, f)
}

// copyRoot makes a layer of what the upper holds now, with all processes of
// the sandbox held meanwhile.
func (m *Manager) copyRoot(ctx context.Context, b *box, sb sandbox.Sandbox, snap sandbox.Snapshot, f *frozen) (_ sandbox.Snapshot, err error) {
	snap.Live = true
	if err := m.state.ReserveSnapshot(ctx, snap); err != nil {
		return snap, err
	}
	layer := snap.Layers[len(snap.Layers)-1]
	defer func() {
		if err != nil {
			clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
			defer cancel()
			err = errors.Join(err, m.roots.RemoveLayer(layer), m.state.ReleaseSnapshot(clean, snap.ID))
		}
	}()
	on, err := m.copyHeld(ctx, b, sb, layer)
	if err != nil {
		return snap, err
	}
	if len(on) > 0 { // it has what changed since those only
		snap.Layers = slices.Concat(snap.Layers[:len(snap.Layers)-1], on, []string{layer})
		snap.SizeBytes, snap.Files = 0, 0 // of its own layer; counted soon
	}
	if err := f.room(ctx, snap.Layers, 0); err != nil {
		return snap, err
	}
	return snap, m.state.PutSnapshot(ctx, snap, m.cfg.BootID)
}

// copyHeld copies the upper while the workload is frozen. It returns what the
// copy lies on besides.
func (m *Manager) copyHeld(ctx context.Context, b *box, sb sandbox.Sandbox, layer string) (on []string, err error) {
	if sb.Status == sandbox.StatusRunning {
		defer func() {
			err = errors.Join(err, m.cgroup.Thaw(context.WithoutCancel(ctx), b.id))
		}()
		if err := m.cgroup.Freeze(ctx, b.id); err != nil {
			return nil, err
		}
	}
	return m.roots.CopyUpper(ctx, b.id, layer)
}

// wholeRoot returns what a sandbox stands on, with a change finished that was
// left unfinished.
func (m *Manager) wholeRoot(ctx context.Context, id sandbox.ID, sb sandbox.Sandbox) (state.Root, error) {
	r, err := m.state.RootOf(ctx, id)
	if err != nil || r.Pending == nil {
		return r, err
	}
	if sb.Status != sandbox.StatusStopped {
		return r, sandbox.Errorf(sandbox.ErrUnavailable, "root_pending", "the files of sandbox %s are still being changed: try again", id)
	}
	if err := m.completeRoot(ctx, id, sb, *r.Pending); err != nil {
		return r, err
	}
	return m.state.RootOf(ctx, id)
}

// afterSnapshot does in the background what a new snapshot leaves to do.
func (m *Manager) afterSnapshot(snap sandbox.Snapshot, full bool) {
	m.spawn(func() {
		if !snap.Durable {
			pause(m.life, syncDelay)
			if err := m.harden(context.WithoutCancel(m.life), snap.ID); err != nil {
				m.log.Error("write a snapshot to disk: a power cut would lose it", "snapshot", snap.ID, "err", err)
			}
		}
		if snap.Files == 0 {
			m.countLayer(m.life, snap)
		}
		if len(snap.Layers) >= flattenAt || full {
			m.flatten(m.life, snap)
		}
	})
}

// harden writes a snapshot to disk and notes that.
func (m *Manager) harden(ctx context.Context, id sandbox.SnapshotID) error {
	if err := m.roots.Sync(); err != nil {
		return err
	}
	return m.state.SnapshotDurable(ctx, id)
}

// hardenLeft writes to disk what an earlier daemon of this boot had not come
// to: else the next boot would take it for lost.
func (m *Manager) hardenLeft() {
	left, err := m.state.LostSnapshots(m.life, "")
	if err == nil && len(left) > 0 {
		err = m.roots.Sync()
	}
	var lost []sandbox.Snapshot // of another boot, where forgetLost failed
	if err == nil {
		lost, err = m.state.LostSnapshots(m.life, m.cfg.BootID)
	}
	for _, s := range left {
		if err == nil && !slices.ContainsFunc(lost, func(l sandbox.Snapshot) bool { return l.ID == s.ID }) {
			err = m.state.SnapshotDurable(context.WithoutCancel(m.life), s.ID)
		}
	}
	if err != nil && m.life.Err() == nil {
		m.log.Error("write the snapshots of an earlier daemon to disk: a power cut would lose them", "err", err)
	}
}

func (m *Manager) countLayer(ctx context.Context, snap sandbox.Snapshot) {
	bytes, files, err := m.roots.LayerUsage(ctx, snap.Layers[len(snap.Layers)-1])
	if err == nil {
		err = m.state.SnapshotCounted(ctx, snap.ID, bytes, files)
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, sandbox.ErrNotFound) { // removed meanwhile
		m.log.WarnContext(ctx, "count the files of a snapshot", "snapshot", snap.ID, "err", err)
	}
}

// flatten makes one layer of those a snapshot has above its image. What is
// mounted keeps the old ones, until it is mounted anew.
func (m *Manager) flatten(ctx context.Context, snap sandbox.Snapshot) {
	if err := m.tryFlatten(ctx, snap); err != nil && ctx.Err() == nil {
		m.log.WarnContext(ctx, "flatten the layers of a snapshot", "snapshot", snap.ID, "err", err)
	}
}

func (m *Manager) tryFlatten(ctx context.Context, snap sandbox.Snapshot) error {
	m.imports.RLock() // neither what it reads nor what it makes is collected
	defer m.imports.RUnlock()
	base := snap.Image.Layers
	snap, err := m.state.Snapshot(ctx, string(snap.ID))
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil || len(base) > len(snap.Layers) || !slices.Equal(snap.Layers[:len(base)], base) {
		return err
	}
	own := snap.Layers[len(base):]
	if len(own) < 2 || slices.ContainsFunc(own, func(l string) bool { return !isUpper(l) }) {
		return nil
	}
	if done, err := m.state.Flattened(ctx, own); err != nil || done != "" && m.roots.HasLayer(done) {
		return err
	}
	layer, err := m.roots.Flatten(ctx, own)
	if err != nil {
		return err
	}
	if err = m.roots.Sync(); err == nil {
		err = m.state.PutFlattened(ctx, base, own, layer)
	}
	if err != nil {
		return errors.Join(err, m.roots.RemoveLayer(layer))
	}
	m.collectSoon()
	return nil
}

// SnapshotOf returns a snapshot by id, name or the beginning of an id.
func (m *Manager) SnapshotOf(ctx context.Context, ref string) (sandbox.Snapshot, error) {
	return m.state.Snapshot(ctx, ref)
}

// Snapshots lists snapshots, newest first.
func (m *Manager) Snapshots(ctx context.Context, sandboxRef string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error) {
	f := sandbox.SnapshotFilter{Kinds: kinds}
	if sandboxRef != "" {
		sb, err := m.Sandbox(ctx, sandboxRef)
		if err != nil {
			return nil, err
		}
		f.Sandbox = sb.ID
	}
	return m.state.Snapshots(ctx, f)
}

// RemoveSnapshot forgets a snapshot. What was made of it, or stands on it,
// keeps the layers; those nobody needs go in the background.
func (m *Manager) RemoveSnapshot(ctx context.Context, ref, actor string) (sandbox.Snapshot, error) {
	if err := m.open(); err != nil {
		return sandbox.Snapshot{}, err
	}
	s, err := m.state.Snapshot(ctx, ref)
	if err != nil {
		return s, err
	}
	if err := m.state.DeleteSnapshot(ctx, s.ID, actor); err != nil {
		return s, err
	}
	m.collectSoon()
	return s, nil
}

// removeOwn removes the snapshots that are a sandbox's history only, once it
// has ended.
func (m *Manager) removeOwn(ctx context.Context, id sandbox.ID) error {
	own, err := m.state.Snapshots(ctx, sandbox.SnapshotFilter{Sandbox: id, Kinds: []sandbox.SnapshotKind{sandbox.SnapshotAuto, sandbox.SnapshotFork}})
	if err != nil {
		return err
	}
	return m.removeAll(ctx, own)
}

func (m *Manager) removeAll(ctx context.Context, all []sandbox.Snapshot) error {
	var errs []error
	for _, s := range all {
		if err := m.state.DeleteSnapshot(ctx, s.ID, "daemon"); !errors.Is(err, sandbox.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	if len(all) > 0 {
		m.collectSoon()
	}
	return errors.Join(errs...)
}

// forgetLost removes snapshots whose files a power cut may have spoilt, names
// an earlier daemon reserved, and the history of sandboxes that are gone.
func (m *Manager) forgetLost(ctx context.Context) error {
	if err := m.state.ReleaseSnapshots(ctx); err != nil {
		return err
	}
	lost, err := m.state.LostSnapshots(ctx, m.cfg.BootID)
	if err != nil {
		return err
	}
	for _, s := range lost {
		m.log.ErrorContext(ctx, "a snapshot was not on disk when the host went down: it is gone", "snapshot", s.ID, "name", s.Name)
	}
	all, err := m.state.Snapshots(ctx, sandbox.SnapshotFilter{Kinds: []sandbox.SnapshotKind{sandbox.SnapshotAuto, sandbox.SnapshotFork}})
	if err != nil {
		return err
	}
	for _, s := range all {
		if m.box(s.Sandbox) == nil {
			lost = append(lost, s)
		}
	}
	return m.removeAll(ctx, lost)
}

// Rollback puts a sandbox back on a snapshot's files, in place: what was
// written since is gone, and so is every process; id, address, name, limits
// and deadline stay. The snapshot must be of the same image; another is for
// Fork. ErrConflict with code snapshot_of_other_image or wrong_state.
func (m *Manager) Rollback(ctx context.Context, ref, snapshot, actor string) (sandbox.Sandbox, error) {
	s, err := m.state.Snapshot(ctx, snapshot)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return m.changeAs(ctx, WorkRollback, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		return m.rollback(ctx, b, sb, s.ID, actor)
	})
}

// rollback is Rollback for a caller that holds the box; no snapshot means the
// sandbox's first files.
func (m *Manager) rollback(ctx context.Context, b *box, sb sandbox.Sandbox, to sandbox.SnapshotID, actor string) (sandbox.Sandbox, error) {
	if err := replaceable(sb, "roll back"); err != nil {
		return sb, err
	}
	m.imports.RLock() // the layers stay until the row names them
	defer m.imports.RUnlock()
	r, err := m.wholeRoot(ctx, b.id, sb)
	if err != nil {
		return sb, err
	}
	if to == "" || to == sb.Spec.Snapshot {
		defer m.collectAfter(r.Stack, r.Image.Layers)
		return m.replaceRoot(ctx, b, sb, r, replace{
			stack: r.Image.Layers, point: sb.Spec.Snapshot, event: state.Change{EventType: eventReset, Actor: actor},
		})
	}
	s, err := m.state.Snapshot(ctx, string(to)) // now, with its layers safe
	if err != nil {
		return sb, err
	}
	if s.Image.Digest != r.Image.Digest {
		return sb, sandbox.Errorf(sandbox.ErrConflict, "snapshot_of_other_image", "snapshot %s is of image %q, sandbox %s of %q: 'sandbox fork %s' makes a sandbox of it", s.ID, s.Image.Name, b.id, r.Image.Name, s.ID)
	}
	defer m.collectAfter(r.Stack, s.Layers)
	return m.replaceRoot(ctx, b, sb, r, replace{
		stack: s.Layers, point: s.ID,
		event: state.Change{EventType: eventRolledBack, Actor: actor, Data: map[string]string{"snapshot": string(s.ID)}},
	})
}

// replaceable tells whether a sandbox can have other files now.
func replaceable(sb sandbox.Sandbox, verb string) error {
	switch sb.Status {
	case sandbox.StatusRunning, sandbox.StatusPaused, sandbox.StatusStopped:
		return nil
	}
	return wrongState(sb, verb, sandbox.StatusRunning)
}

// Reset gives a sandbox its first files again, in place: those of its image,
// or of the snapshot it was made of. Every process is killed, what was
// written is gone, and id, address, name, limits and deadline stay. One cut
// off by a crash leaves the sandbox stopped.
func (m *Manager) Reset(ctx context.Context, ref, actor string) (sandbox.Sandbox, error) {
	return m.changeAs(ctx, WorkReset, ref, func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		return m.rollback(ctx, b, sb, "", actor)
	})
}

// Fork makes sandboxes that begin with the files of a snapshot, or of a
// sandbox as it is now, on the spec that had. Each one is made or not by
// itself, unless the request needs all.
func (m *Manager) Fork(ctx context.Context, ref string, req sandbox.ForkRequest) (forks []sandbox.Fork, err error) {
	ctx, done := m.observe(ctx, WorkFork)
	defer func() { done(err) }()
	if req.Count == 0 {
		req.Count = 1
	}
	if req.Count < 0 || req.Count > maxForks {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_count", "fork %d times: use 1 to %d", req.Count, maxForks)
	}
	s, err := m.forkSource(ctx, ref, req)
	if err != nil {
		return nil, err
	}
	specs := make([]sandbox.Spec, req.Count)
	for i := range specs {
		specs[i] = forkSpec(s, req, i)
		if req.Amend != nil {
			if err := req.Amend(&specs[i]); err != nil {
				return nil, err
			}
		}
		if err := specs[i].Validate(); err != nil {
			return nil, err
		}
	}
	out := make([]sandbox.Fork, req.Count)
	errs := make([]error, req.Count)
	var g errgroup.Group
	g.SetLimit(forksAtOnce)
	for i := range specs {
		g.Go(func() error {
			sb, err := m.Create(ctx, sandbox.CreateRequest{Spec: specs[i], Actor: req.Actor, IdempotencyKey: req.KeyOf(i)})
			if err != nil {
				errs[i] = err
				out[i] = sandbox.Fork{Error: explain(err), Code: sandbox.CodeOf(err)}
				return nil
			}
			out[i] = sandbox.Fork{Sandbox: &sb}
			return nil
		})
	}
	_ = g.Wait()
	return m.forked(ctx, req, out, errs)
}

// forked decides what a fork comes to: an error where nothing was made, or
// not all that was needed.
func (m *Manager) forked(ctx context.Context, req sandbox.ForkRequest, out []sandbox.Fork, errs []error) ([]sandbox.Fork, error) {
	failed := slices.IndexFunc(errs, func(err error) bool { return err != nil })
	made := slices.ContainsFunc(out, func(f sandbox.Fork) bool { return f.Sandbox != nil })
	if failed < 0 || made && !req.NeedsAll {
		return out, nil
	}
	for _, f := range out {
		if f.Sandbox != nil {
			if _, err := m.Remove(context.WithoutCancel(ctx), string(f.Sandbox.ID), "daemon"); err != nil {
				m.log.ErrorContext(ctx, "remove what an incomplete fork made", "sandbox", f.Sandbox.ID, "err", err)
			}
		}
	}
	return nil, errs[failed]
}

// forkSource is the snapshot ref names, or one taken now of the sandbox. A
// snapshot comes first, unless the request is for a sandbox.
func (m *Manager) forkSource(ctx context.Context, ref string, req sandbox.ForkRequest) (s sandbox.Snapshot, err error) {
	if req.ForkOf != sandbox.ForkOfSandbox {
		if s, err = m.state.Snapshot(ctx, ref); !errors.Is(err, sandbox.ErrNotFound) {
			return s, err
		}
	}
	sb, serr := m.Sandbox(ctx, ref)
	if serr != nil {
		if errors.Is(serr, sandbox.ErrNotFound) && req.ForkOf != sandbox.ForkOfSandbox {
			return s, sandbox.NothingToFork(ref)
		}
		return s, serr
	}
	return m.Snapshot(ctx, string(sb.ID), sandbox.SnapshotRequest{Kind: sandbox.SnapshotFork, Comment: "so that it could be forked", Actor: req.Actor, IdempotencyKey: req.KeyOf(0)})
}

// forkSpec is the spec of the i-th sandbox a fork asks for.
func forkSpec(s sandbox.Snapshot, req sandbox.ForkRequest, i int) sandbox.Spec {
	spec := s.Spec.Clone()
	spec.Snapshot, spec.Image, spec.ImageDigest = s.ID, "", ""
	if spec.Hostname == hostname(spec.Name, s.Sandbox) {
		spec.Hostname = "" // it was made of the name or id
	}
	spec.Name = req.Name
	if req.Name != "" && req.Count > 1 {
		spec.Name = fmt.Sprintf("%s-%d", req.Name, i+1)
	}
	for k, v := range req.Env {
		if spec.Env == nil {
			spec.Env = map[string]string{}
		}
		spec.Env[k] = v
	}
	if req.Labels != nil {
		spec.Labels = req.Labels
	}
	if req.Limits != nil {
		spec.Limits = *req.Limits
	}
	if req.Network != nil {
		spec.Network = *req.Network
	}
	if req.Volumes != nil {
		spec.Volumes = *req.Volumes
	}
	if req.TTL != nil {
		spec.TTLSeconds = *req.TTL
	}
	return spec
}

// imageOfSnapshot is what a sandbox made of a snapshot is made of.
func (m *Manager) imageOfSnapshot(ctx context.Context, spec *sandbox.Spec) (sandbox.Image, error) {
	s, err := m.state.Snapshot(ctx, string(spec.Snapshot))
	if err != nil {
		return sandbox.Image{}, err
	}
	if spec.Image != "" && spec.Image != s.Image.Name {
		return sandbox.Image{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_image", "image %q and snapshot %s, which is of image %q: leave the image out", spec.Image, s.ID, s.Image.Name)
	}
	img := s.Image
	img.Layers = s.Layers
	spec.Image, spec.Snapshot = img.Name, s.ID
	return img, nil
}

// stateRef is what a reference to a state of files names: a snapshot, a
// sandbox as it is now, or, empty, the image below another.
type stateRef struct {
	began []string // the layers it began with
	stack []string
	upper sandbox.ID // of a sandbox
}

func (m *Manager) stateOf(ctx context.Context, ref string) (stateRef, error) {
	s, err := m.state.Snapshot(ctx, ref)
	if err == nil {
		out := stateRef{began: s.Image.Layers, stack: s.Layers}
		if s.Spec.Snapshot == "" {
			return out, nil
		}
		base, err := m.state.Snapshot(ctx, string(s.Spec.Snapshot))
		if err == nil {
			out.began = base.Layers
		}
		if errors.Is(err, sandbox.ErrNotFound) {
			err = nil
		}
		return out, err
	}
	if !errors.Is(err, sandbox.ErrNotFound) {
		return stateRef{}, err
	}
	_, sb, err := m.find(ctx, ref)
	if err != nil {
		return stateRef{}, err
	}
	r, err := m.state.RootOf(ctx, sb.ID)
	return stateRef{began: r.Image.Layers, stack: r.Stack, upper: sb.ID}, err
}

// Diff tells how the files of one state differ from those of another, in the
// order of the paths. Each is a snapshot or a living sandbox; from may be
// empty for the files that to began with. Only what was written since they
// parted is looked at. The files of a sandbox may change meanwhile.
func (m *Manager) Diff(ctx context.Context, from, to string, emit func(sandbox.FileChange) error) error {
	a, b, done, err := m.parted(ctx, from, to)
	if err != nil {
		return err
	}
	defer done()
	if a.upper != "" {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_diff", "the earlier state must be a snapshot: take one of %s first, or name the sandbox second", strings.TrimSpace(from))
	}
	return m.roots.Diff(ctx, a.stack, b.stack, b.upper, emit)
}

// parted reads the two states of a Diff, whose layers stay until done: emit
// takes as long as a client does.
func (m *Manager) parted(ctx context.Context, from, to string) (a, b stateRef, done func(), err error) {
	m.imports.RLock()
	defer m.imports.RUnlock()
	if b, err = m.stateOf(ctx, to); err != nil {
		return a, b, nil, err
	}
	if a.stack = b.began; from != "" {
		if a, err = m.stateOf(ctx, from); err != nil {
			return a, b, nil, err
		}
	}
	return a, b, m.keep(&sandbox.ImageSource{Layers: slices.Concat(a.stack, b.stack)}), nil
}
