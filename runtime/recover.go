package runtime

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// Recover brings database and kernel together after any end of the daemon
// before this one. Living sandboxes whose PID 1 still is the process the
// database names are adopted with their processes and unread output; what a
// crash cut off is torn down; kernel objects nobody owns are removed. A
// second Recover changes nothing.
func (m *Manager) Recover(ctx context.Context) error {
	rows, err := m.state.Living(ctx)
	if err != nil {
		return err
	}
	keep := map[sandbox.ID]netns.Attachment{}
	known := map[sandbox.ID]bool{}
	var doomed []doomedBox
	for _, row := range rows {
		known[row.ID] = true
		b := newBox(row.ID, row.Slot, m.dial(m.shells.SocketPath(row.ID)))
		m.keepBox(b)
		b.earlier = earlierUsage(row)
		if row.Status == sandbox.StatusStopped {
			continue
		}
		why := m.adoptable(ctx, b, row)
		if why == nil {
			keep[row.ID] = m.attachment(b, row.Sandbox, b.shell)
			continue
		}
		doomed = append(doomed, doomedBox{b, row, *why})
	}
	if err := m.net.Recover(ctx, keep); err != nil {
		return fmt.Errorf("recover the network: %w", err)
	}
	for _, row := range rows {
		b := m.box(row.ID)
		if _, ok := keep[row.ID]; ok {
			m.watch(b, row.Sandbox, b.shell)
			m.log.Info("adopted sandbox", "sandbox", row.ID, "status", row.Status, "init_pid", row.InitPID)
		} else if row.Status == sandbox.StatusStopped {
			m.armDeadline(b, row.Sandbox)
		}
	}
	var g errgroup.Group
	g.SetLimit(8)
	for _, d := range doomed {
		g.Go(func() error { m.finish(ctx, d); return nil })
	}
	_ = g.Wait()
	if err := m.sweep(ctx, known, rows); err != nil {
		return err
	}
	if err := m.refreshHostImage(ctx); err != nil {
		return err
	}
	if err := m.collectLayers(ctx); err != nil {
		return err
	}
	return m.state.Prune(ctx, m.cfg.KeepEnded, m.cfg.KeepEvents)
}

// doomedBox is a sandbox that recovery must end, and why.
type doomedBox struct {
	b   *box
	row state.Row
	e   ending
}

// adoptable opens the shell of a row that should have one and returns nil, or
// says why the sandbox must end.
func (m *Manager) adoptable(ctx context.Context, b *box, row state.Row) *ending {
	switch row.Status {
	case sandbox.StatusPending, sandbox.StatusCreating:
		return &ending{reason: sandbox.ReasonCreateFailed, detail: "the daemon ended while it was being created", actor: "daemon"}
	case sandbox.StatusCompleting:
		return &ending{reason: row.Reason, detail: row.Detail, exitCode: row.ExitCode, actor: "daemon"}
	}
	if row.BootID != m.cfg.BootID {
		return &ending{reason: sandbox.ReasonHostRestart, detail: "the host restarted under it", actor: "daemon"}
	}
	crashed := func(err error) *ending {
		return &ending{reason: sandbox.ReasonCrashed, detail: "PID 1 was gone when the daemon came back: " + explain(err), actor: "daemon"}
	}
	shell, err := m.shells.Open(b.id, row.InitPID, row.InitStart)
	if err != nil {
		return crashed(err)
	}
	b.shell = shell
	ping, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := b.guest.Ping(ping); err != nil {
		return crashed(err)
	}
	if u, err := m.cgroup.Usage(b.id); err == nil {
		b.oomKills = u.OOMKills
	}
	return nil
}

// earlierUsage is what shells before the present one used: the row of a
// running sandbox holds the counters its last stop left there.
func earlierUsage(row state.Row) sandbox.Usage { return row.Usage }

// finish ends what cannot be adopted. A start of a stopped sandbox that was
// cut off goes back to stopped: its filesystem is worth keeping.
func (m *Manager) finish(ctx context.Context, d doomedBox) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	if err := d.b.lock(ctx); err != nil {
		return
	}
	defer d.b.unlock()
	if d.row.Status == sandbox.StatusCreating && d.row.StartedAt != nil {
		_ = m.backToStopped(ctx, d.b, d.row.Sandbox, errors.New("the daemon ended meanwhile"))
		return
	}
	m.log.Info("ending sandbox left by an earlier daemon", "sandbox", d.b.id, "status", d.row.Status, "reason", d.e.reason)
	_ = m.endLocked(ctx, d.b, d.e) // logs, and tries again by itself
}

// sweep removes kernel objects whose sandbox the database does not know as
// living: at most what a crash left between a terminal row and now.
func (m *Manager) sweep(ctx context.Context, known map[sandbox.ID]bool, rows []state.Row) error {
	var errs []error
	orphans := map[sandbox.ID]bool{}
	for what, list := range map[string]func() ([]sandbox.ID, error){"cgroup": m.cgroup.List, "shell": m.shells.List, "upper": m.roots.Uppers} {
		ids, err := list()
		errs = append(errs, err)
		for _, id := range ids {
			if !known[id] {
				orphans[id] = true
				m.log.Warn("removing what no sandbox owns", "what", what, "sandbox", id)
			}
		}
	}
	for id := range orphans {
		errs = append(errs, m.cgroup.Kill(ctx, id), m.cgroup.Remove(ctx, id), m.shells.Remove(id), m.roots.Discard(id, -1))
	}
	// A stopped sandbox must have no shell: one whose stop was cut off after
	// the row was written has.
	cgroups, err := m.cgroup.List()
	errs = append(errs, err)
	for _, row := range rows {
		if row.Status == sandbox.StatusStopped && slices.Contains(cgroups, row.ID) {
			errs = append(errs, m.cgroup.Kill(ctx, row.ID), m.cgroup.Remove(ctx, row.ID), m.shells.Remove(row.ID))
		}
	}
	return errors.Join(errs...)
}
