package state

import (
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

// TestNamesStayWithWhoHadThemFirst: where no caller says whose is meant, as in
// a host name, a name never passes to another owner, however long ago it was
// free and its record pruned.
func TestNamesStayWithWhoHadThemFirst(t *testing.T) {
	d := open(t)
	made := func(owner string, at time.Time) sandbox.Sandbox {
		p := params("web")
		p.Sandbox.Owner, p.Sandbox.CreatedAt = owner, at
		sb, _, err := d.CreateSandbox(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		return sb
	}
	begin := time.Now()
	first := made("alice", begin)
	other := made("bob", begin.Add(time.Second))
	means := func(want sandbox.ID, when string) {
		t.Helper()
		if sb, err := d.ByRef(t.Context(), "web"); sb.ID != want || want != "" && err != nil {
			t.Errorf("%s: the name means %q (%s), %v", when, sb.ID, sb.Owner, err)
		}
	}
	means(first.ID, "both live")
	if _, err := d.writer.ExecContext(t.Context(), `INSERT INTO ledger (sandbox, owner, project, name, image, labels, created_at) VALUES (?, 'alice', '', 'web', '', '{}', ?)`, first.ID, begin.UnixMilli()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.writer.ExecContext(t.Context(), `UPDATE sandboxes SET status = 'completed', ended_at = 1 WHERE id = ?`, first.ID); err != nil {
		t.Fatal(err)
	}
	means(first.ID, "the first has ended")
	if _, err := d.writer.ExecContext(t.Context(), `UPDATE sandboxes SET name = '' WHERE id = ?`, first.ID); err != nil {
		t.Fatal(err)
	}
	means("", "the ledger alone remembers it")
	if sb, err := d.OwnByRef(t.Context(), "bob", "web"); err != nil || sb.ID != other.ID { // the control
		t.Errorf("the other owner's own: %s, %v", sb.ID, err)
	}
	means(made("alice", begin.Add(2*time.Second)).ID, "its owner has one again")
}
