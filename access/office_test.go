package access

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// memory is a store of tests.
type memory struct {
	mu     sync.Mutex
	owners map[string]Owner
	keys   map[string]Key
	uses   int
	seen   string // an owner that has something
	fail   error
}

func newMemory() *memory { return &memory{owners: map[string]Owner{}, keys: map[string]Key{}} }

func (m *memory) Owners(context.Context) (all []Owner, err error) {
	for _, w := range m.owners {
		all = append(all, w)
	}
	return all, m.fail
}

func (m *memory) Keys(context.Context) (all []Key, err error) {
	for _, k := range m.keys {
		all = append(all, k)
	}
	return all, m.fail
}

func (m *memory) PutOwner(_ context.Context, o Owner) error {
	if m.fail == nil {
		m.owners[o.Name] = o
	}
	return m.fail
}

func (m *memory) OwnerSeen(_ context.Context, name string) (bool, error) {
	return m.seen == name, m.fail
}

func (m *memory) DropOwner(_ context.Context, name string, at time.Time) error {
	for id, k := range m.keys {
		if k.Owner == name && k.RevokedAt == nil {
			k.RevokedAt = &at
			m.keys[id] = k
		}
	}
	delete(m.owners, name)
	return m.fail
}

func (m *memory) InsertKey(_ context.Context, k Key, o Owner) error {
	if m.fail == nil {
		m.keys[k.ID], m.owners[o.Name] = k, o
	}
	return m.fail
}

func (m *memory) RevokeKey(_ context.Context, id string, at time.Time) error {
	k := m.keys[id]
	k.RevokedAt = &at
	m.keys[id] = k
	return m.fail
}

func (m *memory) DropKeys(_ context.Context, ids []string) error {
	for _, id := range ids {
		delete(m.keys, id)
	}
	return m.fail
}

func (m *memory) UseKeys(_ context.Context, used map[string]time.Time) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.uses += len(used)
	return m.fail
}

// clock is a time that tests move.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

func office(t *testing.T) (*Office, *memory, *clock) {
	t.Helper()
	m, c := newMemory(), &clock{at: time.Unix(1_790_000_000, 0)}
	o, err := Open(t.Context(), Config{Store: m, Now: c.now, Self: 77})
	if err != nil {
		t.Fatal(err)
	}
	return o, m, c
}

func mustKey(t *testing.T, o *Office, req KeyRequest) Key {
	t.Helper()
	k, err := o.CreateKey(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func want(t *testing.T, err, class error, code string) {
	t.Helper()
	if !errors.Is(err, class) || sandbox.CodeOf(err) != code {
		t.Errorf("%v (%s), want %s", err, sandbox.CodeOf(err), code)
	}
}

func TestKeysLife(t *testing.T) {
	o, m, c := office(t)
	k := mustKey(t, o, KeyRequest{Owner: "alice", Name: "laptop"})
	if !wellFormed(k.Secret) || k.Role != RoleDeveloper || m.keys[k.ID].Secret != "" || fmt.Sprintf("%v %#v", k, k) != fmt.Sprintf("key %s of alice key %s of alice", k.ID, k.ID) {
		t.Errorf("%v", k)
	}
	caller, err := o.ByKey(t.Context(), k.Secret, "192.0.2.1:7")
	if err != nil || caller != (Caller{Owner: "alice", Role: RoleDeveloper, Key: k.ID, From: "192.0.2.1:7"}) {
		t.Errorf("%+v %v", caller, err)
	}
	other := newSecret()
	for _, bad := range []string{other, k.Secret + "0", k.Secret[:20], "x", "e2b_" + k.Secret, k.ID} {
		_, err := o.ByKey(t.Context(), bad, "")
		want(t, err, sandbox.ErrUnauthenticated, "key_unknown")
	}
	_, err = o.ByKey(t.Context(), "", "")
	want(t, err, sandbox.ErrUnauthenticated, "key_missing")

	short := mustKey(t, o, KeyRequest{Owner: "alice", Role: RoleViewer, Expires: c.now().Add(time.Hour)})
	if caller, err := o.ByKey(t.Context(), short.Secret, ""); err != nil || caller.Role != RoleViewer {
		t.Errorf("%+v %v", caller, err)
	}
	c.pass(time.Hour)
	_, err = o.ByKey(t.Context(), short.Secret, "")
	want(t, err, sandbox.ErrUnauthenticated, "key_expired")

	// A second office reads the same.
	again, err := Open(t.Context(), Config{Store: m, Now: c.now})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.ByKey(t.Context(), k.Secret, ""); err != nil {
		t.Error(err)
	}
	for range 2 {
		if r, err := o.RevokeKey(t.Context(), k.ID); err != nil || r.RevokedAt == nil {
			t.Errorf("%v", err)
		}
	}
	_, err = o.ByKey(t.Context(), k.Secret, "")
	want(t, err, sandbox.ErrUnauthenticated, "key_revoked")
	_, err = o.RevokeKey(t.Context(), "key_none")
	want(t, err, sandbox.ErrNotFound, "key_not_found")
	if all := o.Keys("alice"); len(all) != 2 || all[0].Secret != "" || len(o.Keys("bob")) != 0 || len(o.Keys("")) != 2 {
		t.Errorf("%v", all)
	}
}

func TestAKeyIsNoMoreThanItsOwner(t *testing.T) {
	o, _, _ := office(t)
	k := mustKey(t, o, KeyRequest{Owner: "ops", Role: RoleOperator})
	_, err := o.CreateKey(t.Context(), KeyRequest{Owner: "ops", Role: RoleAdmin})
	want(t, err, sandbox.ErrForbidden, "role_above_owner")
	viewer := RoleViewer
	if _, err := o.SetOwner(t.Context(), "ops", OwnerChange{Role: &viewer}); err != nil {
		t.Fatal(err)
	}
	if caller, err := o.ByKey(t.Context(), k.Secret, ""); err != nil || caller.Role != RoleViewer {
		t.Errorf("%+v %v", caller, err)
	}
	yes, no := true, false
	if _, err := o.SetOwner(t.Context(), "ops", OwnerChange{Disabled: &yes}); err != nil {
		t.Fatal(err)
	}
	_, err = o.ByKey(t.Context(), k.Secret, "")
	want(t, err, sandbox.ErrForbidden, "owner_disabled")
	_, err = o.CreateKey(t.Context(), KeyRequest{Owner: "ops"})
	want(t, err, sandbox.ErrConflict, "owner_disabled")
	if _, err := o.SetOwner(t.Context(), "ops", OwnerChange{Disabled: &no}); err != nil {
		t.Fatal(err)
	}
	if _, err = o.ByKey(t.Context(), k.Secret, ""); err != nil { // the control
		t.Error(err)
	}
	if err := o.RemoveOwner(t.Context(), "ops"); err != nil {
		t.Fatal(err)
	}
	_, err = o.ByKey(t.Context(), k.Secret, "")
	want(t, err, sandbox.ErrUnauthenticated, "key_revoked")
	mustKey(t, o, KeyRequest{Owner: "ops"})
	_, err = o.ByKey(t.Context(), k.Secret, "")
	want(t, err, sandbox.ErrUnauthenticated, "key_revoked")
	want(t, o.RemoveOwner(t.Context(), "nobody"), sandbox.ErrNotFound, "owner_not_found")
}

func TestBadRequestsForKeys(t *testing.T) {
	o, m, c := office(t)
	for _, tc := range []struct {
		req  KeyRequest
		code string
	}{
		{KeyRequest{Owner: ""}, "invalid_owner"},
		{KeyRequest{Owner: "uid:1000"}, "invalid_owner"},
		{KeyRequest{Owner: "Alice"}, "invalid_owner"},
		{KeyRequest{Owner: "uid-1000"}, "invalid_owner"},
		{KeyRequest{Owner: "-a"}, "invalid_owner"},
		{KeyRequest{Owner: "a/b"}, "invalid_owner"},
		{KeyRequest{Owner: "a", Role: "king"}, "invalid_role"},
		{KeyRequest{Owner: "a", Name: "x\n"}, "invalid_key_name"},
		{KeyRequest{Owner: "a", Expires: c.now()}, "invalid_expiry"},
		{KeyRequest{Owner: "a", Expires: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)}, "invalid_expiry"}, // later than a database's nanoseconds
	} {
		_, err := o.CreateKey(t.Context(), tc.req)
		want(t, err, sandbox.ErrInvalid, tc.code)
	}
	m.fail = errors.New("disk")
	if _, err := o.CreateKey(t.Context(), KeyRequest{Owner: "a"}); !errors.Is(err, m.fail) || len(o.Keys("")) != 0 || len(o.Owners()) != 0 {
		t.Errorf("%v: %v %v", err, o.Keys(""), o.Owners())
	}
	m.fail = nil
	for range maxKeysOfOwner {
		mustKey(t, o, KeyRequest{Owner: "a", Expires: c.now().Add(time.Hour)})
	}
	_, err := o.CreateKey(t.Context(), KeyRequest{Owner: "a"})
	want(t, err, sandbox.ErrExhausted, "too_many_keys")
	c.pass(time.Hour)
	mustKey(t, o, KeyRequest{Owner: "a"})
	c.pass(keptRevoked + time.Second)
	mustKey(t, o, KeyRequest{Owner: "a"})
	if n := len(o.Keys("a")); n != 2 || len(m.keys) != 2 {
		t.Errorf("%d keys are kept, %d in the store, want the 2 that work", n, len(m.keys))
	}
}

func TestSocket(t *testing.T) {
	o, m, _ := office(t)
	m.seen = "uid:1002"
	role := RoleViewer
	yes := true
	for name, change := range map[string]OwnerChange{"uid:1001": {Role: &role}, "uid:1002": {Disabled: &yes}} {
		if _, err := o.SetOwner(t.Context(), name, change); err != nil {
			t.Fatal(err)
		}
	}
	for uid, want := range map[uint32]Role{0: RoleAdmin, 77: RoleAdmin, 1000: RoleDeveloper, 1001: RoleViewer} {
		if c, err := o.BySocket(uid); err != nil || c.Role != want || c.Owner != fmt.Sprintf("uid:%d", uid) || c.From != "unix" {
			t.Errorf("%d: %+v, %v", uid, c, err)
		}
	}
	_, err := o.BySocket(1002)
	want(t, err, sandbox.ErrForbidden, "owner_disabled")
	for _, name := range []string{"uid:0", "uid:77", "uid:x", "uid:01", "Bob"} {
		_, err := o.SetOwner(t.Context(), name, OwnerChange{})
		want(t, err, sandbox.ErrInvalid, "invalid_owner")
	}
}

// TestDisableNobody disables and enables names nobody knows: a mistyped one must
// not pass for the one that is meant.
func TestDisableNobody(t *testing.T) {
	o, m, _ := office(t)
	yes, no, role := true, false, RoleViewer
	for _, name := range []string{"alcie", "uid:1003"} {
		for _, c := range []OwnerChange{{Disabled: &yes}, {Disabled: &no}, {Disabled: &yes, Role: &role}} {
			_, err := o.SetOwner(t.Context(), name, c)
			want(t, err, sandbox.ErrNotFound, "owner_not_found")
		}
	}
	if all := o.Owners(); len(all) != 0 || len(m.owners) != 0 {
		t.Errorf("made %v", all)
	}
	m.seen = "uid:1000"
	mustKey(t, o, KeyRequest{Owner: "alice"})
	if err := o.Pace(Caller{Owner: "uid:1001"}); err != nil { // has only looked
		t.Fatal(err)
	}
	if _, err := o.SetOwner(t.Context(), "new", OwnerChange{Quota: func(q *Quota) { q.Sandboxes = 5 }}); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"alice", "new", "uid:1000", "uid:1001"} {
		if w, err := o.SetOwner(t.Context(), name, OwnerChange{Disabled: &yes}); err != nil || !w.Disabled {
			t.Errorf("%s: %+v, %v", name, w, err)
		}
	}
}

func TestQuotas(t *testing.T) {
	o, _, _ := office(t)
	operator := RoleOperator
	for name, c := range map[string]OwnerChange{
		"ops": {Role: &operator}, "big": {Quota: func(q *Quota) { q.Sandboxes = 50 }}, "uid:5": {Quota: func(q *Quota) { q.CPUs = 1 }},
	} {
		if _, err := o.SetOwner(t.Context(), name, c); err != nil {
			t.Fatal(err)
		}
	}
	big, small := DeveloperQuota(), DeveloperQuota()
	big.Sandboxes, small.CPUs = 50, 1
	for name, want := range map[string]Quota{"ops": {}, "big": big, "uid:5": small, "uid:6": DeveloperQuota(), "uid:0": {}, "uid:77": {}, "nobody": DeveloperQuota()} {
		if q, err := o.Quota(t.Context(), name); err != nil || q != want {
			t.Errorf("%s: %+v, %v", name, q, err)
		}
	}
	_, err := o.SetOwner(t.Context(), "big", OwnerChange{Quota: func(q *Quota) { q.DiskBytes = -1 }})
	want(t, err, sandbox.ErrInvalid, "invalid_quota")
}

func TestPace(t *testing.T) {
	o, _, c := office(t)
	caller := Caller{Owner: "alice", Role: RoleDeveloper}
	if _, err := o.SetOwner(t.Context(), "alice", OwnerChange{Quota: func(q *Quota) { q.PerMinute = 60 }}); err != nil {
		t.Fatal(err)
	}
	send := func() (taken int, err error) {
		for ; taken < 1000; taken++ {
			if err = o.Pace(caller); err != nil {
				return taken, err
			}
		}
		return taken, nil
	}
	n, err := send()
	want(t, err, sandbox.ErrExhausted, "too_many_requests")
	if later, ok := errors.AsType[*Later](err); n != burst || !ok || later.Seconds() != 1 {
		t.Errorf("%d taken, %v", n, err)
	}
	if err := o.Pace(Caller{Owner: "bob"}); err != nil { // the control
		t.Error(err)
	}
	c.pass(3 * time.Second)
	if n, _ := send(); n != 3 {
		t.Errorf("%d taken after 3 s", n)
	}
	if _, err := o.SetOwner(t.Context(), "alice", OwnerChange{Quota: func(q *Quota) { q.PerMinute = 0 }}); err != nil {
		t.Fatal(err)
	}
	if n, err := send(); err != nil || n != 1000 {
		t.Errorf("without a bound %d, %v", n, err)
	}
}

// TestRefusalsAreHeldBack: who is refused much waits, and nobody else does.
func TestRefusalsAreHeldBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, _, _ := office(t)
		waits := func(owner string, n int) time.Duration {
			began := time.Now()
			for range n {
				o.HoldBack(t.Context(), Caller{Owner: owner})
			}
			return time.Since(began)
		}
		if got := waits("alice", refusalsNow); got != 0 {
			t.Errorf("the first %d refusals took %v", refusalsNow, got)
		}
		if got := waits("alice", 20); got != 20*time.Second/refusalsRate {
			t.Errorf("the next 20 took %v", got)
		}
		var wg sync.WaitGroup
		began := time.Now()
		for range 200 { // at once: none waits longer than the longest
			wg.Go(func() { o.HoldBack(t.Context(), Caller{Owner: "alice"}) })
		}
		wg.Wait()
		if got := time.Since(began); got != longestHold {
			t.Errorf("200 at once took %v", got)
		}
		for _, owner := range []string{"bob", "uid:0"} {
			if got := waits(owner, refusalsNow); got != 0 {
				t.Errorf("%s waited %v", owner, got)
			}
		}
		if got := waits("uid:0", 1000); got != 0 {
			t.Errorf("root waited %v", got)
		}
	})
}

func TestWrongKeysAreSlowed(t *testing.T) {
	o, _, c := office(t)
	k := mustKey(t, o, KeyRequest{Owner: "alice"})
	for i := range failuresAtOnce + 5 {
		_, err := o.ByKey(t.Context(), "wrong", "192.0.2.1:7")
		code := "key_unknown"
		if i >= failuresAtOnce {
			code = "too_many_failures"
		}
		if sandbox.CodeOf(err) != code {
			t.Fatalf("%d: %v", i, err)
		}
	}
	_, err := o.ByKey(t.Context(), "wrong", "192.0.2.2:7")
	want(t, err, sandbox.ErrUnauthenticated, "key_unknown")
	if _, err := o.ByKey(t.Context(), k.Secret, "192.0.2.1:7"); err != nil {
		t.Errorf("a good key from there: %v", err)
	}
	c.pass(failureEvery)
	_, err = o.ByKey(t.Context(), "wrong", "192.0.2.1:7")
	want(t, err, sandbox.ErrUnauthenticated, "key_unknown")
	for i := range 3 * mostAddresses {
		_, _ = o.ByKey(t.Context(), "wrong", fmt.Sprintf("[2001:db8:%x:%x::%x]:7", i>>16, i&0xffff, i))
	}
	if n := len(o.failures.all); n > mostAddresses {
		t.Errorf("%d addresses are remembered", n)
	}
	for i := range 3 {
		if network(fmt.Sprintf("[2001:db8::%x]:7", i)) != network("2001:db8::ffff") {
			t.Error("one /64 counts as many addresses")
		}
	}
}

func TestUseIsWrittenOnceAMinute(t *testing.T) {
	o, m, c := office(t)
	k := mustKey(t, o, KeyRequest{Owner: "alice"})
	uses := func() int {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.uses
	}
	for range 3 {
		for range 100 {
			if _, err := o.ByKey(t.Context(), k.Secret, ""); err != nil {
				t.Fatal(err)
			}
		}
		c.pass(time.Minute)
	}
	deadline := time.Now().Add(5 * time.Second)
	for uses() < 3 && time.Now().Before(deadline) {
		<-time.After(time.Millisecond)
	}
	if n := uses(); n != 3 {
		t.Errorf("written %d times in 3 minutes", n)
	}
	if got := o.Keys("alice")[0].UsedAt; got == nil || !got.Equal(c.now().Add(-time.Minute)) {
		t.Errorf("last used %v", got)
	}
}

func TestHoldsAreCut(t *testing.T) {
	o, _, _ := office(t)
	a, b := mustKey(t, o, KeyRequest{Owner: "alice"}), mustKey(t, o, KeyRequest{Owner: "alice"})
	caller := func(k Key) Caller { return Caller{Owner: "alice", Role: RoleDeveloper, Key: k.ID} }
	var mu sync.Mutex
	cut := map[string]int{}
	var why []string
	hold := func(c Caller) func() {
		return o.Hold(c, func(err error) {
			mu.Lock()
			defer mu.Unlock()
			cut[c.Key]++
			why = append(why, sandbox.CodeOf(err))
		})
	}
	release := hold(caller(a))
	release()
	release()
	release = hold(caller(a))
	hold(caller(b))
	if _, err := o.RevokeKey(t.Context(), a.ID); err != nil {
		t.Fatal(err)
	}
	if cut[a.ID] != 1 || cut[b.ID] != 0 {
		t.Errorf("%v", cut)
	}
	release()
	hold(caller(a))() // what was let in just before
	if cut[a.ID] != 2 {
		t.Errorf("%v", cut)
	}
	set := func(c OwnerChange) {
		if _, err := o.SetOwner(t.Context(), "alice", c); err != nil {
			t.Fatal(err)
		}
	}
	set(OwnerChange{Role: new(RoleOperator)}) // who has more rights keeps what they had
	if cut[b.ID] != 0 {
		t.Errorf("cut since the role was raised: %v", cut)
	}
	set(OwnerChange{Role: new(RoleViewer)})
	set(OwnerChange{Disabled: new(true)})
	if cut[b.ID] != 2 {
		t.Errorf("%v", cut)
	}
	if want := []string{"key_revoked", "key_revoked", "role_too_low", "owner_disabled"}; !slices.Equal(why, want) {
		t.Errorf("cut for %v, want %v", why, want)
	}
}

func TestHoldsEndWithTheKey(t *testing.T) {
	m := newMemory()
	o, err := Open(t.Context(), Config{Store: m})
	if err != nil {
		t.Fatal(err)
	}
	k := mustKey(t, o, KeyRequest{Owner: "alice", Expires: time.Now().Add(50 * time.Millisecond)})
	done := make(chan error, 1)
	o.Hold(Caller{Owner: "alice", Key: k.ID}, func(why error) { done <- why })
	select {
	case why := <-done:
		want(t, why, sandbox.ErrUnauthenticated, "key_expired")
	case <-time.After(10 * time.Second):
		t.Error("an expired key's request goes on")
	}
}

// TestRevocationRaces: no request that begins after a revocation came back is
// let in, however many ask meanwhile.
func TestRevocationRaces(t *testing.T) {
	o, _, _ := office(t)
	for range 20 {
		k := mustKey(t, o, KeyRequest{Owner: "alice"})
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 50 {
					_, _ = o.ByKey(t.Context(), k.Secret, "")
				}
			})
		}
		if _, err := o.RevokeKey(t.Context(), k.ID); err != nil {
			t.Fatal(err)
		}
		_, err := o.byKey(k.Secret, o.now()) // without the slowing
		want(t, err, sandbox.ErrUnauthenticated, "key_revoked")
		wg.Wait()
		_, err = o.byKey(k.Secret, o.now())
		want(t, err, sandbox.ErrUnauthenticated, "key_revoked")
	}
}

func BenchmarkByKey(b *testing.B) {
	o, err := Open(b.Context(), Config{Store: newMemory()})
	if err != nil {
		b.Fatal(err)
	}
	k, err := o.CreateKey(b.Context(), KeyRequest{Owner: "alice"})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := o.ByKey(b.Context(), k.Secret, "192.0.2.1:7"); err != nil {
			b.Fatal(err)
		}
	}
}
