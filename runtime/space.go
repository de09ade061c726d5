package runtime

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/docker/go-units"

	"github.com/sandboxd/sandboxd/rootfs"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	spaceEvery = time.Second
	// heldLeast is what a sandbox or volume that is held may have all the same.
	heldLeast = 1 << 20
)

// space is what was last seen of the volume. While it is low, owners who hold
// more than an equal share, and who holds most, are held: the quotas of their
// sandboxes and volumes are what these have, so that the rest is for others.
// While it is full, all are. Owners without a bound on their disk, as operators
// are, are never held: what is left is theirs, to make room.
type space struct {
	level rootfs.Level
	over  map[string]bool // owners who are held
	some  bool            // some quota may be lower than its row says
}

// GuardSpace looks after the free space of the volume from now on. bounded says
// whether an owner's disk is bounded.
func (m *Manager) GuardSpace(bounded func(owner string) bool) {
	m.spawn(func() {
		at := space{some: true} // by an earlier daemon
		for ; m.life.Err() == nil; pause(m.life, spaceEvery) {
			if err := m.lookAtSpace(m.life, &at, bounded); err != nil && m.life.Err() == nil {
				m.log.Error("look at the free space of the volume: tried again", "err", err)
			}
			m.space.Store(&space{level: at.level, over: at.over})
		}
	})
}

func (m *Manager) lookAtSpace(ctx context.Context, at *space, bounded func(string) bool) error {
	now, err := m.roots.Space()
	if err != nil {
		return err
	}
	if level := now.Level(at.level); level != at.level {
		at.level = level
		m.tellSpace(ctx, now, level)
	}
	if at.level == rootfs.SpaceAmple {
		at.over = nil
		if at.some {
			err = m.holdAll(ctx, func(string) bool { return false })
			at.some = err != nil
		}
		return err
	}
	use, err := m.useByOwner(ctx)
	if err != nil {
		return err
	}
	at.over, at.some = overShare(use, now.Total, at.level, bounded), true
	return m.holdAll(ctx, func(owner string) bool { return at.over[owner] })
}

func (m *Manager) tellSpace(ctx context.Context, now rootfs.Space, level rootfs.Level) {
	data := map[string]string{"free_bytes": fmt.Sprint(now.Free), "total_bytes": fmt.Sprint(now.Total)}
	say := m.log.WarnContext
	if level == rootfs.SpaceAmple {
		say = m.log.InfoContext
	}
	say(ctx, "the volume's space is "+string(level), "free", units.BytesSize(float64(now.Free)), "total", units.BytesSize(float64(now.Total)))
	m.record(ctx, sandbox.Event{Type: "space." + string(level), Actor: "daemon", Data: data})
}

// useByOwner adds up what owners hold: uppers, volumes and snapshots.
func (m *Manager) useByOwner(ctx context.Context) (map[string]int64, error) {
	use := map[string]int64{}
	for _, b := range m.living() {
		if bytes, _, known, err := m.roots.Usage(b.id, 0); err == nil && known {
			use[b.tenant()] += int64(bytes)
		}
	}
	volumes, err := m.state.Volumes(ctx)
	if err != nil {
		return nil, err
	}
	for _, v := range volumes {
		if bytes, _, known, err := m.roots.VolumeUsage(v.Name); err == nil && known {
			use[v.Owner] += int64(bytes)
		}
	}
	snapshots, err := m.state.Snapshots(ctx, sandbox.SnapshotFilter{})
	for _, s := range snapshots {
		use[s.Owner] += s.SizeBytes
	}
	return use, err
}

// tenant is whose the sandbox is; a step of a build is its caller's.
func (b *box) tenant() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.TrimPrefix(b.owner, buildActor)
}

// overShare chooses the owners to be held. One share is left for who comes next.
func overShare(use map[string]int64, total uint64, level rootfs.Level, bounded func(string) bool) map[string]bool {
	over := map[string]bool{}
	var most string
	for owner, n := range use {
		if !bounded(owner) {
			continue
		}
		if over[owner] = level == rootfs.SpaceFull || n > int64(total)/int64(len(use)+1); n > use[most] || most == "" {
			most = owner
		}
	}
	if most != "" {
		over[most] = true
	}
	return over
}

// holdAll sets the quotas of all sandboxes and volumes: of owners who are held
// what is used, of others what the rows say.
func (m *Manager) holdAll(ctx context.Context, held func(owner string) bool) error {
	for _, b := range m.living() {
		if err := m.hold(ctx, b, held(b.tenant())); err != nil {
			return err
		}
	}
	m.volumes.Lock()
	defer m.volumes.Unlock()
	all, err := m.state.Volumes(ctx)
	if err != nil {
		return err
	}
	for _, v := range all {
		l := volumeLimits(v)
		if bytes, _, known, err := m.roots.VolumeUsage(v.Name); err == nil && known && held(v.Owner) {
			l.Bytes = max(int64(bytes), heldLeast)
		}
		if err := m.roots.LimitVolume(v.Name, l); err != nil && sandbox.CodeOf(err) != "volume_gone" {
			m.log.WarnContext(ctx, "set the quota of a volume", "volume", v.Name, "err", err)
		}
	}
	return nil
}

func (m *Manager) hold(ctx context.Context, b *box, held bool) error {
	sb, err := m.state.Sandbox(ctx, b.id)
	if err != nil {
		return nil //nolint:nilerr // it is being made, or gone
	}
	l := sb.Spec.Limits
	if bytes, _, known, err := m.roots.Usage(b.id, sb.Slot); err == nil && known && held {
		l.DiskBytes = max(int64(bytes), heldLeast)
	}
	if err := m.roots.SetLimits(b.id, sb.Slot, l); err != nil && sandbox.CodeOf(err) != "no_upper" {
		m.log.WarnContext(ctx, "set the quota of a sandbox", "sandbox", b.id, "err", err)
	}
	return nil
}

// Crowded refuses an owner who is held something more on the volume. Class
// ErrExhausted.
func (m *Manager) Crowded(owner string) error {
	at := m.space.Load()
	if at == nil || !at.over[owner] && at.level != rootfs.SpaceFull {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrExhausted, "space_low",
		"the daemon's volume is nearly full, and you hold more of it than others: remove sandboxes, snapshots or volumes, or ask an operator to make room")
}
