package state

import (
	"errors"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// TestOwnersHaveNamesOfTheirOwn: two may have a sandbox of one name, one may
// not have two, and what one has the other is told nothing of.
func TestOwnersHaveNamesOfTheirOwn(t *testing.T) {
	d := open(t)
	made := map[string]sandbox.Sandbox{}
	for _, owner := range []string{"alice", "bob"} {
		p := params("web")
		p.Sandbox.Owner = owner
		sb, _, err := d.CreateSandbox(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		made[owner] = sb
		p.Sandbox.ID = sandbox.NewID()
		_, _, err = d.CreateSandbox(t.Context(), p)
		want(t, err, sandbox.ErrConflict, "name_taken")
	}
	for owner, own := range made {
		foreign := made[map[string]string{"alice": "bob", "bob": "alice"}[owner]]
		for _, ref := range []string{"web", string(own.ID), string(own.ID[:10])} {
			if sb, err := d.OwnByRef(t.Context(), owner, ref); err != nil || sb.ID != own.ID {
				t.Errorf("%s of %s: %s, %v", ref, owner, sb.ID, err)
			}
		}
		for _, ref := range []string{string(foreign.ID), string(foreign.ID[:10])} {
			_, err := d.OwnByRef(t.Context(), owner, ref)
			want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
		}
		ctx := access.With(t.Context(), access.Caller{Owner: owner, Role: access.RoleAdmin})
		if sb, err := d.ByRef(ctx, "web"); err != nil || sb.ID != own.ID {
			t.Errorf("the name for %s, who sees all: %s, %v", owner, sb.Owner, err)
		}
		page, err := d.List(t.Context(), sandbox.Filter{Owner: owner})
		if err != nil || len(page.Items) != 1 || page.Items[0].ID != own.ID {
			t.Errorf("list of %s: %+v, %v", owner, page.Items, err)
		}
		events, err := d.OwnEvents(t.Context(), owner, 0, 0)
		if err != nil || len(events) == 0 {
			t.Errorf("events of %s: %d, %v", owner, len(events), err)
		}
		for _, e := range events {
			if e.Sandbox != own.ID {
				t.Errorf("%s sees %s of %s", owner, e.Type, e.Sandbox)
			}
		}
	}
	asAdmin := access.With(t.Context(), access.Caller{Owner: "root", Role: access.RoleAdmin})
	_, err := d.ByRef(asAdmin, "web")
	want(t, err, sandbox.ErrNotFound, "sandbox_not_found")
	if sb, err := d.ByRef(asAdmin, "web@bob"); err != nil || sb.ID != made["bob"].ID {
		t.Errorf("web@bob for an admin: %s, %v", sb.Owner, err)
	}
	_, err = d.ByRef(access.With(t.Context(), access.Caller{Owner: "bob", Role: access.RoleDeveloper}), "web@alice")
	want(t, err, sandbox.ErrInvalid, "invalid_reference")
	if sb, err := d.ByRef(t.Context(), "web"); err != nil || sb.ID != made["alice"].ID {
		t.Errorf("the name for the daemon itself: %s, %v; want who had it first", sb.Owner, err)
	}
	first := made["alice"].ID
	bring(t, d, made["alice"], sandbox.StatusCompleted)
	if sb, err := d.ByRef(t.Context(), "web"); err != nil || sb.ID != first {
		t.Errorf("the name once the first has ended: %s, %v; want it to pass to nobody", sb.Owner, err)
	}
}

// TestHeldCountsWhatLives: what a quota adds up, builds, volumes and snapshots
// included, and nothing of others or of what has ended.
func TestHeldCountsWhatLives(t *testing.T) {
	d := open(t)
	for _, owner := range []string{"alice", "alice", "build:alice", "bob"} {
		p := params("")
		p.Sandbox.ID, p.Sandbox.Owner = sandbox.NewID(), owner
		p.Sandbox.Spec.Limits = sandbox.Limits{CPUs: 1.5, MemoryBytes: 1 << 28, DiskBytes: 1 << 30}
		if _, _, err := d.CreateSandbox(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	p := params("")
	p.Sandbox.ID, p.Sandbox.Owner = sandbox.NewID(), "alice"
	over, _, err := d.CreateSandbox(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	bring(t, d, over, sandbox.StatusCompleted)
	for _, v := range []sandbox.Volume{{Name: "v", Owner: "alice", SizeBytes: 1 << 20}, {Name: "w", Owner: "bob", SizeBytes: 1 << 21}} {
		if err := d.AddVolume(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	s := sandbox.Snapshot{ID: sandbox.NewSnapshotID(), Owner: "alice", Name: "s", Sandbox: over.ID, Kind: sandbox.SnapshotManual, CreatedAt: time.Now(), SizeBytes: 7}
	if err := d.ReserveSnapshot(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if err := d.PutSnapshot(t.Context(), s, ""); err != nil {
		t.Fatal(err)
	}
	got, err := d.Held(t.Context(), "alice")
	if want := (access.Held{Sandboxes: 3, CPUs: 4.5, MemoryBytes: 3 << 28, DiskBytes: 3<<30 + 1<<20 + 7}); err != nil || got != want {
		t.Errorf("held %+v, %v; want %+v", got, err, want)
	}

	if _, err := d.OwnSnapshot(t.Context(), "alice", "s"); err != nil {
		t.Error(err)
	}
	_, foreign := d.OwnSnapshot(t.Context(), "bob", "s")
	_, none := d.OwnSnapshot(t.Context(), "carol", "s")
	if foreign == nil || none == nil || foreign.Error() != none.Error() {
		t.Errorf("%v, %v", foreign, none)
	}
	other := s
	other.ID, other.Owner = sandbox.NewSnapshotID(), "bob"
	if err := d.ReserveSnapshot(t.Context(), other); err != nil {
		t.Errorf("the name of another's snapshot: %v", err)
	}
	other.ID = sandbox.NewSnapshotID()
	want(t, d.ReserveSnapshot(t.Context(), other), sandbox.ErrConflict, "snapshot_name_taken")

	if name, err := d.OwnVolume(t.Context(), "alice", "v.mark", "v"); err != nil || name != "v" {
		t.Errorf("volume %q, %v", name, err)
	}
	_, err = d.OwnVolume(t.Context(), "alice", "w.mark", "w")
	want(t, err, sandbox.ErrNotFound, "volume_not_found")
}

// TestProjectsOfOwners: as sandboxes, and their events.
func TestProjectsOfOwners(t *testing.T) {
	d := open(t)
	ids := map[string]project.ID{}
	for _, owner := range []string{"alice", "bob"} {
		p := project.Project{ID: project.NewID(), Name: "shop", Owner: owner, Status: project.StatusActive, CreatedAt: time.Now()}
		ids[owner] = p.ID
		err := d.UpdateLab(t.Context(), func(tx project.Tx) error {
			if err := tx.PutProject(p); err != nil {
				return err
			}
			return tx.Tell(sandbox.Event{Type: "project.alert", Actor: "daemon", Data: map[string]string{"project": string(p.ID)}})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if p, err := d.OwnProject(t.Context(), "bob", "shop"); err != nil || p.ID != ids["bob"] {
		t.Errorf("%s, %v", p.ID, err)
	}
	_, err := d.OwnProject(t.Context(), "bob", string(ids["alice"]))
	want(t, err, sandbox.ErrNotFound, "project_not_found")
	if events, err := d.OwnEvents(t.Context(), "bob", 0, 0); err != nil || len(events) != 1 || events[0].Data["project"] != string(ids["bob"]) {
		t.Errorf("%+v, %v", events, err)
	}
	err = d.UpdateLab(t.Context(), func(tx project.Tx) error {
		return tx.PutProject(project.Project{ID: project.NewID(), Name: "shop", Owner: "bob", Status: project.StatusActive})
	})
	want(t, err, sandbox.ErrConflict, "project_exists")
}

// TestHostNamesStayWithTheirHolder: where no caller says whose is meant, as in
// a host name, a name leads to nobody's sandbox but its holder's, until that
// one is removed, loses it, or has not used it for 30 days.
func TestHostNamesStayWithTheirHolder(t *testing.T) {
	const quarantine = 30 * 24 * time.Hour
	begin := time.Now()
	type town struct {
		*DB

		made  func(owner string, after time.Duration) sandbox.Sandbox
		means func(owner, when string)
	}
	setUp := func(t *testing.T) town {
		d := open(t)
		return town{d, func(owner string, after time.Duration) sandbox.Sandbox {
			p := params("web")
			p.Sandbox.Owner, p.Sandbox.CreatedAt = owner, begin.Add(after)
			sb, _, err := d.CreateSandbox(t.Context(), p)
			if err != nil {
				t.Fatal(err)
			}
			return sb
		}, func(owner, when string) {
			t.Helper()
			if sb, err := d.ByRef(t.Context(), "web"); sb.Owner != owner || (owner == "") != errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("%s: the name means %s's, %v; want %q", when, sb.Owner, err, owner)
			}
		}}
	}
	pruned := func(t *testing.T, d *DB, id sandbox.ID) {
		t.Helper()
		if _, err := d.writer.ExecContext(t.Context(), `DELETE FROM sandboxes WHERE id = ?`, id); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("quarantine", func(t *testing.T) {
		d := setUp(t)
		first := d.made("alice", 0)
		bob := d.made("bob", time.Second)
		d.means("alice", "both live")
		bring(t, d.DB, bob, sandbox.StatusCompleted)
		bring(t, d.DB, d.made("bob", 2*quarantine), sandbox.StatusCompleted)
		d.means("alice", "the holder's one lives, however long")
		bring(t, d.DB, first, sandbox.StatusCompleted)
		pruned(t, d.DB, first.ID)
		d.means("", "the holder's one is gone with its record")
		other := d.made("bob", quarantine-time.Hour)
		d.means("", "30 days are not over")
		if sb, err := d.OwnByRef(t.Context(), "bob", "web"); err != nil || sb.ID != other.ID { // the control
			t.Errorf("the other owner's own: %s, %v", sb.ID, err)
		}
		again := d.made("alice", quarantine-time.Minute)
		d.means("alice", "its holder has one again")
		bring(t, d.DB, again, sandbox.StatusCompleted)
		bring(t, d.DB, other, sandbox.StatusCompleted)
		d.made("bob", quarantine+time.Hour)
		d.means("bob", "30 days are over")
		d.made("alice", quarantine+2*time.Hour)
		d.means("bob", "the former holder has one again")
	})
	t.Run("release", func(t *testing.T) {
		d := setUp(t)
		_, err := d.ReleaseHostName(t.Context(), "web")
		want(t, err, sandbox.ErrNotFound, "host_name_not_found")
		first := d.made("alice", 0)
		d.made("bob", time.Second)
		_, err = d.ReleaseHostName(t.Context(), "web")
		want(t, err, sandbox.ErrConflict, "host_name_in_use")
		d.means("alice", "the release was refused")
		bring(t, d.DB, first, sandbox.StatusCompleted)
		d.means("alice", "the holder's one has ended")
		if h, err := d.ReleaseHostName(t.Context(), "web"); err != nil || h.Owner != "alice" || h.UsedAt.Before(begin) {
			t.Errorf("release: %+v, %v", h, err)
		}
		d.means("bob", "released")
		d.made("alice", time.Minute)
		d.means("bob", "the former holder has one again")
	})
	t.Run("owner", func(t *testing.T) {
		d := setUp(t)
		first := d.made("alice", 0)
		if err := d.DropOwner(t.Context(), "alice", begin); err != nil {
			t.Fatal(err)
		}
		d.made("bob", time.Second)
		d.means("alice", "the owner is gone, its sandbox lives")
		bring(t, d.DB, first, sandbox.StatusCompleted)
		if err := d.DropOwner(t.Context(), "carol", begin); err != nil { // the control
			t.Fatal(err)
		}
		d.means("alice", "another owner is gone")
		if err := d.DropOwner(t.Context(), "alice", begin); err != nil {
			t.Fatal(err)
		}
		d.means("bob", "the owner is gone")
	})
}
