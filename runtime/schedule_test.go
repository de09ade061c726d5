package runtime

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

func TestNextRun(t *testing.T) {
	at := time.Date(2026, 3, 1, 10, 30, 0, 0, time.UTC)
	for cron, want := range map[string]string{
		"0 3 * * *":                   "2026-03-02 03:00:00",
		"*/15 * * * *":                "2026-03-01 10:45:00",
		"@hourly":                     "2026-03-01 11:00:00",
		"@every 90m":                  "2026-03-01 12:00:00",
		"TZ=Asia/Tokyo 0 3 * * *":     "2026-03-01 18:00:00",
		"  0 0 29 2 *  ":              "2028-02-29 00:00:00",
		"CRON_TZ=Etc/UTC 31 10 * * *": "2026-03-01 10:31:00",
	} {
		got, err := nextRun(cron, at)
		if err != nil || got.Format(time.DateTime) != want {
			t.Errorf("%q: %s, %v; want %s", cron, got.Format(time.DateTime), err, want)
		}
	}
	for _, cron := range []string{"", "x", "* * * *", "60 * * * *", "@every 1s", "@never", "0 0 30 2 *", "TZ=Nowhere/At 0 0 * * *", "* * * * * *", "TZ=UTC", "CRON_TZ=Europe/Berlin ", "TZ="} {
		if got, err := nextRun(cron, at); sandbox.CodeOf(err) != "invalid_cron" {
			t.Errorf("%q: %s, %v; want it refused", cron, got, err)
		}
	}
}

// due makes every schedule come due now and runs it.
func (h *house) due(t *testing.T, dir string) {
	t.Helper()
	all, err := h.Schedules(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int64{}
	for _, s := range all {
		want[s.ID] = s.Runs + s.Skipped + 1
		s.NextAt = time.Now().Add(-time.Second)
		if err := h.db.ScheduleRan(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	h.rescheduled()
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(2 * time.Millisecond) {
		all, err := h.Schedules(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		ran := true
		for _, s := range all {
			ran = ran && s.Runs+s.Skipped >= want[s.ID]
		}
		if ran {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("schedules did not run: %+v", all)
		}
	}
}

func TestSchedules(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{Name: "dev"})
	keep, err := h.AddSchedule(t.Context(), "dev", sandbox.Schedule{Action: sandbox.ScheduleSnapshot, Cron: "@yearly", Keep: 2})
	if err != nil {
		t.Fatal(err)
	}
	reset, err := h.AddSchedule(t.Context(), "dev", sandbox.Schedule{Action: sandbox.ScheduleReset, Cron: "@yearly"})
	if err != nil {
		t.Fatal(err)
	}
	k.setLive(1)
	for range 4 {
		h.due(t, dir)
	}
	got, err := h.Snapshots(t.Context(), "dev", sandbox.SnapshotScheduled)
	if err != nil || len(got) != 2 {
		t.Errorf("%d snapshots kept, %v; want 2", len(got), err)
	}
	s, err := h.db.Schedule(t.Context(), reset.ID)
	if err != nil || s.Runs != 0 || s.Skipped != 4 || s.LastError == "" {
		t.Errorf("reset while a process runs: %+v, %v", s, err)
	}
	k.setLive(0)
	h.due(t, dir)
	if s, err = h.db.Schedule(t.Context(), reset.ID); err != nil || s.Runs != 1 || s.LastError != "" {
		t.Errorf("reset of an idle one: %+v, %v", s, err)
	}
	// What came due while no daemon ran is left out, not made up for.
	h.crash()
	sqlDo(t, dir, `UPDATE schedules SET next_at = 1, record = json_set(record, '$.next_at', '1970-01-01T00:00:00Z')`)
	h = open(t, k, dir)
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(2 * time.Millisecond) {
		if s, err = h.db.Schedule(t.Context(), keep.ID); err != nil {
			t.Fatal(err)
		}
		if s.NextAt.After(time.Now()) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("its next run was not planned anew")
		}
	}
	if s.Runs != 5 {
		t.Errorf("it ran %d times, want 5", s.Runs)
	}
	if err := h.RemoveSchedule(t.Context(), keep.ID); err != nil {
		t.Fatal(err)
	}
	if err := h.RemoveSchedule(t.Context(), keep.ID); sandbox.CodeOf(err) != "schedule_not_found" {
		t.Errorf("removing it twice: %v", err)
	}
	if _, err := h.Remove(t.Context(), string(sb.ID), ""); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; <-time.After(2 * time.Millisecond) {
		all, err := h.Schedules(t.Context(), "")
		if err != nil || len(all) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("schedules outlive their sandbox: %+v", all)
		}
	}
	for _, bad := range []sandbox.Schedule{{Action: "x", Cron: "@daily"}, {Action: "reset", Cron: "@daily", Keep: 1}, {Action: "snapshot", Cron: "@daily", Force: true}, {Action: "snapshot", Cron: "@daily", Keep: -1}} {
		if _, err := h.AddSchedule(t.Context(), "dev", bad); sandbox.CodeOf(err) != "invalid_schedule" {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

// TestScheduleWaitsForItsRun: while one run goes on the next do nothing, and
// its end plans nothing anew.
func TestScheduleWaitsForItsRun(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{})
	s, err := h.AddSchedule(t.Context(), string(sb.ID), sandbox.Schedule{Action: sandbox.ScheduleSnapshot, Cron: "@yearly"})
	if err != nil {
		t.Fatal(err)
	}
	// now makes it come due and waits until it was dealt with.
	now := func(done func(sandbox.Schedule) bool) {
		t.Helper()
		s.NextAt = time.Now().Add(-time.Second)
		if err := h.db.ScheduleRan(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		h.rescheduled()
		for deadline := time.Now().Add(10 * time.Second); ; <-time.After(2 * time.Millisecond) {
			if s, err = h.db.Schedule(t.Context(), s.ID); err != nil {
				t.Fatal(err)
			}
			if s.NextAt.After(time.Now()) && done(s) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("schedule %+v", s)
			}
		}
	}
	b := h.box(sb.ID)
	b.op <- struct{}{} // a long change
	now(func(sandbox.Schedule) bool { return true })
	now(func(s sandbox.Schedule) bool { return s.Skipped == 1 })
	now(func(s sandbox.Schedule) bool { return s.Skipped == 2 })
	next := s.NextAt
	b.unlock()
	for deadline := time.Now().Add(10 * time.Second); s.Runs == 0; <-time.After(2 * time.Millisecond) {
		if s, err = h.db.Schedule(t.Context(), s.ID); err != nil || time.Now().After(deadline) {
			t.Fatalf("schedule %+v, %v", s, err)
		}
	}
	if !s.NextAt.Equal(next) || s.Runs != 1 || s.Skipped != 2 {
		t.Errorf("after the run %+v; want it due at %s", s, next)
	}
	if all, err := h.Snapshots(t.Context(), string(sb.ID)); err != nil || len(all) != 1 {
		t.Errorf("%d snapshots, %v; want that of one run", len(all), err)
	}
}
