package runtime

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandboxd/sandboxd/netns"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

const (
	// atOnce is how many sandboxes recovery looks after at the same time.
	atOnce = 8
	// adoptTimeout is how long PID 1 of a sandbox is waited for.
	adoptTimeout = 5 * time.Second
	// pruneEvery is how often old records are deleted.
	pruneEvery = 10 * time.Minute
)

// Recover brings database and kernel together after any end of the daemon
// before this one. Living sandboxes whose PID 1 still is the process the
// database names are adopted with their processes and unread output; what a
// crash cut off is finished or torn down; kernel objects nobody owns are
// removed. A second Recover changes nothing. It fails only where serving
// would do harm; what could not be put in order is logged.
func (m *Manager) Recover(ctx context.Context) error {
	if err := m.openPrices(ctx); err != nil {
		return err
	}
	m.auditing.Do(func() { m.spawn(m.writeAudit) })
	rows, err := m.state.Living(ctx)
	if err != nil {
		return err
	}
	held := m.open() != nil // see Quarantined
	if held {
		m.listFound(ctx, rows)
	} else if rows, err = m.completeRoots(ctx, rows); err != nil {
		return err
	}
	carried, err := m.state.Carried(ctx)
	if err != nil {
		return err
	}
	read, err := m.state.LastReadings(ctx)
	if err != nil {
		return err
	}
	found := make([]inherited, len(rows))
	var g errgroup.Group
	g.SetLimit(atOnce)
	for i, row := range rows {
		b := newBox(row.ID, m.dial(m.shells.SocketPath(row.ID)))
		// The row holds the counters of counted shells. One that has a PID 1
		// with a start time is not among them.
		b.earlier, b.counted = row.Usage, row.InitStart == 0
		b.setStatus(row.Status, row.Reason)
		b.reach.recall(row, carried)
		b.goOn(row, read[row.ID], m.cfg.BootID, m.caps(row.Spec))
		m.keepBox(b)
		g.Go(func() error {
			found[i] = inherited{b: b, row: row}
			found[i].fate, found[i].e = m.judgeRow(ctx, b, row)
			return nil
		})
	}
	_ = g.Wait()
	for _, f := range found {
		if f.fate == fateElsewhere && !held {
			return sandbox.Errorf(sandbox.ErrConflict, "cgroup_parent_changed",
				"sandbox %s runs (PID %d), but not beneath the parent cgroup: its limits and its costs would count for nothing; start with the cgroup_parent it was started with, then stop it, or run 'sandboxd retire', before that is changed", f.row.ID, f.row.InitPID)
		}
	}
	keep := map[sandbox.ID]netns.Attachment{}
	for _, f := range found {
		switch f.fate {
		case fateAdopt:
			keep[f.row.ID] = m.attachment(f.row.Sandbox, f.b.shell)
		case fateEnd, fateHalt: // their counters are still to be read
			keep[f.row.ID] = netns.Attachment{ID: f.row.ID, Name: f.row.Spec.Name, Slot: f.row.Slot, Policy: m.inForce(f.row.Spec.Network)}
		}
	}
	err = m.net.Recover(ctx, keep)
	if err != nil && (ctx.Err() != nil || !errors.As(err, new(netns.PartlyError))) {
		return fmt.Errorf("recover the network: %w", err)
	}
	if err != nil {
		m.log.ErrorContext(ctx, "recover the network: these sandboxes may have none; mend the cause and restart the daemon, or stop and start them", "err", err)
	}
	m.tellDisturbed(ctx)
	for _, f := range found {
		if held && !f.fate.settled() {
			m.log.WarnContext(ctx, "left a sandbox as it is: its row does not fit what is here", "sandbox", f.row.ID, "status", f.row.Status)
			continue
		}
		g.Go(func() error { m.settle(ctx, f); return nil })
	}
	_ = g.Wait()
	if !held {
		m.removeBuilds(rows)
		m.tidyUp(ctx, rows)
	}
	if err := m.openBudgets(ctx); err != nil {
		return err
	}
	m.spawn(m.keepLedger)
	if held {
		return nil
	}
	m.spawn(m.pruneForever)
	m.spawn(m.hardenLeft)
	m.skipMissed(ctx) // before anybody can add one
	m.spawn(m.keepSchedules)
	m.spawn(m.pool.run)
	return nil
}

// inherited is a living sandbox of an earlier daemon.
type inherited struct {
	b    *box
	row  state.Row
	fate fate
	e    ending // of one that must end, or stops for a reason
}

// fate is what becomes of a sandbox found at the start.
type fate int

const (
	fateAdopt fate = iota + 1 // its shell goes on
	fateStay                  // it is stopped
	fateHalt                  // it becomes stopped
	fateEnd
	fateElsewhere // it runs where this daemon neither limits nor counts
)

// judgeRow decides a sandbox's fate, and opens the shell of one to be
// adopted.
func (m *Manager) judgeRow(ctx context.Context, b *box, row state.Row) (fate, ending) {
	end := func(r sandbox.Reason, detail string) (fate, ending) {
		return fateEnd, ending{reason: r, detail: detail, actor: "daemon"}
	}
	switch {
	case row.Status == sandbox.StatusStopped:
		return fateStay, ending{}
	case row.Status == sandbox.StatusCompleting:
		return end(row.Reason, row.Detail)
	case row.Status == sandbox.StatusCreating && halting(row.Sandbox):
		return fateHalt, ending{}
	case row.Status == sandbox.StatusPending || row.Status == sandbox.StatusCreating:
		return end(sandbox.ReasonCreateFailed, "the daemon ended while it was being created")
	case row.BootID != m.cfg.BootID:
		err := m.fitRoot(ctx, row.Sandbox)
		if sandbox.CodeOf(err) == "files_gone" {
			return end(sandbox.ReasonHostRestart, "the host went down before any of its files were on disk")
		}
		if err != nil {
			m.log.ErrorContext(ctx, "compare a sandbox's layers with the volume: it may not start", "sandbox", b.id, "err", err)
		}
		return fateHalt, ending{reason: sandbox.ReasonHostRestart, detail: unclean}
	case halting(row.Sandbox):
		return fateHalt, ending{}
	}
	if e, ok := m.struck(b.id); ok {
		return fateEnd, e
	}
	err := m.adopt(ctx, b, row)
	switch {
	case err == nil:
		return fateAdopt, ending{}
	case errors.Is(err, errElsewhere):
		return fateElsewhere, ending{}
	case errors.Is(err, errUnfinished):
		return end(sandbox.ReasonCreateFailed, "the daemon ended while it was being created")
	case errors.Is(err, sandbox.ErrUnsupported): // a PID 1 this build cannot talk to
		m.log.WarnContext(ctx, "stopping a sandbox: start it to give it this daemon's init", "sandbox", b.id, "err", err)
		return fateHalt, ending{}
	}
	return end(sandbox.ReasonCrashed, "PID 1 was gone when the daemon came back: "+explain(err))
}

// unclean is the detail of a sandbox whose files were not written to disk in
// order.
const unclean = "unclean: the host went down under it; what it wrote in the half minute before may be missing or incomplete, all else is kept"

// fitRoot makes the row of a sandbox say what its upper lies on. A change of root
// of a sandbox that runs waits for the disk with neither, and a power cut may
// have found one of them there alone. An upper that was to be made on layers that
// are there is made. Code files_gone: there is nothing of it.
func (m *Manager) fitRoot(ctx context.Context, sb sandbox.Sandbox) error {
	r, err := m.state.RootOf(ctx, sb.ID)
	if err != nil || r.Pending != nil {
		return err
	}
	if err := m.roots.CheckUpper(sb.ID); err != nil {
		p := state.PendingRoot{Stack: r.Stack, Point: r.Point}
		_, changed := m.state.LastEvent(ctx, sb.ID, eventReset, eventRolledBack)
		if slices.Equal(r.Stack, r.Image.Layers) && changed != nil || slices.ContainsFunc(r.Stack, func(l string) bool { return isUpper(l) && !m.roots.HasLayer(l) }) {
			return err
		}
		return errors.Join(m.roots.CreateUpperOn(sb.ID, sb.Spec.Limits, baseFor(r.Image, p)), m.roots.Sync())
	}
	stack, point, known := m.baseOf(sb, r.Image)
	if !known { // of an earlier version
		there := len(r.Stack)
		for there > len(r.Image.Layers) && isUpper(r.Stack[there-1]) && !m.roots.HasLayer(r.Stack[there-1]) {
			there--
		}
		stack, point = r.Stack[:there], r.Point
	}
	if slices.Equal(stack, r.Stack) {
		return nil
	}
	p := state.PendingRoot{Op: state.RootFreeze, Stack: stack, Point: point}
	if err := m.state.BeginRoot(ctx, sb.ID, p, false); err != nil {
		return err
	}
	m.log.WarnContext(ctx, "the last change of a sandbox's files was not all on disk when the host went down: it stands on what its upper was written on", "sandbox", sb.ID, "was", r.Stack, "now", stack)
	return m.state.FinishRoot(ctx, sb.ID, p, 0, "", state.Change{}, true)
}

// errElsewhere tells of a PID 1 that lives in another cgroup than this daemon's.
var errElsewhere = errors.New("its cgroup is not beneath the parent cgroup")

// errUnfinished tells of a PID 1 that never got its root.
var errUnfinished = errors.New("PID 1 has no configuration")

// adopt opens the shell a row names. A PID 1 that lives is adopted also where
// it does not answer, or cannot be reached because its socket or the run
// directory is lost: what it holds is not ours to throw away. Its end is seen
// by the watch, as that of any other.
func (m *Manager) adopt(ctx context.Context, b *box, row state.Row) error {
	shell, err := m.shells.Open(b.id, row.InitPID, row.InitStart)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.shell = shell // whatever becomes of it: dropShell closes it
	b.mu.Unlock()
	ping, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	info, err := b.guest.Ping(ping)
	if err == nil && !info.Configured {
		return errUnfinished
	}
	if err != nil && !errors.Is(err, sandbox.ErrUnsupported) && ctx.Err() == nil {
		m.log.ErrorContext(ctx, "PID 1 lives but cannot be asked: its processes go on; 'sandbox stop' ends them and keeps the files, 'sandbox start' then makes what was lost", "sandbox", b.id, "err", err)
		err = nil
	}
	u, uerr := m.cgroup.Usage(b.id)
	if errors.Is(uerr, sandbox.ErrNotFound) { // it cannot be removed while PID 1 is in it
		return errElsewhere
	}
	if uerr == nil {
		b.mu.Lock()
		b.oomKills = u.OOMKills
		b.mu.Unlock()
		m.memoryOver(ctx, b) // goes on with what an earlier daemon began
	}
	return err
}

// settle does what was decided.
func (m *Manager) settle(ctx context.Context, f inherited) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTimeout)
	defer cancel()
	if err := f.b.lock(ctx); err != nil {
		return // cannot be: nobody else knows the box yet
	}
	defer f.b.unlock()
	log := m.log.With("sandbox", f.b.id, "status", f.row.Status)
	switch f.fate {
	case fateStay:
		_ = m.filesOf(ctx, &f.row.Sandbox) // logs, and is found again
		m.armDeadline(f.b, f.row.Sandbox)
	case fateAdopt:
		// A crash between freezing and the row, or thawing and the row.
		if err := m.freezeAs(ctx, f.b.id, f.row.Status); err != nil {
			log.ErrorContext(ctx, "adopt sandbox: its workload is not as its row says", "err", err)
		}
		f.b.mu.Lock()
		f.b.adopted = time.Now()
		f.b.mu.Unlock()
		m.watch(f.b, f.row.Sandbox, f.b.shell, m.lastRecorded(ctx, f.b.id))
		log.InfoContext(ctx, "adopted sandbox", "init_pid", f.row.InitPID)
		if now := m.inForce(f.row.Spec.Network).Mode; now != f.row.Spec.Network.Mode {
			log.WarnContext(ctx, "the sandbox's network policy is more than network.most permits: it is held to that", "mode", f.row.Spec.Network.Mode, "now", now)
		}
	case fateHalt:
		log.InfoContext(ctx, "stopping sandbox left by an earlier daemon")
		ch := state.Change{Actor: "daemon"}
		switch {
		case f.row.Status == sandbox.StatusCreating:
			ch = startFailed(errors.New("the daemon ended meanwhile"))
		case f.e.reason != sandbox.ReasonNone:
			ch = f.e.change()
		}
		_, _ = m.halt(ctx, f.b, f.row.Sandbox, ch) // logs, and tries again by itself
	case fateEnd:
		log.InfoContext(ctx, "ending sandbox left by an earlier daemon", "reason", f.e.reason)
		_ = m.endLocked(ctx, f.b, f.e) // as well
	}
}

// lastRecorded is the number PID 1 gave to the last end of a process that
// is in the event log.
func (m *Manager) lastRecorded(ctx context.Context, id sandbox.ID) int64 {
	e, err := m.state.LastEvent(ctx, id, eventProcessExited, "sandbox."+string(sandbox.StatusCreating))
	if err != nil {
		if !errors.Is(err, sandbox.ErrNotFound) {
			m.log.WarnContext(ctx, "read the event log: ends of processes may be told twice", "sandbox", id, "err", err)
		}
		return 0
	}
	seq, err := strconv.ParseInt(e.Data[initSeq], 10, 64)
	if err != nil {
		return 0
	}
	return seq
}

// tidyUp does what recovery can do without.
func (m *Manager) tidyUp(ctx context.Context, rows []state.Row) {
	ctx, cancel := context.WithTimeout(ctx, teardownTimeout)
	defer cancel()
	for what, err := range map[string]error{
		"remove what no sandbox owns": m.sweepUp(ctx, rows),
		"make the host image":         m.refreshHostImage(ctx),
		"forget lost snapshots":       m.forgetLost(ctx),
		"put the volumes in order":    m.recoverVolumes(ctx),
		"forget old schedules":        m.state.DropOldSchedules(ctx),
		"forget old ports":            m.state.DropOldPorts(ctx),
		"forget old steps of builds":  m.pruneBuilds(ctx),
		"remove unused layers":        m.collectLayers(ctx),
		"delete old records":          m.state.Prune(ctx, m.cfg.KeepEnded, m.cfg.KeepEvents),
	} {
		if err != nil {
			m.log.ErrorContext(ctx, "tidy up after the last run: "+what, "err", err)
		}
	}
}

// pruneForever keeps the database from growing without bound.
func (m *Manager) pruneForever() {
	for {
		select {
		case <-m.life.Done():
			return
		case <-time.After(pruneEvery):
		}
		if err := m.state.Prune(m.life, m.cfg.KeepEnded, m.cfg.KeepEvents); err != nil && m.life.Err() == nil {
			m.log.Warn("delete old records", "err", err)
		}
	}
}

// sweepUp sweeps and then frees the slots of what was swept: of sandboxes
// that had ended, and of pooled shells. Where something could not be removed,
// all of those slots wait for the next start.
func (m *Manager) sweepUp(ctx context.Context, rows []state.Row) error {
	if err := m.sweep(ctx, rows); err != nil {
		return err
	}
	return m.state.ReleaseReserved(ctx)
}

// sweep removes kernel objects whose sandbox the database does not know as
// living: what a crash left between a terminal row and its clean-up, and the
// shells of the pool. Files that somebody wrote stay unless a row says that
// their sandbox has ended; where it lives, its slot stays taken.
func (m *Manager) sweep(ctx context.Context, rows []state.Row) error {
	orphans, err := m.unowned(rows)
	errs := []error{err}
	for id, what := range orphans {
		if m.written(ctx, id) {
			m.log.ErrorContext(ctx, "found files of a sandbox that the database does not know: they stay; 'sandboxd recover' lists, adopts and removes them", "sandbox", id, "what", what)
			if slices.Contains(what, "cgroup") {
				errs = append(errs, fmt.Errorf("sandbox %s is not in the database, and may be running", id))
			}
			continue
		}
		m.log.WarnContext(ctx, "removing what no sandbox owns", "what", what, "sandbox", id)
		errs = append(errs, m.cgroup.Kill(ctx, id), m.cgroup.Remove(ctx, id), m.shells.Remove(id), m.roots.Discard(id, -1))
	}
	return errors.Join(errs...)
}
