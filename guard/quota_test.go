package guard

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
	"github.com/sandboxd/sandboxd/state"
)

// makes has the backend make sandboxes in rows, after a while; some come to
// nothing.
func (w *town) makes(failing float64) {
	w.back.create = func(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
		pause := func() { <-time.After(time.Duration(rand.IntN(2000)) * time.Microsecond) }
		pause()
		if rand.Float64() < failing {
			return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrUnavailable, "came_to_nothing", "came to nothing")
		}
		req.Spec.Limits = w.cfg.Defaults // as the manager fills them in
		sb, _, err := w.db.CreateSandbox(ctx, state.CreateParams{
			Sandbox: sandbox.Sandbox{ID: sandbox.NewID(), Owner: req.Actor, Spec: req.Spec}, Slots: 1000, Actor: req.Actor,
			IdempotencyKey: req.IdempotencyKey, RequestHash: "h",
		})
		pause() // the row is there before it is said so
		return sb, err
	}
}

// TestQuotaHoldsUnderLoad: however many ask at once, the quota is reached and
// never passed; what fails takes nothing of it, and what goes makes room.
func TestQuotaHoldsUnderLoad(t *testing.T) {
	for _, c := range []struct {
		name string
		q    access.Quota
		code string
		most int
	}{
		{"sandboxes", access.Quota{Sandboxes: 4}, "quota_sandboxes", 4},
		{"cpus", access.Quota{CPUs: 4.5}, "quota_cpus", 4},
		{"memory", access.Quota{MemoryBytes: 5 << 28, Sandboxes: 100}, "quota_memory", 5},
		{"disk", access.Quota{DiskBytes: 3 << 30}, "quota_disk", 2}, // one has no limit of its own: see below
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newTown(t, c.q)
			w.makes(0.3)
			ctx := w.as(alice, access.RoleDeveloper)
			if c.name == "disk" { // a volume counts
				if err := w.db.AddVolume(ctx, sandbox.Volume{Name: "v", Owner: alice, SizeBytes: 1 << 30}); err != nil {
					t.Fatal(err)
				}
			}
			// What alice had from the start has no limits, and is one of the living.
			had, err := w.db.Held(ctx, alice)
			if err != nil {
				t.Fatal(err)
			}
			want := c.most
			if c.name == "sandboxes" {
				want -= had.Sandboxes
			}
			var mu sync.Mutex
			made := 0
			var wg sync.WaitGroup
			for range 60 {
				wg.Go(func() {
					for range 3 {
						_, err := w.Create(ctx, sandbox.CreateRequest{})
						mu.Lock()
						if err == nil {
							made++
						} else if code := sandbox.CodeOf(err); code != c.code && code != "came_to_nothing" {
							t.Errorf("create: %v", err)
						} else if code == c.code && !errors.Is(err, sandbox.ErrExhausted) {
							t.Errorf("class of %v", err)
						}
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			if made != want {
				t.Errorf("%d made, want %d", made, want)
			}
			if len(w.purses.all) != 0 {
				t.Errorf("reservations are left: %v", w.purses.all)
			}
			w.makes(0)
			page, err := w.db.List(ctx, sandbox.Filter{Owner: alice})
			if err != nil {
				t.Fatal(err)
			}
			gone := page.Items[0]
			if _, err := w.db.Move(ctx, gone.ID, []sandbox.Status{gone.Status}, sandbox.StatusFailed, state.Change{}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Create(ctx, sandbox.CreateRequest{}); err != nil {
				t.Errorf("with one gone: %v", err)
			}
			if _, err := w.Create(ctx, sandbox.CreateRequest{}); sandbox.CodeOf(err) != c.code {
				t.Errorf("and full again: %v", err)
			}
			if _, err := w.Create(w.as(bob, access.RoleDeveloper), sandbox.CreateRequest{}); err != nil {
				t.Errorf("another's is another's: %v", err)
			}
			if _, err := w.Create(w.as(alice, access.RoleOperator), sandbox.CreateRequest{}); err != nil {
				t.Errorf("those who see all have none: %v", err)
			}
		})
	}
}

// TestAbandonedCreatesKeepTheirRoom: a caller that goes away lets nobody in
// before the row of what it asked for is there.
func TestAbandonedCreatesKeepTheirRoom(t *testing.T) {
	w := newTown(t, access.Quota{Sandboxes: 2})
	w.makes(0)
	begun, goOn := make(chan struct{}), make(chan struct{})
	slow := w.back.create
	w.back.create = func(ctx context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
		close(begun)
		<-goOn
		return slow(ctx, req)
	}
	ctx, leave := context.WithCancel(w.as(alice, access.RoleDeveloper))
	left := make(chan error, 1)
	go func() {
		_, err := w.Create(ctx, sandbox.CreateRequest{})
		left <- err
	}()
	<-begun
	leave()
	if err := <-left; sandbox.CodeOf(err) != "create_abandoned" {
		t.Fatalf("abandoned: %v", err)
	}
	w.back.create = slow
	second := make(chan error, 1)
	go func() {
		_, err := w.Create(w.as(alice, access.RoleDeveloper), sandbox.CreateRequest{})
		second <- err
	}()
	select {
	case err := <-second:
		t.Fatalf("the second did not wait for the first: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(goOn)
	if err := <-second; sandbox.CodeOf(err) != "quota_sandboxes" {
		t.Errorf("the second: %v", err)
	}
}

// TestRepeatedRequestNeedsNoRoom: the answer of an idempotency key is there,
// full or not.
func TestRepeatedRequestNeedsNoRoom(t *testing.T) {
	w := newTown(t, access.Quota{Sandboxes: 2})
	w.makes(0)
	ctx := w.as(alice, access.RoleDeveloper)
	first, err := w.Create(ctx, sandbox.CreateRequest{IdempotencyKey: "k"})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := w.Create(ctx, sandbox.CreateRequest{IdempotencyKey: "k"}); err != nil || again.ID != first.ID {
		t.Errorf("%s, %v", again.ID, err)
	}
	if _, err := w.Create(ctx, sandbox.CreateRequest{IdempotencyKey: "other"}); sandbox.CodeOf(err) != "quota_sandboxes" {
		t.Errorf("another key: %v", err)
	}
}

// TestSpecsOfDevelopers: what a spec may say, what becomes of it, and what is
// somebody else's.
func TestSpecsOfDevelopers(t *testing.T) {
	q := access.Quota{Lifetime: time.Hour, Idle: 10 * time.Minute}
	w := newTown(t, q)
	w.back.images = append(w.back.images, sandbox.Image{Name: "debian", Digest: "x"})
	var got sandbox.Spec
	w.back.create = func(_ context.Context, req sandbox.CreateRequest) (sandbox.Sandbox, error) {
		got = req.Spec
		return sandbox.Sandbox{Owner: req.Actor, Spec: req.Spec}, nil
	}
	ref := func(kind, owner string) string { return w.refs[kind][owner][0] }
	mark := namesOf(alice).mark
	for _, c := range []struct {
		name string
		spec sandbox.Spec
		code string // empty: it is made
	}{
		{"nothing", sandbox.Spec{}, ""},
		{"own snapshot", sandbox.Spec{Snapshot: sandbox.SnapshotID(ref("snapshot", alice))}, ""},
		{"another's snapshot", sandbox.Spec{Snapshot: sandbox.SnapshotID(ref("snapshot", bob))}, "snapshot_not_found"},
		{"shared image", sandbox.Spec{Image: "debian"}, ""},
		{"own image", sandbox.Spec{Image: ref("image", alice)}, ""},
		{"another's image", sandbox.Spec{Image: ref("image", bob)}, "image_not_found"},
		{"own project", sandbox.Spec{Project: ref("project", alice)}, ""},
		{"another's project", sandbox.Spec{Project: ref("project", bob)}, "project_not_found"},
		{"own agent", sandbox.Spec{Labels: map[string]string{project.LabelAgent: ref("agent", alice)}}, ""},
		{"another's agent", sandbox.Spec{Labels: map[string]string{project.LabelAgent: ref("agent", bob)}}, "agent_not_found"},
		{"an agent's name", sandbox.Spec{Name: ref("agent", bob)}, "name_reserved"},
		{"bind", sandbox.Spec{Volumes: []sandbox.VolumeMount{{HostPath: "/srv", Path: "/s"}}}, "bind_denied"},
		{"heavy", sandbox.Spec{Limits: sandbox.Limits{CPUWeight: 101}}, "role_forbidden"},
		{"resolver", sandbox.Spec{Network: sandbox.NetworkPolicy{DNS: make([]netip.Addr, 1)}}, "role_forbidden"},
	} {
		_, err := w.Create(w.as(alice, access.RoleDeveloper), sandbox.CreateRequest{Spec: c.spec, Actor: bob})
		if c.code == "" && err != nil || c.code != "" && sandbox.CodeOf(err) != c.code {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	in := sandbox.Spec{
		Volumes: []sandbox.VolumeMount{{Volume: "alice-thing", Path: "/v"}}, TTLSeconds: 7200, IdleTimeoutSeconds: 60,
		Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkOpen, Group: "g", HTTP: &sandbox.HTTPGate{Inject: []sandbox.Credential{{Host: "x", Header: "y", Secret: "s"}}}},
	}
	out, err := w.Create(w.as(alice, access.RoleDeveloper), sandbox.CreateRequest{Spec: in, Actor: bob})
	if err != nil || out.Owner != alice {
		t.Fatalf("owner %q, %v", out.Owner, err)
	}
	if got.Volumes[0].Volume != "alice-thing"+mark || got.Network.Group != "g"+mark || got.Network.HTTP.Inject[0].Secret != "s"+mark ||
		got.TTLSeconds != 3600 || got.IdleTimeoutSeconds != 60 {
		t.Errorf("asked of the manager: %+v", got)
	}
	if o := out.Spec; o.Volumes[0].Volume != "alice-thing" || o.Network.Group != "g" || o.Network.HTTP.Inject[0].Secret != "s" {
		t.Errorf("told: %+v", o)
	}
	if in.Volumes[0].Volume != "alice-thing" || in.Network.Group != "g" || in.Network.HTTP.Inject[0].Secret != "s" {
		t.Errorf("what was asked has changed: %+v", in)
	}
	if _, err := w.Create(w.as(alice, access.RoleOperator), sandbox.CreateRequest{Spec: in}); err != nil || !slices.Equal(got.Volumes, in.Volumes) || got.TTLSeconds != 7200 {
		t.Errorf("of an operator: %+v, %v", got, err)
	}
}

func TestWithinABound(t *testing.T) {
	for _, c := range []struct {
		asked      int64
		own, bound time.Duration
		want       int64
	}{
		{0, 0, 0, 0},
		{90, 0, 0, 90},
		{0, 0, time.Minute, 60},
		{30, 0, time.Minute, 30},
		{90, 0, time.Minute, 60},
		{0, 30 * time.Second, time.Minute, 0},
		{0, time.Hour, time.Minute, 60},
		{0, 0, time.Millisecond, 1},
	} {
		if got := within(c.asked, c.own, c.bound); got != c.want {
			t.Errorf("within(%d, %s, %s) = %d, want %d", c.asked, c.own, c.bound, got, c.want)
		}
	}
}

// TestNamesOfImages: what developers name is in their folder.
func TestNamesOfImages(t *testing.T) {
	for owner, names := range map[string]map[string]bool{
		alice:      {"own/alice/x": true, "own/alice/x:1": true, "x": false, "own/bob/x": false, "own/alice": false, "own/alice/": false, "own/alice2/x": false, "": false},
		"uid:1000": {"own/uid-1000/x": true, "own/uid:1000/x": false},
	} {
		a := &asker{Caller: access.Caller{Owner: owner}, names: namesOf(owner)}
		for name, fine := range names {
			if err := a.ownImage(name); (err == nil) != fine {
				t.Errorf("%s naming %q: %v", owner, name, err)
			}
		}
	}
}

// TestOneImportOfAnOwner: what one owner sends at a time takes one place, the
// image or the snapshot; another owner's does not wait for it.
func TestOneImportOfAnOwner(t *testing.T) {
	w := newTown(t, access.Quota{})
	begun, goOn := make(chan string, 10), make(chan struct{})
	w.back.take = func(ctx context.Context) {
		c, _ := access.Of(ctx)
		begun <- c.Owner
		<-goOn
	}
	var wg sync.WaitGroup
	for _, owner := range []string{alice, alice, alice, bob} {
		wg.Go(func() {
			_, _ = w.ImportImage(w.as(owner, access.RoleDeveloper), sandbox.ImportRequest{Name: "own/" + owner + "/x"}, nil)
		})
		wg.Go(func() { _, _ = w.ImportSnapshot(w.as(owner, access.RoleDeveloper), "x", "", nil) })
	}
	if one, other := <-begun, <-begun; one == other {
		t.Errorf("two imports of %s at once", one)
	}
	late, cancel := context.WithCancel(w.as(alice, access.RoleDeveloper))
	cancel()
	if _, err := w.ImportSnapshot(late, "x", "", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that left while it waited: %v", err)
	}
	select {
	case who := <-begun:
		t.Errorf("another import of %s began", who)
	case <-time.After(100 * time.Millisecond):
	}
	close(goOn)
	wg.Wait()
	if n := len(begun); n != 6 {
		t.Errorf("%d imports after the first two, want 6", n)
	}
}
