package access

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Bounds of what is kept.
const (
	maxKeysOfOwner = 100
	maxOwners      = 10000
	keptRevoked    = 90 * 24 * time.Hour // of keys that work no longer
	maxName        = 100
)

// KeyRequest asks for a key.
type KeyRequest struct {
	Owner   string
	Role    Role // empty: the owner's; of a new owner developer
	Name    string
	Expires time.Time // zero: never
}

// CreateKey makes a key, and its owner where there is none. The answer alone
// has the secret. Classes ErrInvalid, ErrForbidden with code role_above_owner
// and ErrExhausted with code too_many_keys.
func (o *Office) CreateKey(ctx context.Context, req KeyRequest) (Key, error) {
	if err := ValidateOwner(req.Owner); err != nil {
		return Key{}, err
	}
	if len(req.Name) > maxName || strings.ContainsFunc(req.Name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return Key{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_key_name", "the name of a key has at most %d bytes and no control characters", maxName)
	}
	now := o.now().UTC()
	if !req.Expires.IsZero() && !req.Expires.After(now) {
		return Key{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_expiry", "a key that expired at %s would never work: choose a time to come", req.Expires.Format(time.RFC3339))
	}
	if last := time.Unix(0, math.MaxInt64).UTC(); req.Expires.After(last) {
		return Key{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_expiry", "a key that expires at all expires by %s: leave the time out for one that does not", last.Format(time.RFC3339))
	}
	o.change.Lock()
	defer o.change.Unlock()
	w, err := o.ownerFor(req, now)
	if err != nil {
		return Key{}, err
	}
	if req.Role == "" {
		req.Role = w.Role
	}
	if !w.Role.AtLeast(req.Role) {
		return Key{}, sandbox.Errorf(sandbox.ErrForbidden, "role_above_owner", "owner %s is %s, and a key can be no more: ask for --role %s, or change the owner with 'sandbox owner set %s --role %s'", w.Name, w.Role, w.Role, w.Name, req.Role)
	}
	if err := o.sweep(ctx, w.Name, now); err != nil {
		return Key{}, err
	}
	secret := newSecret()
	k := Key{ID: newKeyID(), Owner: w.Name, Role: req.Role, Name: req.Name, Begins: secret[:beginsLength], CreatedAt: now, Hash: hashOf(secret)}
	if !req.Expires.IsZero() {
		at := req.Expires.UTC()
		k.ExpiresAt = &at
	}
	if err := o.store.InsertKey(ctx, k, w); err != nil {
		return Key{}, err
	}
	o.mu.Lock()
	o.owners[w.Name], o.byHash[k.Hash], o.byID[k.ID] = &w, &k, &k
	o.mu.Unlock()
	shown := k
	shown.Secret = secret
	return shown, nil
}

// ownerFor returns the owner of a key to be made, or who will be; o.change is
// held.
func (o *Office) ownerFor(req KeyRequest, now time.Time) (Owner, error) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if w := o.owners[req.Owner]; w != nil {
		return *w, cmp.Or(disabledError(*w), roleError(req.Role))
	}
	if len(o.owners) >= maxOwners {
		return Owner{}, sandbox.Errorf(sandbox.ErrExhausted, "too_many_owners", "there are %d owners, and no more than that may be: remove one first ('sandbox owner ls')", len(o.owners))
	}
	role := cmp.Or(req.Role, RoleDeveloper)
	return Owner{Name: req.Owner, Role: role, Quota: DefaultQuota(role), CreatedAt: now}, validateRole(role)
}

func disabledError(w Owner) error {
	if w.Disabled {
		return sandbox.Errorf(sandbox.ErrConflict, "owner_disabled", "owner %s is disabled: enable it first with 'sandbox owner set %s --enable'", w.Name, w.Name)
	}
	return nil
}

func roleError(r Role) error {
	if r == "" {
		return nil
	}
	return validateRole(r)
}

// sweep forgets an owner's keys that have long been dead and counts the
// others; o.change is held.
func (o *Office) sweep(ctx context.Context, owner string, now time.Time) error {
	var old []Key
	good := 0
	for _, k := range o.Keys(owner) {
		switch end := k.ended(now); {
		case end.IsZero():
			good++
		case now.Sub(end) > keptRevoked:
			old = append(old, k)
		}
	}
	if good >= maxKeysOfOwner {
		return sandbox.Errorf(sandbox.ErrExhausted, "too_many_keys", "owner %s has %d keys that work: revoke one first ('sandbox key ls --owner %s')", owner, good, owner)
	}
	if len(old) == 0 {
		return nil
	}
	ids := make([]string, len(old))
	for i, k := range old {
		ids[i] = k.ID
	}
	if err := o.store.DropKeys(ctx, ids); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, k := range old {
		delete(o.byHash, k.Hash)
		delete(o.byID, k.ID)
	}
	return nil
}

// ended returns since when a key does not work; zero for one that does.
func (k Key) ended(now time.Time) time.Time {
	if k.RevokedAt != nil {
		return *k.RevokedAt
	}
	if k.ExpiresAt != nil && !now.Before(*k.ExpiresAt) {
		return *k.ExpiresAt
	}
	return time.Time{}
}

// Keys lists keys, of one owner or of all for an empty name, the oldest first.
func (o *Office) Keys(owner string) []Key {
	o.mu.RLock()
	defer o.mu.RUnlock()
	var all []Key
	for _, k := range o.byID {
		if owner == "" || k.Owner == owner {
			all = append(all, *k)
		}
	}
	slices.SortFunc(all, func(a, b Key) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return all
}

// RevokeKey makes a key work no more, at once and for good, and cuts what is
// in flight with it. Repeating it is safe. ErrNotFound.
func (o *Office) RevokeKey(ctx context.Context, id string) (Key, error) {
	o.change.Lock()
	defer o.change.Unlock()
	o.mu.RLock()
	k := o.byID[id]
	o.mu.RUnlock()
	if k == nil {
		return Key{}, sandbox.Errorf(sandbox.ErrNotFound, "key_not_found", "no key %.40q: 'sandbox key ls' lists them", id)
	}
	if k.RevokedAt != nil {
		return *k, nil
	}
	at := o.now().UTC()
	if err := o.store.RevokeKey(ctx, id, at); err != nil {
		return Key{}, err
	}
	o.mu.Lock()
	next := *o.byID[id]
	next.RevokedAt = &at
	o.byID[id], o.byHash[next.Hash] = &next, &next
	o.mu.Unlock()
	o.cutAll(func(c Caller) bool { return c.Key == id })
	return next, nil
}

// Owners lists the owners by name.
func (o *Office) Owners() []Owner {
	o.mu.RLock()
	defer o.mu.RUnlock()
	all := make([]Owner, 0, len(o.owners))
	for _, w := range o.owners {
		all = append(all, *w)
	}
	slices.SortFunc(all, func(a, b Owner) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Owner returns one owner. ErrNotFound.
func (o *Office) Owner(name string) (Owner, error) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if w := o.owners[name]; w != nil {
		return *w, nil
	}
	return Owner{}, ownerNotFound(name)
}

func ownerNotFound(name string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "owner_not_found", "no owner %.80q: 'sandbox owner ls' lists them", name)
}

// OwnerChange says what to set: what is not nil.
type OwnerChange struct {
	Role     *Role
	Disabled *bool
	Quota    func(*Quota) // changes the bounds it knows of
}

// SetOwner changes an owner, or makes one: a name, or uid:N for a user on the
// unix socket. A changed role brings the quota usual for it along, unless the
// quota was set apart. Requests in flight are cut where rights were taken.
// Disabling and enabling make none: ErrNotFound with code owner_not_found where
// nothing is known of the name. Class ErrInvalid.
func (o *Office) SetOwner(ctx context.Context, name string, c OwnerChange) (Owner, error) {
	if err := sandbox.ValidateOwner(name); err != nil {
		return Owner{}, err
	}
	if o.always(name) {
		return Owner{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_owner", "%s is the daemon's own user or root: an admin without bounds, always", name)
	}
	o.change.Lock()
	defer o.change.Unlock()
	before, err := o.Owner(name)
	isNew := err != nil
	w := before
	if isNew {
		if c.Disabled != nil {
			if err := o.seen(ctx, name); err != nil {
				return Owner{}, err
			}
		}
		if n := len(o.Owners()); n >= maxOwners {
			return Owner{}, sandbox.Errorf(sandbox.ErrExhausted, "too_many_owners", "there are %d owners, and no more than that may be: remove one first ('sandbox owner ls')", n)
		}
		w = Owner{Name: name, Role: RoleDeveloper, CreatedAt: o.now().UTC()}
		w.Quota = DefaultQuota(w.Role)
	}
	if c.Role != nil {
		if err := validateRole(*c.Role); err != nil {
			return Owner{}, err
		}
		if w.Quota == DefaultQuota(w.Role) {
			w.Quota = DefaultQuota(*c.Role)
		}
		w.Role = *c.Role
	}
	if c.Disabled != nil {
		w.Disabled = *c.Disabled
	}
	if c.Quota != nil {
		c.Quota(&w.Quota)
	}
	if err := w.Quota.Validate(); err != nil {
		return Owner{}, err
	}
	if err := o.store.PutOwner(ctx, w); err != nil {
		return Owner{}, err
	}
	o.mu.Lock()
	o.owners[name] = &w
	o.mu.Unlock()
	if w.Disabled || isNew || w.Role != before.Role { // a user on the socket was somebody before the first word said of them
		o.cutAll(func(caller Caller) bool { return caller.Owner == name })
	}
	return w, nil
}

// seen returns owner_not_found where an owner never called and has nothing.
func (o *Office) seen(ctx context.Context, name string) error {
	known, err := o.store.OwnerSeen(ctx, name)
	if err != nil || known || o.paces.have(name) {
		return err
	}
	return sandbox.Errorf(sandbox.ErrNotFound, "owner_not_found", "no owner %.80q, nothing was changed: 'sandbox owner ls' and 'sandbox audit ls' show the names; to take a name nobody has, make it first ('sandbox owner set %s --role viewer')", name, name)
}

// RemoveOwner forgets an owner and revokes its keys. What it has stays, and
// belongs to whoever gets the name next: disabling keeps the name taken.
// ErrNotFound.
func (o *Office) RemoveOwner(ctx context.Context, name string) error {
	o.change.Lock()
	defer o.change.Unlock()
	if _, err := o.Owner(name); err != nil {
		return err
	}
	at := o.now().UTC()
	if err := o.store.DropOwner(ctx, name, at); err != nil {
		return err
	}
	o.mu.Lock()
	delete(o.owners, name)
	for id, k := range o.byID {
		if k.Owner == name && k.RevokedAt == nil {
			next := *k
			next.RevokedAt = &at
			o.byID[id], o.byHash[k.Hash] = &next, &next
		}
	}
	o.mu.Unlock()
	o.cutAll(func(c Caller) bool { return c.Owner == name })
	return nil
}
