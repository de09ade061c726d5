package state

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sandboxd/sandboxd/sandbox"
)

// living is the condition on a sandbox that things can still be given to.
const living = `EXISTS (SELECT 1 FROM sandboxes WHERE id = ?2 AND status NOT IN ('completing', 'completed', 'failed'))`

const (
	sqlPutPort    = `INSERT INTO ports (id, sandbox, record) SELECT ?1, ?2, ?3 WHERE ` + living
	sqlPorts      = `SELECT record FROM ports WHERE ?1 = '' OR sandbox = ?1 ORDER BY sandbox, rowid`
	sqlPort       = `SELECT record FROM ports WHERE id = ?`
	sqlDeletePort = `DELETE FROM ports WHERE id = ?`
	sqlDropPorts  = `DELETE FROM ports WHERE sandbox = ?`
	sqlOldPorts   = `DELETE FROM ports WHERE sandbox IN (SELECT id FROM sandboxes WHERE status IN ('completed', 'failed'))`
	sqlPutToken   = `INSERT INTO port_tokens (hash, sandbox) SELECT ?1, ?2 WHERE ` + living + ` ON CONFLICT (sandbox) DO UPDATE SET hash = ?1`
	sqlDropToken  = `DELETE FROM port_tokens WHERE sandbox = ?`
	sqlOldTokens  = `DELETE FROM port_tokens WHERE sandbox IN (SELECT id FROM sandboxes WHERE status IN ('completed', 'failed'))`
	sqlTokens     = `SELECT sandbox, hash FROM port_tokens`
	sqlPutCarried = `INSERT INTO carried (sandbox, init_start, rx, tx) SELECT ?1, ?2, ?3, ?4 WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = ?1)
		ON CONFLICT (sandbox) DO UPDATE SET init_start = ?2, rx = ?3, tx = ?4`
	sqlCarried     = `SELECT sandbox, init_start, rx, tx FROM carried`
	sqlDropCarried = `DELETE FROM carried WHERE sandbox = ?`
)

func portNotFound(id string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "port_not_found", "no published port %.40q: 'sandbox port ls' shows those there are", id)
}

// PutPort adds a published port. ErrConflict with code sandbox_ended where
// its sandbox is gone, or going.
func (d *DB) PutPort(ctx context.Context, p sandbox.Port) error {
	data, err := toJSON(p)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // sandboxes that are stopped outlive a power cut, and their ports with them
			return err
		}
		ok, err := t.changed(sqlPutPort, p.ID, string(p.Sandbox), data)
		if err == nil && !ok {
			err = noMore(p.Sandbox)
		}
		return err
	})
}

func noMore(id sandbox.ID) error {
	return sandbox.Errorf(sandbox.ErrConflict, "sandbox_ended", "sandbox %s has ended: nobody can reach into it any more", id)
}

// Ports lists the published ports of one sandbox, or with an empty id all.
func (d *DB) Ports(ctx context.Context, id sandbox.ID) ([]sandbox.Port, error) {
	rows, err := d.reader.QueryContext(ctx, sqlPorts, string(id))
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, scanPort)
	return all, translate(err)
}

// DeletePort removes one published port and returns it. ErrNotFound.
func (d *DB) DeletePort(ctx context.Context, id string) (sandbox.Port, error) {
	found, err := d.first(ctx, sqlPort, id)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Port{}, portNotFound(id)
	}
	if err != nil {
		return sandbox.Port{}, err
	}
	p, err := scanPort(found)
	if err != nil {
		return p, err
	}
	return p, d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // what was closed must not open again
			return err
		}
		ok, err := t.changed(sqlDeletePort, id)
		if err == nil && !ok {
			err = portNotFound(id)
		}
		return err
	})
}

// DropOldPorts removes the ports and tokens of all sandboxes that have ended.
func (d *DB) DropOldPorts(ctx context.Context) error {
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlOldPorts)
		_, err2 := t.exec(sqlOldTokens)
		return errors.Join(err, err2)
	})
}

// SetPortToken notes the hash of a sandbox's token; nil takes the token away.
// ErrConflict with code sandbox_ended where the sandbox is gone, or going.
func (d *DB) SetPortToken(ctx context.Context, id sandbox.ID, hash []byte) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // one that was taken away must not open again
			return err
		}
		if hash == nil {
			_, err := t.exec(sqlDropToken, string(id))
			return err
		}
		ok, err := t.changed(sqlPutToken, hash, string(id))
		if err == nil && !ok {
			err = noMore(id)
		}
		return err
	})
}

// PortTokens returns the hash of every sandbox's token.
func (d *DB) PortTokens(ctx context.Context) (map[sandbox.ID][]byte, error) {
	rows, err := d.reader.QueryContext(ctx, sqlTokens)
	if err != nil {
		return nil, translate(err)
	}
	out := map[sandbox.ID][]byte{}
	_, err = drain(rows, func(row scanner) (struct{}, error) {
		var id string
		var hash []byte
		err := row.Scan(&id, &hash)
		out[sandbox.ID(id)] = hash
		return struct{}{}, err
	})
	return out, translate(err)
}

// Carried is what the daemon itself carried into and out of one shell.
type Carried struct {
	InitStart uint64 // of the shell's PID 1
	Rx, Tx    uint64 // bytes
}

// PutCarried notes what was carried; it may be repeated.
func (d *DB) PutCarried(ctx context.Context, id sandbox.ID, c Carried) error {
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlPutCarried, string(id), int64(c.InitStart), int64(c.Rx), int64(c.Tx))
		return err
	})
}

// Carried returns what was carried, by sandbox.
func (d *DB) Carried(ctx context.Context) (map[sandbox.ID]Carried, error) {
	rows, err := d.reader.QueryContext(ctx, sqlCarried)
	if err != nil {
		return nil, translate(err)
	}
	out := map[sandbox.ID]Carried{}
	_, err = drain(rows, func(row scanner) (struct{}, error) {
		var id string
		var start, rx, tx int64
		err := row.Scan(&id, &start, &rx, &tx)
		out[sandbox.ID(id)] = Carried{uint64(start), uint64(rx), uint64(tx)}
		return struct{}{}, err
	})
	return out, translate(err)
}

func scanPort(row scanner) (p sandbox.Port, err error) {
	var data []byte
	if err := row.Scan(&data); err != nil {
		return p, err
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return p, fmt.Errorf("reading a published port: %w", err)
	}
	return p, nil
}
