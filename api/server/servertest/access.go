package servertest

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/access"
)

// Vault keeps owners, keys and the audit in memory.
type Vault struct {
	mu     sync.Mutex
	owners map[string]access.Owner
	keys   []access.Key
	Rows   []access.AuditRow // of the audit; read it when nobody writes
}

// NewOffice returns an office and an audit over a vault. The audit's Close
// waits until all is in the vault.
func NewOffice(c access.Config) (*access.Office, *access.Journal, *Vault) {
	v := &Vault{owners: map[string]access.Owner{}}
	c.Store = v
	o, err := access.Open(context.Background(), c)
	if err != nil {
		panic(err) // a vault does not fail
	}
	return o, access.OpenJournal(v, slog.New(slog.DiscardHandler)), v
}

// Owners implements access.Store.
func (v *Vault) Owners(context.Context) (all []access.Owner, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, o := range v.owners {
		all = append(all, o)
	}
	return all, nil
}

// Keys implements access.Store.
func (v *Vault) Keys(context.Context) ([]access.Key, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.keys), nil
}

// PutOwner implements access.Store.
func (v *Vault) PutOwner(_ context.Context, o access.Owner) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.owners[o.Name] = o
	return nil
}

// OwnerSeen implements access.Store.
func (v *Vault) OwnerSeen(_ context.Context, name string) (bool, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.ContainsFunc(v.Rows, func(r access.AuditRow) bool { return r.Owner == name }), nil
}

// DropOwner implements access.Store.
func (v *Vault) DropOwner(_ context.Context, name string, _ time.Time) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.owners, name)
	return nil
}

// InsertKey implements access.Store.
func (v *Vault) InsertKey(_ context.Context, k access.Key, o access.Owner) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.keys = append(v.keys, k)
	if _, there := v.owners[o.Name]; !there {
		v.owners[o.Name] = o
	}
	return nil
}

// RevokeKey implements access.Store.
func (v *Vault) RevokeKey(context.Context, string, time.Time) error { return nil }

// DropKeys implements access.Store.
func (v *Vault) DropKeys(context.Context, []string) error { return nil }

// UseKeys implements access.Store.
func (v *Vault) UseKeys(context.Context, map[string]time.Time) error { return nil }

// AppendAudit implements access.AuditStore.
func (v *Vault) AppendAudit(_ context.Context, rows []access.AuditRow, _ bool) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range rows {
		var before access.Sum
		if n := len(v.Rows); n > 0 {
			before = v.Rows[n-1].Hash
		}
		e.Seq = int64(len(v.Rows) + 1)
		e.Hash = e.Chain(before)
		v.Rows = append(v.Rows, e)
	}
	return nil
}

// Audit implements access.AuditStore.
func (v *Vault) Audit(_ context.Context, q access.AuditQuery) (page []access.AuditRow, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range slices.Backward(v.Rows) {
		if (q.Owner == "" || e.Owner == q.Owner) && (q.Object == "" || e.Object == q.Object) && (q.Before == 0 || e.Seq < q.Before) && (q.Limit == 0 || len(page) < q.Limit) {
			page = append(page, e)
		}
	}
	return page, nil
}

// VerifyAudit implements access.AuditStore.
func (v *Vault) VerifyAudit(_ context.Context, anchor int64, want access.Sum) (access.AuditCheck, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	check := access.NewVerifier(0, access.Sum{}, anchor, want)
	for _, e := range v.Rows {
		if !check.Add(e) {
			break
		}
	}
	return check.Result(), nil
}
