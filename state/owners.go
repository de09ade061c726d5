package state

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/access"
)

const (
	sqlOwners    = `SELECT name, record FROM owners ORDER BY name`
	sqlPutOwner  = `INSERT INTO owners (name, record) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET record = ?2`
	sqlNewOwner  = `INSERT INTO owners (name, record) VALUES (?, ?) ON CONFLICT (name) DO NOTHING`
	sqlOwnerSeen = `SELECT EXISTS (SELECT 1 FROM sandboxes WHERE owner = ?1) OR EXISTS (SELECT 1 FROM snapshots WHERE owner = ?1)
		OR EXISTS (SELECT 1 FROM projects WHERE owner = ?1) OR EXISTS (SELECT 1 FROM templates WHERE owner = ?1)
		OR EXISTS (SELECT 1 FROM webhooks WHERE owner = ?1) OR EXISTS (SELECT 1 FROM keys WHERE owner = ?1)
		OR EXISTS (SELECT 1 FROM host_names WHERE owner = ?1) OR EXISTS (SELECT 1 FROM audit WHERE owner = ?1)
		OR EXISTS (SELECT 1 FROM volumes WHERE record ->> '$.owner' = ?1) OR EXISTS (SELECT 1 FROM secrets WHERE record ->> '$.owner' = ?1)
		OR EXISTS (SELECT 1 FROM ledger WHERE owner = ?1)`
	sqlDropOwner   = `DELETE FROM owners WHERE name = ?`
	sqlRevokeOwner = `UPDATE keys SET revoked_at = ?2 WHERE owner = ?1 AND revoked_at IS NULL`
)

// ownerRecord is how an owner is written: what the API shows in another form
// stands here as it is.
type ownerRecord struct {
	access.Owner

	Lifetime time.Duration `json:"lifetime_ns"`
	Idle     time.Duration `json:"idle_ns"`
}

func ownerJSON(o access.Owner) (string, error) {
	return toJSON(ownerRecord{o, o.Quota.Lifetime, o.Quota.Idle})
}

// Owners lists the owners by name.
func (d *DB) Owners(ctx context.Context) ([]access.Owner, error) {
	rows, err := d.reader.QueryContext(ctx, sqlOwners)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, func(s scanner) (access.Owner, error) {
		var name string
		var data []byte
		if err := s.Scan(&name, &data); err != nil {
			return access.Owner{}, err
		}
		var r ownerRecord
		if err := json.Unmarshal(data, &r); err != nil {
			return access.Owner{}, fmt.Errorf("reading owner %s: %w", name, err)
		}
		r.Quota.Lifetime, r.Quota.Idle = r.Lifetime, r.Idle
		return r.Owner, nil
	})
	return all, translate(err)
}

// PutOwner makes an owner, or changes one. It lasts. Repeating it is safe.
func (d *DB) PutOwner(ctx context.Context, o access.Owner) error {
	data, err := ownerJSON(o)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		_, err := t.exec(sqlPutOwner, o.Name, data)
		return err
	})
}

// OwnerSeen reports whether anything is kept of an owner beside its own row.
func (d *DB) OwnerSeen(ctx context.Context, name string) (seen bool, err error) {
	err = d.reader.QueryRowContext(ctx, sqlOwnerSeen, name).Scan(&seen)
	return seen, translate(err)
}

// DropOwner forgets an owner, revokes its keys and frees the host names no
// living sandbox of it has. It lasts. Repeating it is
// safe.
func (d *DB) DropOwner(ctx context.Context, name string, at time.Time) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		if _, err := t.exec(sqlRevokeOwner, name, at.UnixNano()); err != nil {
			return err
		}
		if _, err := t.exec(sqlDropHostNames, name); err != nil {
			return err
		}
		_, err := t.exec(sqlDropOwner, name)
		return err
	})
}
