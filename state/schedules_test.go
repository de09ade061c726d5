package state

import (
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// TestScheduleOfAnEndedSandbox: one that comes while its sandbox ends is
// refused, or it would stay until the next start.
func TestScheduleOfAnEndedSandbox(t *testing.T) {
	d := open(t)
	for status, refused := range map[sandbox.Status]bool{
		sandbox.StatusRunning: false, sandbox.StatusStopped: false, sandbox.StatusCompleting: true, sandbox.StatusCompleted: true, sandbox.StatusFailed: true,
	} {
		sb := bring(t, d, create(t, d, string(status)), status)
		err := d.PutSchedule(t.Context(), sandbox.Schedule{ID: sandbox.NewScheduleID(), Sandbox: sb.ID, NextAt: time.Now()})
		if refused {
			want(t, err, sandbox.ErrConflict, "sandbox_ended")
		} else if err != nil {
			t.Errorf("of a sandbox that is %s: %v", status, err)
		}
		all, err := d.Schedules(t.Context(), sb.ID)
		if err != nil || (len(all) == 0) != refused {
			t.Errorf("of a sandbox that is %s: %d schedules, %v", status, len(all), err)
		}
	}
}

// TestReleaseSnapshotsBesideAReplacement: a pending change of root that makes
// no snapshot keeps no name from being released, and one that makes one does.
func TestReleaseSnapshotsBesideAReplacement(t *testing.T) {
	d := open(t)
	reserve := func(name string) sandbox.Snapshot {
		return sandbox.Snapshot{ID: sandbox.NewSnapshotID(), Name: name, CreatedAt: time.Now(), Kind: sandbox.SnapshotManual}
	}
	held := reserve("held")
	for i, p := range []PendingRoot{{Op: RootReplace}, {Op: RootFreeze, Snapshot: &held}} {
		if err := d.BeginRoot(t.Context(), bring(t, d, create(t, d, []string{"a", "b"}[i]), sandbox.StatusRunning).ID, p, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.ReserveSnapshot(t.Context(), reserve("free")); err != nil {
		t.Fatal(err)
	}
	want(t, d.ReserveSnapshot(t.Context(), reserve("free")), sandbox.ErrConflict, "snapshot_name_taken")
	if err := d.ReleaseSnapshots(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.ReserveSnapshot(t.Context(), reserve("free")); err != nil {
		t.Errorf("a name an earlier daemon reserved: %v", err)
	}
	want(t, d.ReserveSnapshot(t.Context(), reserve("held")), sandbox.ErrConflict, "snapshot_name_taken")
}
