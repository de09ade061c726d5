package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	sqlPutTemplate = `INSERT INTO templates (owner, name, shared, record) VALUES (?1, ?2, ?3, ?4)
		ON CONFLICT (owner, name) DO UPDATE SET shared = ?3, record = ?4`
	sqlOwnTemplate = `SELECT record FROM templates WHERE owner = ? AND name = ?`
	// One's own comes first, and of others' the one that was there first.
	sqlTemplate = `SELECT record FROM templates WHERE name = ?2 AND (owner = ?1 OR shared)
		ORDER BY owner = ?1 DESC, record ->> '$.created_at', owner LIMIT 1`
	sqlTemplates    = `SELECT record FROM templates WHERE ?1 = '' OR owner = ?1 OR shared ORDER BY name, owner`
	sqlDropTemplate = `DELETE FROM templates WHERE owner = ? AND name = ?`
)

func templateNotFound(name string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "template_not_found", "no template %.70q: 'sandbox template ls' shows those there are", name)
}

// PutTemplate makes an owner's template or changes it, and returns it as it
// is written. It lasts. Repeating it is safe.
func (d *DB) PutTemplate(ctx context.Context, t sandbox.BaseTemplate) (sandbox.BaseTemplate, error) {
	err := d.write(ctx, func(x *tx) error {
		if err := x.mustLast(); err != nil {
			return err
		}
		found, err := x.row(sqlOwnTemplate, t.Owner, t.Name)
		if err == nil {
			var before sandbox.BaseTemplate
			if before, err = scanTemplate(found); err == nil {
				t.CreatedAt = before.CreatedAt
			}
		}
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		data, err := toJSON(t)
		if err == nil {
			_, err = x.exec(sqlPutTemplate, t.Owner, t.Name, !t.Private, data)
		}
		return err
	})
	return t, err
}

// Template returns what a name means to an owner: their own template, else one
// that is shared. ErrNotFound with code template_not_found.
func (d *DB) Template(ctx context.Context, owner, name string) (sandbox.BaseTemplate, error) {
	found, err := d.first(ctx, sqlTemplate, owner, name)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.BaseTemplate{}, templateNotFound(name)
	}
	if err != nil {
		return sandbox.BaseTemplate{}, err
	}
	return scanTemplate(found)
}

// Templates lists those an owner sees, or with no owner all, by name.
func (d *DB) Templates(ctx context.Context, owner string) ([]sandbox.BaseTemplate, error) {
	return collect(ctx, d.reads[sqlTemplates], scanTemplate, owner)
}

// DeleteTemplate removes an owner's template. ErrNotFound.
func (d *DB) DeleteTemplate(ctx context.Context, owner, name string) error {
	return d.write(ctx, func(x *tx) error {
		if err := x.mustLast(); err != nil {
			return err
		}
		ok, err := x.changed(sqlDropTemplate, owner, name)
		if err == nil && !ok {
			err = templateNotFound(name)
		}
		return err
	})
}

func scanTemplate(row scanner) (t sandbox.BaseTemplate, err error) {
	var data []byte
	if err := row.Scan(&data); err != nil {
		return t, err
	}
	if err := json.Unmarshal(data, &t); err != nil {
		return t, fmt.Errorf("reading a template: %w", err)
	}
	return t, nil
}
