package access

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Store keeps owners and keys. What it writes lasts when it returns, the use
// of keys excepted.
type Store interface {
	Owners(ctx context.Context) ([]Owner, error)
	Keys(ctx context.Context) ([]Key, error)
	// PutOwner makes an owner, or changes one.
	PutOwner(ctx context.Context, o Owner) error
	// OwnerSeen reports whether anything is kept of an owner: things, keys or
	// rows of the audit.
	OwnerSeen(ctx context.Context, name string) (bool, error)
	// DropOwner forgets an owner and revokes its keys.
	DropOwner(ctx context.Context, name string, at time.Time) error
	// InsertKey writes a key and, where it is missing, its owner.
	InsertKey(ctx context.Context, k Key, o Owner) error
	RevokeKey(ctx context.Context, id string, at time.Time) error
	// DropKeys forgets keys that work no longer.
	DropKeys(ctx context.Context, ids []string) error
	// UseKeys notes when keys were last used.
	UseKeys(ctx context.Context, used map[string]time.Time) error
}

// Config is what an office is made of.
type Config struct {
	Store Store
	// SocketRole is what users on the unix socket are of whom nothing else
	// was said; empty means developer. Root and Self are admins.
	SocketRole Role
	Self       uint32       // the daemon's own uid
	Log        *slog.Logger // nil means slog.Default
	Now        func() time.Time
}

// Office knows keys and owners, all of them in memory: a request is judged
// without the database, and what was revoked is gone at once. One office
// writes a store. Its methods may be called at the same time.
type Office struct {
	store Store
	role  Role
	self  uint32
	log   *slog.Logger
	now   func() time.Time

	change sync.Mutex // held while something is written and taken over

	mu     sync.RWMutex
	byHash map[[sha256.Size]byte]*Key // revoked ones too, to say so
	byID   map[string]*Key
	owners map[string]*Owner
	used   map[string]time.Time // what the store has not been told of
	told   time.Time            // when it was last told

	paces    paces
	refused  paces
	failures failures
	holds    holds
}

// Open reads owners and keys. The error is the store's.
func Open(ctx context.Context, c Config) (*Office, error) {
	o := &Office{
		store: c.Store, role: c.SocketRole, self: c.Self, log: c.Log, now: c.Now,
		byHash: map[[sha256.Size]byte]*Key{}, byID: map[string]*Key{}, owners: map[string]*Owner{}, used: map[string]time.Time{},
	}
	if o.role == "" {
		o.role = RoleDeveloper
	}
	if o.log == nil {
		o.log = slog.Default()
	}
	if o.now == nil {
		o.now = time.Now
	}
	owners, err := o.store.Owners(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the owners: %w", err)
	}
	for _, w := range owners {
		o.owners[w.Name] = &w
	}
	keys, err := o.store.Keys(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the keys: %w", err)
	}
	for _, k := range keys {
		o.byHash[k.Hash], o.byID[k.ID] = &k, &k
	}
	return o, nil
}

// Errors of keys. Who has the secret of a key that no longer works may know
// why; of any other text nothing is told but that it is no key.
func errMissing() error {
	return sandbox.Errorf(sandbox.ErrUnauthenticated, "key_missing", "this needs an API key: send 'Authorization: Bearer KEY' or 'X-API-Key: KEY' ('sandbox key create' on the daemon's machine makes one)")
}

func errUnknown() error {
	return sandbox.Errorf(sandbox.ErrUnauthenticated, "key_unknown", "this is no API key of this daemon: look for a typing mistake, or have one made with 'sandbox key create'")
}

// ByKey returns who has a key. from is the address of the other side. Class
// ErrUnauthenticated with code key_missing, key_unknown, key_expired or
// key_revoked; ErrForbidden with code owner_disabled; ErrExhausted with code
// too_many_failures, for wrong keys alone, from an address that sent many.
func (o *Office) ByKey(ctx context.Context, secret, from string) (Caller, error) {
	if err := ctx.Err(); err != nil {
		return Caller{}, err
	}
	now := o.now()
	c, err := o.byKey(secret, now)
	if err == nil {
		c.From = from
		o.noteUse(ctx, c.Key, now)
		return c, nil
	}
	if later := o.Refused(from); later != nil {
		return Caller{}, later
	}
	return Caller{}, err
}

func (o *Office) byKey(secret string, now time.Time) (Caller, error) {
	if secret == "" {
		return Caller{}, errMissing()
	}
	if !wellFormed(secret) {
		return Caller{}, errUnknown()
	}
	hash := hashOf(secret)
	o.mu.RLock()
	defer o.mu.RUnlock()
	k := o.byHash[hash]
	// What the time of the look-up tells is of a hash, not of a secret.
	if k == nil || subtle.ConstantTimeCompare(k.Hash[:], hash[:]) != 1 {
		return Caller{}, errUnknown()
	}
	return o.holder(k, now)
}

// holder returns who has a key that still works; o.mu is held.
func (o *Office) holder(k *Key, now time.Time) (Caller, error) {
	w := o.owners[k.Owner]
	switch {
	case k.RevokedAt != nil || w == nil:
		return Caller{}, sandbox.Errorf(sandbox.ErrUnauthenticated, "key_revoked", "this API key was revoked: have another made with 'sandbox key create'")
	case k.ExpiresAt != nil && !now.Before(*k.ExpiresAt):
		return Caller{}, errExpired(*k.ExpiresAt)
	case w.Disabled:
		return Caller{}, errDisabled(w.Name)
	}
	return Caller{Owner: k.Owner, Role: lower(k.Role, w.Role), Key: k.ID}, nil
}

func errExpired(at time.Time) error {
	return sandbox.Errorf(sandbox.ErrUnauthenticated, "key_expired", "this API key expired at %s: have another made with 'sandbox key create'", at.Format(time.RFC3339))
}

func errDisabled(owner string) error {
	return sandbox.Errorf(sandbox.ErrForbidden, "owner_disabled", "owner %s is disabled: an administrator can enable it again with 'sandbox owner set %s --enable'", owner, owner)
}

// BySocket returns who is on the other end of a unix socket. ErrForbidden
// with code owner_disabled.
func (o *Office) BySocket(uid uint32) (Caller, error) {
	c := Caller{Owner: fmt.Sprintf("uid:%d", uid), Role: RoleAdmin, From: "unix"}
	if uid == 0 || uid == o.self {
		return c, nil
	}
	o.mu.RLock()
	defer o.mu.RUnlock()
	c.Role = o.role
	if w := o.owners[c.Owner]; w != nil {
		c.Role = w.Role
		if w.Disabled {
			return c, errDisabled(c.Owner)
		}
	}
	return c, nil
}

// ByKeyID returns who has a key, without its secret: for what was given to that
// key and lasts as long as the key does. The errors are those of ByKey.
func (o *Office) ByKeyID(id string) (Caller, error) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	if k := o.byID[id]; k != nil {
		return o.holder(k, o.now())
	}
	return Caller{}, errUnknown()
}

// Standing returns an owner as one who calls now. ErrForbidden with code
// owner_disabled, also where the owner was removed.
func (o *Office) Standing(owner string) (Caller, error) {
	c := Caller{Owner: owner, Role: RoleAdmin}
	if o.always(owner) {
		return c, nil
	}
	o.mu.RLock()
	defer o.mu.RUnlock()
	w := o.owners[owner]
	switch {
	case w != nil && !w.Disabled:
		c.Role = w.Role
	case w == nil && uidForm.MatchString(owner):
		c.Role = o.role
	default:
		return Caller{}, errDisabled(owner)
	}
	return c, nil
}

// ActingKeys returns the ids of the keys that work and may change what an owner
// has: the owner's own and those of who sees all.
func (o *Office) ActingKeys(owner string) (ids []string) {
	o.mu.RLock()
	defer o.mu.RUnlock()
	now := o.now()
	for id, k := range o.byID {
		if c, err := o.holder(k, now); err == nil && c.Sees(owner) && c.MayChange() {
			ids = append(ids, id)
		}
	}
	return ids
}

// Refused counts a request that was refused, as ByKey counts wrong keys. The
// error says that there were too many from this address.
func (o *Office) Refused(from string) error {
	wait := o.failures.add(from, o.now())
	if wait == 0 {
		return nil
	}
	return &Later{After: wait, err: sandbox.Errorf(sandbox.ErrExhausted, "too_many_failures",
		"too many requests without a good key from this address: wait %d s, then send a good one", seconds(wait))}
}

// always reports whether an owner is an admin whatever is said of it.
func (o *Office) always(owner string) bool {
	return owner == "uid:0" || owner == fmt.Sprintf("uid:%d", o.self)
}

// Quota returns what bounds an owner, also one of whom nothing was said.
func (o *Office) Quota(_ context.Context, owner string) (Quota, error) { return o.quotaOf(owner), nil }

func (o *Office) quotaOf(owner string) Quota {
	if o.always(owner) {
		return Quota{}
	}
	o.mu.RLock()
	defer o.mu.RUnlock()
	if w := o.owners[owner]; w != nil {
		return w.Quota
	}
	if uidForm.MatchString(owner) {
		return DefaultQuota(o.role)
	}
	return DeveloperQuota()
}

// usedEvery is how often the use of keys is written down.
const usedEvery = time.Minute

// noteUse remembers that a key was used, and tells the store once a minute.
func (o *Office) noteUse(ctx context.Context, id string, now time.Time) {
	o.mu.RLock()
	k := o.byID[id]
	fresh := k == nil || k.UsedAt != nil && now.Sub(*k.UsedAt) < usedEvery
	o.mu.RUnlock()
	if fresh {
		return
	}
	o.mu.Lock()
	k = o.byID[id]
	if k == nil || k.UsedAt != nil && now.Sub(*k.UsedAt) < usedEvery {
		o.mu.Unlock()
		return
	}
	at := now.UTC().Truncate(time.Second)
	next := *k // a reader may have the old one
	next.UsedAt = &at
	o.byID[id], o.byHash[k.Hash] = &next, &next
	o.used[id] = at
	var all map[string]time.Time
	if now.Sub(o.told) >= usedEvery {
		all, o.used, o.told = o.used, map[string]time.Time{}, now
	}
	o.mu.Unlock()
	if len(all) > 0 {
		go o.tellUse(context.WithoutCancel(ctx), all)
	}
}

// tellUse writes when keys were last used. What could not be written is tried
// with the next.
func (o *Office) tellUse(ctx context.Context, all map[string]time.Time) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := o.store.UseKeys(ctx, all); err != nil {
		o.log.Warn("write when keys were last used", "err", err)
		o.mu.Lock()
		defer o.mu.Unlock()
		maps.Copy(all, o.used) // the newer ones win
		o.used = all
	}
}

// Close writes what the store has not been told of.
func (o *Office) Close(ctx context.Context) error {
	o.mu.Lock()
	all := o.used
	o.used = map[string]time.Time{}
	o.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	return o.store.UseKeys(ctx, all)
}
