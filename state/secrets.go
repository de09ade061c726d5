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
	sqlPutSecret = `INSERT INTO secrets (name, record, value) VALUES (?1, ?2, ?3)
		ON CONFLICT (name) DO UPDATE SET record = ?2, value = ?3`
	sqlSecretRecord = `SELECT record FROM secrets WHERE name = ?`
	sqlSecretValue  = `SELECT record, value FROM secrets WHERE name = ?`
	sqlSecrets      = `SELECT record FROM secrets ORDER BY name`
	sqlDeleteSecret = `DELETE FROM secrets WHERE name = ?`
)

func secretNotFound(name string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "secret_not_found", "no secret %.70q: 'sandbox secret set %.70s' makes it, 'sandbox secret ls' shows those there are", name, name)
}

// wiping has SQLite overwrite with zeros what the transaction deletes, until
// the function it returns is called. Without it a value that was replaced or
// forgotten would stay in the file, and in backups of it, until chance
// overwrites it. The log keeps it until it is folded and written over, at the
// next start at the latest. A pragma of this kind takes effect when it is
// compiled, so it must not be kept prepared.
func (t *tx) wiping() (end func()) {
	set := func(to string) {
		_, _ = t.lite.Exec(`PRAGMA secure_delete = `+to, nil) // it cannot fail on an open database
	}
	set("ON")
	return func() { set("OFF") }
}

// PutSecret sets a secret, new or not, and returns what may be told of it.
// Repeating it is safe. A value that it replaces is wiped.
func (d *DB) PutSecret(ctx context.Context, s sandbox.Secret, value string) (sandbox.Secret, error) {
	err := d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		defer t.wiping()()
		found, err := t.row(sqlSecretRecord, s.Name)
		if err == nil {
			var before sandbox.Secret
			if before, err = scanSecret(found); err == nil {
				s.CreatedAt = before.CreatedAt
			}
		}
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		data, err := toJSON(s)
		if err == nil {
			_, err = t.exec(sqlPutSecret, s.Name, data, []byte(value))
		}
		return err
	})
	return s, err
}

// Secret returns a secret and its value. ErrNotFound with code
// secret_not_found.
func (d *DB) Secret(ctx context.Context, name string) (sandbox.Secret, string, error) {
	found, err := d.first(ctx, sqlSecretValue, name)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Secret{}, "", secretNotFound(name)
	}
	if err != nil {
		return sandbox.Secret{}, "", err
	}
	var record, value []byte
	if err := found.Scan(&record, &value); err != nil {
		return sandbox.Secret{}, "", err
	}
	s, err := readSecret(record)
	return s, string(value), err
}

// Secrets lists the secrets, without values, by name.
func (d *DB) Secrets(ctx context.Context) ([]sandbox.Secret, error) {
	return collect(ctx, d.reads[sqlSecrets], scanSecret)
}

// DeleteSecret removes a secret and wipes its value. ErrNotFound.
func (d *DB) DeleteSecret(ctx context.Context, name string) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		defer t.wiping()()
		ok, err := t.changed(sqlDeleteSecret, name)
		if err == nil && !ok {
			err = secretNotFound(name)
		}
		return err
	})
}

func scanSecret(row scanner) (sandbox.Secret, error) {
	var data []byte
	if err := row.Scan(&data); err != nil {
		return sandbox.Secret{}, err
	}
	return readSecret(data)
}

func readSecret(data []byte) (s sandbox.Secret, err error) {
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("reading a secret's record: %w", err)
	}
	return s, nil
}
