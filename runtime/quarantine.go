package runtime

import (
	"context"
	"errors"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// A database that does not belong to its volume, or is older than it, knows
// nothing of what lies there. Then the manager is in quarantine: it removes
// nothing that it finds, makes nothing that could take the place of something,
// and goes on with those sandboxes that the database names and whose PID 1
// lives. It ends with 'sandboxd recover', or with the right database.

const codeQuarantine = "quarantine"

// Quarantined tells why the manager is in quarantine; empty if it is not.
func (m *Manager) Quarantined() string { return m.cfg.Quarantine }

// open refuses what a quarantine forbids.
func (m *Manager) open() error {
	if m.cfg.Quarantine == "" {
		return nil
	}
	return sandbox.Errorf(sandbox.ErrConflict, codeQuarantine,
		"%s; nothing is made, started or removed until that is settled: put the right database back, or stop the daemon (running sandboxes go on) and run 'sandboxd recover'", m.cfg.Quarantine)
}

// settled tells of a fate that takes nothing away.
func (f fate) settled() bool { return f == fateAdopt || f == fateStay }

// listFound says what lies here and is nobody's.
func (m *Manager) listFound(ctx context.Context, rows []state.Row) {
	m.log.ErrorContext(ctx, "QUARANTINE: nothing is removed, and nothing new is made", "why", m.cfg.Quarantine,
		"do", "put the right database back, or stop the daemon (running sandboxes go on) and run 'sandboxd recover'")
	found, err := m.unowned(rows)
	ready := 0
	for id, what := range found {
		if !m.written(ctx, id) {
			ready++
			continue
		}
		m.log.WarnContext(ctx, "found what the database does not know; it stays", "sandbox", id, "what", what)
	}
	if ready > 0 {
		m.log.InfoContext(ctx, "shells hold nobody's files, as those of the pool: they stay until the quarantine ends", "shells", ready)
	}
	layers, lerr := m.roots.Layers()
	used, uerr := m.state.LayersInUse(ctx)
	known := map[string]bool{}
	for _, l := range used {
		known[l] = true
	}
	for _, l := range layers {
		if !known[l] {
			m.log.WarnContext(ctx, "found what the database does not know; it stays", "layer", l)
		}
	}
	if err := errors.Join(err, lerr, uerr); err != nil {
		m.log.ErrorContext(ctx, "look for what the database does not know", "err", err)
	}
}

// unowned finds what is here of sandboxes that no row says live.
func (m *Manager) unowned(rows []state.Row) (map[sandbox.ID][]string, error) {
	living := map[sandbox.ID]bool{}
	for _, r := range rows {
		living[r.ID] = true
	}
	found := map[sandbox.ID][]string{}
	var errs []error
	for what, list := range map[string]func() ([]sandbox.ID, error){"cgroup": m.cgroup.List, "shell": m.shells.List, "upper": m.roots.Uppers} {
		ids, err := list()
		errs = append(errs, err)
		for _, id := range ids {
			if !living[id] {
				found[id] = append(found[id], what)
			}
		}
	}
	return found, errors.Join(errs...)
}

// written reports whether somebody wrote files that no row knows of. What a row
// says has ended may go, and so may an upper like every other.
func (m *Manager) written(ctx context.Context, id sandbox.ID) bool {
	if _, err := m.state.Sandbox(ctx, id); !errors.Is(err, sandbox.ErrNotFound) {
		return err != nil
	}
	same, err := m.roots.Unchanged(id)
	return !same && !errors.Is(err, sandbox.ErrNotFound)
}
