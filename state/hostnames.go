package state

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	// holderLives is whether the holder of a host name has a living sandbox of it.
	holderLives = `EXISTS (SELECT 1 FROM sandboxes s WHERE s.name = host_names.name AND s.owner = host_names.owner
		AND s.status NOT IN ('completed', 'failed'))`
	sqlHostName      = `SELECT owner, used_at, ` + holderLives + ` FROM host_names WHERE name = ?`
	sqlDropHostName  = `DELETE FROM host_names WHERE name = ?`
	sqlDropHostNames = `DELETE FROM host_names WHERE owner = ? AND NOT ` + holderLives
)

// ReleaseHostName frees the host name an owner holds and returns who that was.
// The database itself hands names out: to the first sandbox of a name, and to
// another owner's where the holder's last one ended 30 days before. A name
// that is released goes to the oldest living sandbox of that name, else to the
// next one. ErrNotFound with code host_name_not_found; ErrConflict with code
// host_name_in_use where the holder has a living sandbox of the name. It lasts.
func (d *DB) ReleaseHostName(ctx context.Context, name string) (sandbox.HostName, error) {
	h := sandbox.HostName{Name: name}
	return h, d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		found, err := t.row(sqlHostName, name)
		if errors.Is(err, sql.ErrNoRows) {
			return sandbox.Errorf(sandbox.ErrNotFound, "host_name_not_found", "nobody holds the host name %.80q: give the name of a sandbox, without port and domain", name)
		}
		var used, lives int64
		if err == nil {
			err = found.Scan(&h.Owner, &used, &lives)
		}
		if err != nil {
			return err
		}
		if h.UsedAt = time.Unix(0, used).UTC(); lives != 0 {
			return sandbox.Errorf(sandbox.ErrConflict, "host_name_in_use", "the host name %.80q leads to a living sandbox of %s: remove that first ('sandbox rm %s@%s')", name, h.Owner, name, h.Owner)
		}
		_, err = t.exec(sqlDropHostName, name)
		return err
	})
}
