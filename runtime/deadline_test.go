package runtime

import (
	"errors"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// near reports whether a deadline is so far from now, give or take.
func near(at *time.Time, want time.Duration) bool {
	return at != nil && (time.Until(*at)-want).Abs() < 20*time.Second
}

func TestSetDeadline(t *testing.T) {
	k, dir := newKernel(t), t.TempDir()
	h := open(t, k, dir)
	sb := create(t, h, sandbox.Spec{Name: "a", TTLSeconds: 100})
	ttl := func(secs int64) *int64 { return &secs }
	set := func(req sandbox.DeadlineRequest) sandbox.Sandbox {
		t.Helper()
		got, err := h.SetDeadline(t.Context(), "a", req)
		if err != nil {
			t.Fatal(err)
		}
		if row := h.get(t, sb.ID); (row.Deadline == nil) != (got.Deadline == nil) || row.Spec.OnDeadline != got.Spec.OnDeadline {
			t.Errorf("the answer is %+v, the row %+v", got, row)
		}
		return got
	}
	steps := []struct {
		what string
		req  sandbox.DeadlineRequest
		want time.Duration // 0: none
	}{
		{"later", sandbox.DeadlineRequest{TTLSeconds: ttl(1000)}, 1000 * time.Second},
		{"sooner", sandbox.DeadlineRequest{TTLSeconds: ttl(500)}, 500 * time.Second},
		{"not extended", sandbox.DeadlineRequest{TTLSeconds: ttl(50), AtLeast: true}, 500 * time.Second},
		{"extended", sandbox.DeadlineRequest{TTLSeconds: ttl(900), AtLeast: true}, 900 * time.Second},
		{"the action alone", sandbox.DeadlineRequest{OnDeadline: sandbox.DeadlinePause}, 900 * time.Second},
		{"none", sandbox.DeadlineRequest{TTLSeconds: ttl(0)}, 0},
		{"none is the longest", sandbox.DeadlineRequest{TTLSeconds: ttl(9), AtLeast: true}, 0},
		{"again", sandbox.DeadlineRequest{TTLSeconds: ttl(700)}, 700 * time.Second},
	}
	for _, s := range steps {
		if got := set(s.req); s.want == 0 && got.Deadline != nil || s.want > 0 && !near(got.Deadline, s.want) {
			t.Errorf("%s: deadline %v, want in %s", s.what, got.Deadline, s.want)
		}
	}
	// A daemon that is killed and comes back has it, and acts by it.
	h.crash()
	h = open(t, k, dir)
	if got := h.get(t, sb.ID); !near(got.Deadline, 700*time.Second) || got.Spec.OnDeadline != sandbox.DeadlinePause {
		t.Errorf("after a crash: deadline %v, %s", got.Deadline, got.Spec.OnDeadline)
	}
	for what, req := range map[string]sandbox.DeadlineRequest{
		"nothing": {}, "negative": {TTLSeconds: ttl(-1)}, "too long": {TTLSeconds: ttl(1 << 40)}, "unknown": {OnDeadline: "explode"},
	} {
		if _, err := h.SetDeadline(t.Context(), "a", req); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := h.Remove(t.Context(), "a", "me"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.SetDeadline(t.Context(), string(sb.ID), sandbox.DeadlineRequest{TTLSeconds: ttl(9)}); !errors.Is(err, sandbox.ErrConflict) {
		t.Errorf("of an ended one: %v", err)
	}
}

// TestRestAtDeadline: what outlives its deadline has none while it rests, and
// all of its lifetime again once it goes on.
func TestRestAtDeadline(t *testing.T) {
	for action, want := range map[sandbox.DeadlineAction]sandbox.Status{
		sandbox.DeadlinePause: sandbox.StatusPaused, sandbox.DeadlineStop: sandbox.StatusStopped,
	} {
		for _, crash := range []bool{false, true} {
			k, dir := newKernel(t), t.TempDir()
			h := open(t, k, dir)
			sb := create(t, h, sandbox.Spec{TTLSeconds: 1, OnDeadline: action})
			if crash { // the deadline passes while no daemon runs
				h.crash()
				<-time.After(time.Until(*sb.Deadline))
				h = open(t, k, dir)
			}
			got := until(t, h, sb.ID, func(s sandbox.Sandbox) bool { return s.Status == want })
			if got.Deadline != nil || got.Reason != sandbox.ReasonTTL {
				t.Errorf("%s, crash %v: %+v", action, crash, got)
			}
			hour := int64(3600)
			if _, err := h.SetDeadline(t.Context(), string(sb.ID), sandbox.DeadlineRequest{TTLSeconds: &hour, AtLeast: true}); err != nil {
				t.Fatal(err)
			}
			if _, err := h.SetDeadline(t.Context(), string(sb.ID), sandbox.DeadlineRequest{Hold: true}); err != nil {
				t.Fatal(err)
			}
			up := h.Resume
			if want == sandbox.StatusStopped {
				up = h.Start
			}
			if got, err := up(t.Context(), string(sb.ID), "me"); err != nil || got.Status != sandbox.StatusRunning || !near(got.Deadline, time.Hour) || got.Reason != "" {
				t.Errorf("%s, crash %v, going on: %+v, %v", action, crash, got, err)
			}
			if !h.box(sb.ID).hasDeadline(t) {
				t.Errorf("%s: the new deadline has no timer", action)
			}
			h.agree(t)
		}
	}
}

// TestDeadlineMovedInTime: a timer that fires while the deadline is being moved
// finds the new one.
func TestDeadlineMovedInTime(t *testing.T) {
	h := open(t, newKernel(t), t.TempDir())
	sb := create(t, h, sandbox.Spec{TTLSeconds: 5})
	b := h.box(sb.ID)
	if err := b.lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-time.After(time.Until(*sb.Deadline) + 50*time.Millisecond)
	later := time.Now().Add(time.Hour).UTC()
	if err := h.state.Update(t.Context(), sb.ID, state.Change{Deadline: &later}); err != nil {
		t.Fatal(err)
	}
	b.unlock()
	if _, err := h.Pause(t.Context(), string(sb.ID), "me"); err != nil {
		t.Fatal(err)
	}
	if got := h.get(t, sb.ID); got.Status != sandbox.StatusPaused || !got.Deadline.Equal(later) {
		t.Errorf("%+v", got)
	}
}
