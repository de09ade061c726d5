package runtime

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// maxSchedules is how many one sandbox can have.
	maxSchedules = 32
	// minInterval is how close two runs may be.
	minInterval = 10 * time.Second
	// scheduleNap bounds the wait for the next run, lest a clock that is set
	// back holds them all.
	scheduleNap = time.Minute
)

// cronForm reads five fields and @descriptors; of a time zone only if named.
var cronForm = cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

// nextRun is when an expression comes due after a moment.
func nextRun(expression string, after time.Time) (time.Time, error) {
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_cron", "cron expression %.80q: "+format, append([]any{expression}, args...)...)
	}
	s := strings.TrimSpace(expression)
	if !strings.HasPrefix(s, "TZ=") && !strings.HasPrefix(s, "CRON_TZ=") {
		s = "TZ=UTC " + s
	}
	if !strings.Contains(s, " ") { // the parser would look for one beyond its end
		return time.Time{}, bad("a time zone, and no time; use '%s 0 3 * * *'", s)
	}
	plan, err := cronForm.Parse(s)
	if err != nil {
		return time.Time{}, bad("%w; use five fields, as '0 3 * * *', or @hourly, @daily, @weekly, @monthly, @every 30m", err)
	}
	next := plan.Next(after)
	switch {
	case next.IsZero():
		return next, bad("it never comes due")
	case plan.Next(next).Sub(next) < minInterval:
		return next, bad("it comes due more often than every %s", minInterval)
	}
	return next.UTC(), nil
}

// NextRun is when a cron expression comes due after a moment. Class ErrInvalid.
func NextRun(expression string, after time.Time) (time.Time, error) {
	return nextRun(expression, after)
}

// AddSchedule repeats a snapshot or a reset of a sandbox. It goes with the
// sandbox. Runs missed while the daemon was down are not made up for.
func (m *Manager) AddSchedule(ctx context.Context, ref string, s sandbox.Schedule) (sandbox.Schedule, error) {
	if err := m.open(); err != nil {
		return sandbox.Schedule{}, err
	}
	bad := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.ErrInvalid, "invalid_schedule", format, args...)
	}
	switch {
	case s.Action != sandbox.ScheduleSnapshot && s.Action != sandbox.ScheduleReset:
		return s, bad("action %.20q: use snapshot or reset", s.Action)
	case s.Keep < 0 || s.KeepFor < 0:
		return s, bad("keep %d, keep_seconds %d: use 0 or more", s.Keep, s.KeepFor)
	case s.Action == sandbox.ScheduleReset && (s.Keep > 0 || s.KeepFor > 0):
		return s, bad("a reset keeps nothing: leave keep and keep_seconds out")
	case s.Action == sandbox.ScheduleSnapshot && s.Force:
		return s, bad("force is for resets")
	}
	_, sb, err := m.find(ctx, ref)
	if err != nil {
		return s, err
	}
	now := time.Now().UTC()
	if s.NextAt, err = nextRun(s.Cron, now); err != nil {
		return s, err
	}
	present, err := m.state.Schedules(ctx, sb.ID)
	if err != nil {
		return s, err
	}
	if len(present) >= maxSchedules {
		return s, sandbox.Errorf(sandbox.ErrExhausted, "too_many_schedules", "sandbox %s has %d schedules already: remove one first", sb.ID, len(present))
	}
	s = sandbox.Schedule{
		ID: sandbox.NewScheduleID(), Sandbox: sb.ID, Action: s.Action, Cron: s.Cron, Keep: s.Keep, KeepFor: s.KeepFor, Force: s.Force,
		CreatedAt: now, NextAt: s.NextAt,
	}
	if err := m.state.PutSchedule(ctx, s); err != nil {
		return s, err
	}
	m.rescheduled()
	return s, nil
}

// Schedules lists those of one sandbox, or without a ref all.
func (m *Manager) Schedules(ctx context.Context, ref string) ([]sandbox.Schedule, error) {
	if ref == "" {
		return m.state.Schedules(ctx, "")
	}
	sb, err := m.Sandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	return m.state.Schedules(ctx, sb.ID)
}

// RemoveSchedule ends a schedule. What it made stays.
func (m *Manager) RemoveSchedule(ctx context.Context, id string) error {
	return m.state.DeleteSchedule(ctx, id)
}

// rescheduled wakes who waits for the next run.
func (m *Manager) rescheduled() {
	select {
	case m.schedules <- struct{}{}:
	default:
	}
}

// keepSchedules runs what comes due until the daemon ends.
func (m *Manager) keepSchedules() {
	for m.life.Err() == nil {
		wait := m.runDue(m.life)
		t := time.NewTimer(min(wait, scheduleNap))
		select {
		case <-m.life.Done():
		case <-m.schedules:
		case <-t.C:
		}
		t.Stop()
	}
}

// skipMissed moves what came due while no daemon ran to its next time.
func (m *Manager) skipMissed(ctx context.Context) {
	all, err := m.state.Schedules(ctx, "")
	now := time.Now().UTC()
	for _, s := range all {
		if s.NextAt.After(now) {
			continue
		}
		if s.NextAt, err = nextRun(s.Cron, now); err == nil {
			err = m.state.ScheduleRan(ctx, s)
		}
		if err != nil {
			break
		}
	}
	if err != nil && ctx.Err() == nil {
		m.log.ErrorContext(ctx, "read the schedules", "err", err)
	}
}

// runDue runs what is due, each besides the others, and returns how long there
// is until the next.
func (m *Manager) runDue(ctx context.Context) time.Duration {
	all, err := m.state.Schedules(ctx, "")
	if err != nil {
		if ctx.Err() == nil {
			m.log.ErrorContext(ctx, "read the schedules", "err", err)
		}
		return scheduleNap
	}
	now := time.Now().UTC()
	wait := scheduleNap
	for _, s := range all {
		if s.NextAt.After(now) {
			wait = min(wait, s.NextAt.Sub(now))
			continue
		}
		_, busy := m.acting.LoadOrStore(s.ID, true)
		// The next time is written before this one runs, so that a crash
		// does not run it twice.
		s, err = m.changeSchedule(ctx, s.ID, func(s *sandbox.Schedule) (err error) {
			if busy {
				s.Skipped++
				s.LastError = "the run before had not ended"
			}
			s.NextAt, err = nextRun(s.Cron, now)
			return err
		})
		if err == nil {
			wait = min(wait, s.NextAt.Sub(now))
		} else if !errors.Is(err, sandbox.ErrNotFound) { // removed meanwhile
			m.log.ErrorContext(ctx, "plan the next run of a schedule", "schedule", s.ID, "err", err)
		}
		switch {
		case busy:
		case err != nil:
			m.acting.Delete(s.ID)
		default:
			m.spawn(func() {
				defer m.acting.Delete(s.ID)
				m.runSchedule(s)
			})
		}
	}
	return max(wait, time.Millisecond)
}

// changeSchedule changes what is written of a schedule, which its planner and
// its run both do.
func (m *Manager) changeSchedule(ctx context.Context, id string, change func(*sandbox.Schedule) error) (sandbox.Schedule, error) {
	m.scheduling.Lock()
	defer m.scheduling.Unlock()
	s, err := m.state.Schedule(ctx, id)
	if err == nil {
		err = change(&s)
	}
	if err == nil {
		err = m.state.ScheduleRan(ctx, s)
	}
	s.ID = id
	return s, err
}

// errInUse tells of a scheduled reset that found a process.
var errInUse = errors.New("a process runs")

func (m *Manager) runSchedule(s sandbox.Schedule) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.life), createTimeout)
	defer cancel()
	failed := m.act(ctx, s)
	if failed != nil {
		m.log.InfoContext(ctx, "a schedule did nothing this time", "schedule", s.ID, "sandbox", s.Sandbox, "action", s.Action, "err", failed)
		m.record(ctx, sandbox.Event{Sandbox: s.Sandbox, Type: "schedule.skipped", Actor: "schedule:" + s.ID, Data: map[string]string{"action": s.Action, "detail": explain(failed)}})
	}
	ctx = context.WithoutCancel(ctx) // which the run may have used up
	_, err := m.changeSchedule(ctx, s.ID, func(s *sandbox.Schedule) error {
		now := time.Now().UTC()
		s.LastAt, s.LastError = &now, ""
		if failed == nil {
			s.Runs++
		} else {
			s.Skipped++
			s.LastError = explain(failed)
		}
		return nil
	})
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) { // removed meanwhile
		m.log.ErrorContext(ctx, "write down a schedule's run", "schedule", s.ID, "err", err)
	}
}

func (m *Manager) act(ctx context.Context, s sandbox.Schedule) error {
	actor := "schedule:" + s.ID
	if s.Action == sandbox.ScheduleReset {
		_, err := m.change(ctx, string(s.Sandbox), func(ctx context.Context, b *box, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
			if !s.Force && sb.Status != sandbox.StatusStopped {
				info, err := b.guest.Ping(ctx)
				if err == nil && info.Live > 0 {
					err = errInUse
				}
				if err != nil {
					return sb, err
				}
			}
			return m.rollback(ctx, b, sb, "", actor)
		})
		return err
	}
	_, err := m.Snapshot(ctx, string(s.Sandbox), sandbox.SnapshotRequest{Kind: sandbox.SnapshotScheduled, Comment: actor, Actor: actor})
	if err != nil {
		return err
	}
	return m.keepScheduled(ctx, s, actor)
}

// keepScheduled removes what a schedule took and no longer wants.
func (m *Manager) keepScheduled(ctx context.Context, s sandbox.Schedule, comment string) error {
	all, err := m.state.Snapshots(ctx, sandbox.SnapshotFilter{Sandbox: s.Sandbox, Kinds: []sandbox.SnapshotKind{sandbox.SnapshotScheduled}})
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(o sandbox.Snapshot) bool { return o.Comment != comment })
	var old []sandbox.Snapshot
	for i, o := range all {
		if s.Keep > 0 && i >= s.Keep || s.KeepFor > 0 && time.Since(o.CreatedAt) > time.Duration(s.KeepFor)*time.Second {
			old = append(old, o)
		}
	}
	return m.removeAll(ctx, old)
}
