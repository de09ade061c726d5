package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	sqlKeys      = `SELECT id, hash, owner, created_at, expires_at, used_at, revoked_at, record FROM keys ORDER BY created_at, id`
	sqlPutKey    = `INSERT INTO keys (id, hash, owner, created_at, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)`
	sqlRevokeKey = `UPDATE keys SET revoked_at = coalesce(revoked_at, ?2) WHERE id = ?1`
	sqlUseKey    = `UPDATE keys SET used_at = max(coalesce(used_at, 0), ?2) WHERE id = ?1`
	sqlDropKey   = `DELETE FROM keys WHERE id = ?`
)

// Keys lists the keys, revoked ones too, the oldest first. None has its
// secret: that was never written.
func (d *DB) Keys(ctx context.Context) ([]access.Key, error) {
	rows, err := d.reader.QueryContext(ctx, sqlKeys)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, func(s scanner) (k access.Key, err error) {
		var hash, data []byte
		var id, owner string
		var created int64
		var expires, used, revoked sql.NullInt64
		if err := s.Scan(&id, &hash, &owner, &created, &expires, &used, &revoked, &data); err != nil {
			return k, err
		}
		if err := json.Unmarshal(data, &k); err != nil || copy(k.Hash[:], hash) != len(k.Hash) {
			return k, fmt.Errorf("reading key %s: its hash has %d bytes: %w", id, len(hash), err)
		}
		k.ID, k.Owner, k.CreatedAt = id, owner, time.Unix(0, created).UTC()
		k.ExpiresAt, k.UsedAt, k.RevokedAt = fromNano(expires), fromNano(used), fromNano(revoked)
		return k, nil
	})
	return all, translate(err)
}

// InsertKey writes a key, without its secret, and its owner where that is
// missing. It lasts.
func (d *DB) InsertKey(ctx context.Context, k access.Key, o access.Owner) error {
	k.Secret = ""
	data, err := toJSON(k)
	if err != nil {
		return err
	}
	owner, err := ownerJSON(o)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		if _, err := t.exec(sqlNewOwner, o.Name, owner); err != nil {
			return err
		}
		var expires any
		if k.ExpiresAt != nil {
			expires = k.ExpiresAt.UnixNano()
		}
		_, err := t.exec(sqlPutKey, k.ID, k.Hash[:], k.Owner, k.CreatedAt.UnixNano(), expires, data)
		return err
	})
}

// RevokeKey notes that a key works no more. It lasts. Repeating it is safe.
// ErrNotFound.
func (d *DB) RevokeKey(ctx context.Context, id string, at time.Time) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		ok, err := t.changed(sqlRevokeKey, id, at.UnixNano())
		if err == nil && !ok {
			err = sandbox.Errorf(sandbox.ErrNotFound, "key_not_found", "no key %.40q: 'sandbox key ls' lists them", id)
		}
		return err
	})
}

// DropKeys forgets keys. Repeating it is safe.
func (d *DB) DropKeys(ctx context.Context, ids []string) error {
	return d.write(ctx, func(t *tx) error {
		for _, id := range ids {
			if _, err := t.exec(sqlDropKey, id); err != nil {
				return err
			}
		}
		return nil
	})
}

// UseKeys notes when keys were last used. A power cut may lose it.
func (d *DB) UseKeys(ctx context.Context, used map[string]time.Time) error {
	return d.write(ctx, func(t *tx) error {
		for id, at := range used {
			if _, err := t.exec(sqlUseKey, id, at.UnixNano()); err != nil {
				return err
			}
		}
		return nil
	})
}
