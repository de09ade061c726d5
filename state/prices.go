package state

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/sandboxd/sandboxd/cost"
)

const (
	sqlBooks    = `SELECT fingerprint, until, record FROM books`
	sqlNoteBook = `INSERT INTO books (version, fingerprint, until, record) VALUES (?1, ?2, ?3, ?4)
		ON CONFLICT (version) DO UPDATE SET until = max(until, ?3)`
)

// Books returns the price books that were in force while a daemon ran.
func (d *DB) Books(ctx context.Context) ([]cost.Kept, error) {
	rows, err := d.reader.QueryContext(ctx, sqlBooks)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, func(row scanner) (k cost.Kept, err error) {
		var until int64
		var record []byte
		if err := row.Scan(&k.Fingerprint, &until, &record); err != nil {
			return k, err
		}
		k.Until = time.UnixMilli(until).UTC()
		if err := json.Unmarshal(record, &k.Book); err != nil {
			return k, fmt.Errorf("reading a price book: %w", err)
		}
		return k, nil
	})
	return all, translate(err)
}

// NoteBook keeps a book that is in force at a time. Repeating it is safe; what
// is kept of the book does not change.
func (d *DB) NoteBook(ctx context.Context, b *cost.Book, at time.Time) error {
	record, err := toJSON(b)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlNoteBook, b.Version, b.Fingerprint(), at.UnixMilli(), record)
		return err
	})
}
