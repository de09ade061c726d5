package servertest

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func snapshotNotFound(ref string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "snapshot_not_found", "no snapshot %q", ref)
}

// Snapshot implements server.Manager. Files are no part of it.
func (m *Memory) Snapshot(_ context.Context, ref string, req sandbox.SnapshotRequest) (sandbox.Snapshot, error) {
	if err := m.fail("Snapshot"); err != nil {
		return sandbox.Snapshot{}, err
	}
	if err := req.Validate(); err != nil {
		return sandbox.Snapshot{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.find(ref)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	s := sandbox.Snapshot{
		ID: sandbox.NewSnapshotID(), Name: req.Name, Owner: b.sb.Owner, Kind: sandbox.SnapshotManual, Sandbox: b.sb.ID, CreatedAt: time.Now(),
		Comment: req.Comment, Spec: b.sb.Spec, Layers: []string{"host"}, Durable: req.Sync,
	}
	m.snapshots = append([]sandbox.Snapshot{s}, m.snapshots...)
	m.note(b.sb.ID, "snapshot.created", req.Actor)
	return s, nil
}

// SnapshotOf implements server.Manager.
func (m *Memory) SnapshotOf(_ context.Context, ref string) (sandbox.Snapshot, error) {
	if err := m.fail("SnapshotOf"); err != nil {
		return sandbox.Snapshot{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.snapshots {
		if string(s.ID) == ref || s.Name == ref {
			return s, nil
		}
	}
	return sandbox.Snapshot{}, snapshotNotFound(ref)
}

// Snapshots implements server.Manager.
func (m *Memory) Snapshots(_ context.Context, ref string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error) {
	if err := m.fail("Snapshots"); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []sandbox.Snapshot
	for _, s := range m.snapshots {
		if (ref == "" || string(s.Sandbox) == ref) && (len(kinds) == 0 || slices.Contains(kinds, s.Kind)) {
			all = append(all, s)
		}
	}
	return all, nil
}

// RemoveSnapshot implements server.Manager.
func (m *Memory) RemoveSnapshot(ctx context.Context, ref, _ string) (sandbox.Snapshot, error) {
	s, err := m.SnapshotOf(ctx, ref)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.snapshots = slices.DeleteFunc(m.snapshots, func(o sandbox.Snapshot) bool { return o.ID == s.ID })
	return s, err
}

// Fork implements server.Manager.
func (m *Memory) Fork(ctx context.Context, ref string, req sandbox.ForkRequest) ([]sandbox.Fork, error) {
	s, err := m.SnapshotOf(ctx, ref)
	if err != nil {
		return nil, err
	}
	out := make([]sandbox.Fork, max(1, req.Count))
	for i := range out {
		spec := s.Spec
		spec.Name, spec.Snapshot = "", s.ID
		if req.Network != nil {
			spec.Network = *req.Network
		}
		sb, err := m.Create(ctx, sandbox.CreateRequest{Spec: spec, Actor: req.Actor})
		if err != nil {
			return nil, err
		}
		out[i].Sandbox = &sb
	}
	return out, nil
}

// Rollback implements server.Manager.
func (m *Memory) Rollback(ctx context.Context, ref, snapshot, actor string) (sandbox.Sandbox, error) {
	if _, err := m.SnapshotOf(ctx, snapshot); err != nil {
		return sandbox.Sandbox{}, err
	}
	return m.Reset(ctx, ref, actor)
}

// Undo implements server.Manager.
func (m *Memory) Undo(ctx context.Context, ref string, _ int, actor string) (sandbox.Sandbox, error) {
	return m.Reset(ctx, ref, actor)
}

// ResetPaths implements server.Manager; nothing changes.
func (m *Memory) ResetPaths(ctx context.Context, ref string, _ []string, _ string) (sandbox.Sandbox, error) {
	return m.Sandbox(ctx, ref)
}

// History implements server.Manager.
func (m *Memory) History(ctx context.Context, ref string) (sandbox.History, error) {
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.History{}, err
	}
	all, err := m.Snapshots(ctx, string(sb.ID))
	return sandbox.History{Sandbox: sb.ID, Points: all}, err
}

// Diff implements server.Manager: one file was added.
func (m *Memory) Diff(ctx context.Context, _, to string, emit func(sandbox.FileChange) error) error {
	if _, err := m.SnapshotOf(ctx, to); err != nil {
		return err
	}
	return emit(sandbox.FileChange{Path: "/added", Kind: sandbox.FileAdded, Type: "file", Size: 1, Mode: 0o644})
}

// AddSchedule implements server.Manager; nothing ever runs.
func (m *Memory) AddSchedule(ctx context.Context, ref string, s sandbox.Schedule) (sandbox.Schedule, error) {
	sb, err := m.Sandbox(ctx, ref)
	s.ID, s.Sandbox, s.CreatedAt, s.NextAt = sandbox.NewScheduleID(), sb.ID, time.Now(), time.Now().Add(time.Hour)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.schedules = append(m.schedules, s)
	return s, err
}

// Schedules implements server.Manager.
func (m *Memory) Schedules(context.Context, string) ([]sandbox.Schedule, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.schedules), m.fail("Schedules")
}

// RemoveSchedule implements server.Manager.
func (m *Memory) RemoveSchedule(_ context.Context, id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.schedules = slices.DeleteFunc(m.schedules, func(s sandbox.Schedule) bool { return s.ID == id })
	return m.fail("RemoveSchedule")
}

// ExportSnapshot implements server.Manager: the archive is the id.
func (m *Memory) ExportSnapshot(ctx context.Context, ref string) (io.ReadCloser, error) {
	s, err := m.SnapshotOf(ctx, ref)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(strings.NewReader(string(s.ID))), nil
}

// ImportSnapshot implements server.Manager; the archive is read.
func (m *Memory) ImportSnapshot(_ context.Context, name, actor string, r io.Reader) (sandbox.Snapshot, error) {
	if err := m.fail("ImportSnapshot"); err != nil {
		return sandbox.Snapshot{}, err
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return sandbox.Snapshot{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := sandbox.Snapshot{ID: sandbox.NewSnapshotID(), Name: name, Owner: actor, Kind: sandbox.SnapshotManual, CreatedAt: time.Now()}
	m.snapshots = append([]sandbox.Snapshot{s}, m.snapshots...)
	return s, nil
}
