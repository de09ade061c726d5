package state

import (
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/sandbox"
)

// Row is a sandbox with what only the runtime needs to know of it.
type Row struct {
	sandbox.Sandbox
	InitStart uint64 // start time of PID 1
	BootID    string // of the boot PID 1 was started in
}

const columns = `id, owner, status, reason, detail, created_at, started_at, ended_at, deadline, exit_code,
	slot, uid_base, address, init_pid, init_start, boot_id, spec, enforcement, usage, last_output`

const (
	sqlByName = `SELECT ` + columns + ` FROM sandboxes WHERE name = ?1 AND name <> '' AND owner = (
		SELECT owner FROM host_names WHERE name = ?1)
		ORDER BY status IN ('completed', 'failed'), created_at DESC LIMIT 1`
	sqlOwnByName = `SELECT ` + columns + ` FROM sandboxes WHERE name = ?1 AND name <> '' AND owner = ?2
		ORDER BY status IN ('completed', 'failed'), created_at DESC LIMIT 1`
	sqlSpoken = `SELECT EXISTS (SELECT 1 FROM idempotency WHERE owner = ?1 AND key = ?2)
		OR EXISTS (SELECT 1 FROM sandboxes WHERE name = ?3 AND name <> '' AND owner = ?1 AND status NOT IN ('completed', 'failed'))`
	sqlByPrefix    = `SELECT ` + columns + ` FROM sandboxes WHERE id >= ?1 AND id < ?2 ORDER BY id LIMIT 2`
	sqlOwnByPrefix = `SELECT ` + columns + ` FROM sandboxes WHERE id >= ?1 AND id < ?2 AND owner = ?3 ORDER BY id LIMIT 2`
	sqlLiving      = `SELECT ` + columns + ` FROM sandboxes
		WHERE status NOT IN ('completed', 'failed') ORDER BY created_at, id`
)

// scanner is a *sql.Row, *sql.Rows or record.
type scanner interface{ Scan(dest ...any) error }

func scanRow(s scanner) (Row, error) {
	var (
		r                              Row
		created                        int64
		started, ended, deadline, exit sql.NullInt64
		initStart                      int64
		address                        string
		spec, enforcement, usage       []byte
	)
	var id, status, reason string
	err := s.Scan(&id, &r.Owner, &status, &reason, &r.Detail, &created, &started, &ended, &deadline, &exit,
		&r.Slot, &r.UIDBase, &address, &r.InitPID, &initStart, &r.BootID, &spec, &enforcement, &usage, &r.LastOutput)
	if err != nil {
		return r, err
	}
	r.ID, r.Status, r.Reason = sandbox.ID(id), sandbox.Status(status), sandbox.Reason(reason)
	r.InitStart = uint64(initStart)
	r.CreatedAt = time.Unix(0, created).UTC()
	r.StartedAt, r.EndedAt, r.Deadline = fromNano(started), fromNano(ended), fromNano(deadline)
	if exit.Valid {
		code := int(exit.Int64)
		r.ExitCode = &code
	}
	if address != "" {
		if r.Address, err = netip.ParseAddr(address); err != nil {
			return r, fmt.Errorf("reading sandbox %s: address: %w", r.ID, err)
		}
	}
	for _, j := range []struct {
		column string
		data   []byte
		into   any
	}{{"spec", spec, &r.Spec}, {"enforcement", enforcement, &r.Enforcement}, {"usage", usage, &r.Usage}} {
		if s := string(j.data); s == "{}" || s == "null" {
			continue
		}
		if err := json.Unmarshal(j.data, j.into); err != nil {
			return r, fmt.Errorf("reading sandbox %s: %s: %w", r.ID, j.column, err)
		}
	}
	if r.Usage.CPUMicros == 0 { // of a daemon that wrote only the other
		r.Usage.CPUMicros = uint64(math.Round(r.Usage.CPUSeconds * 1e6))
	}
	return r, nil
}

func fromNano(n sql.NullInt64) *time.Time {
	if !n.Valid {
		return nil
	}
	t := time.Unix(0, n.Int64).UTC()
	return &t
}

// Sandbox returns a sandbox, living or ended. ErrNotFound.
func (d *DB) Sandbox(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
	return d.one(ctx, id, sqlSandbox, string(id))
}

// ByName returns the caller's living sandbox of that name, else the one made
// last: a name is unique among the living sandboxes of one owner. Work that no
// caller asked for, as requests by host name, gets that of the owner who had
// the host name, living or not: see ReleaseHostName. ErrNotFound.
func (d *DB) ByName(ctx context.Context, name string) (sandbox.Sandbox, error) {
	if _, owner, called := meant(ctx, name); called {
		return d.one(ctx, name, sqlOwnByName, name, owner)
	}
	return d.one(ctx, name, sqlByName, name)
}

// Spoken reports whether an idempotency key was used or a living sandbox has
// the name, either of which may be empty. CreateSandbox has the last word.
func (d *DB) Spoken(ctx context.Context, owner, key, name string) (spoken bool, err error) {
	if key == "" && name == "" {
		return false, nil
	}
	found, err := d.first(ctx, sqlSpoken, owner, key, name)
	if err != nil {
		return false, err
	}
	var n int64
	err = found.Scan(&n)
	return n != 0, err
}

func (d *DB) one(ctx context.Context, ref any, query string, args ...any) (sandbox.Sandbox, error) {
	found, err := d.first(ctx, query, args...)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Sandbox{}, notFound(ref)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	row, err := scanRow(found)
	return row.Sandbox, err
}

// first returns the first row of a short query, sql.ErrNoRows where there is
// none. It is for what every request asks; longer reading has its own
// connections.
func (d *DB) first(ctx context.Context, query string, args ...any) (found record, err error) {
	if err := ctx.Err(); err != nil {
		return nil, translate(err)
	}
	d.quick.mu.Lock()
	defer d.quick.mu.Unlock()
	err = d.quick.conn.Raw(func(any) error {
		found, err = d.quick.low.row(query, args...)
		return err
	})
	return found, translate(err)
}

// ByPrefix returns the one sandbox whose id begins so. ErrInvalid with code
// ambiguous_id where there are more, ErrNotFound where there is none.
func (d *DB) ByPrefix(ctx context.Context, prefix string) (sandbox.Sandbox, error) {
	return d.byPrefix(ctx, prefix, sqlByPrefix)
}

func (d *DB) byPrefix(ctx context.Context, prefix, query string, more ...any) (sandbox.Sandbox, error) {
	if !sandbox.IsIDPrefix(prefix) {
		return sandbox.Sandbox{}, notFound(prefix)
	}
	// No id holds a character above 'z', so '{' ends the range.
	found, err := collect(ctx, d.reads[query], scanRow, append([]any{prefix, prefix + "{"}, more...)...)
	switch {
	case err != nil:
		return sandbox.Sandbox{}, err
	case len(found) == 0:
		return sandbox.Sandbox{}, notFound(prefix)
	case len(found) > 1:
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "ambiguous_id", "more than one sandbox id begins with %q: give more of it", prefix)
	}
	return found[0].Sandbox, nil
}

// Living returns every sandbox that has not ended, oldest first.
func (d *DB) Living(ctx context.Context) ([]Row, error) {
	return collect(ctx, d.reads[sqlLiving], scanRow)
}

// List returns a page of sandboxes, newest first. ErrInvalid for a cursor
// that List did not make, or a status that does not exist.
func (d *DB) List(ctx context.Context, f sandbox.Filter) (sandbox.Page, error) {
	query, args, limit, err := planList(f)
	if err != nil {
		return sandbox.Page{}, err
	}
	rows, err := d.reader.QueryContext(ctx, query, args...)
	if err != nil {
		return sandbox.Page{}, fmt.Errorf("listing sandboxes: %w", translate(err))
	}
	found, err := drain(rows, scanRow)
	if err != nil {
		return sandbox.Page{}, fmt.Errorf("listing sandboxes: %w", translate(err))
	}
	var page sandbox.Page
	if len(found) > limit {
		found = found[:limit]
		page.Next = formatCursor(found[limit-1].Sandbox)
	}
	page.Items = make([]sandbox.Sandbox, len(found))
	for i, r := range found {
		page.Items[i] = r.Sandbox
	}
	return page, nil
}

// planList turns a filter into a query for one row more than the page holds.
func planList(f sandbox.Filter) (query string, args []any, limit int, err error) {
	var where []string
	if len(f.Statuses) > 0 {
		for _, s := range f.Statuses {
			if !s.Valid() {
				return "", nil, 0, sandbox.Errorf(sandbox.ErrInvalid, "invalid_status", "no status is called %.40q", s)
			}
			args = append(args, string(s))
		}
		where = append(where, `status IN (?`+strings.Repeat(`, ?`, len(f.Statuses)-1)+`)`)
	} else if !f.All {
		where = append(where, `status NOT IN ('completed', 'failed')`)
	}
	if f.Owner != "" {
		where = append(where, `owner = ?`)
		args = append(args, f.Owner)
	}
	if f.Name != "" {
		where = append(where, `name = ?`)
		args = append(args, f.Name)
	}
	for k, v := range f.Unlike {
		where = append(where, `NOT EXISTS (SELECT 1 FROM json_each(spec, '$.labels') WHERE key = ? AND value = ?)`)
		args = append(args, k, v)
	}
	for k, v := range f.Labels {
		where = append(where, `EXISTS (SELECT 1 FROM json_each(spec, '$.labels') WHERE key = ? AND value = ?)`)
		args = append(args, k, v)
	}
	if !f.StartedAfter.IsZero() {
		where = append(where, `started_at > ?`)
		args = append(args, f.StartedAfter.UnixNano())
	}
	beyond, order := `(created_at, id) < (?, ?)`, ` ORDER BY created_at DESC, id DESC LIMIT ?`
	if f.OldestFirst {
		beyond, order = `(created_at, id) > (?, ?)`, ` ORDER BY created_at, id LIMIT ?`
	}
	if f.Cursor != "" {
		created, id, err := parseCursor(f.Cursor)
		if err != nil {
			return "", nil, 0, err
		}
		where = append(where, beyond)
		args = append(args, created, id)
	}
	limit = f.Limit
	if limit <= 0 {
		limit = sandbox.DefaultPage
	}
	limit = min(limit, sandbox.MaxPage)
	query = `SELECT ` + columns + ` FROM sandboxes`
	if len(where) > 0 {
		query += ` WHERE ` + strings.Join(where, ` AND `)
	}
	return query + order, append(args, limit+1), limit, nil
}

// A cursor is the place of a page's last item in the order of the list, so
// that items made or pruned meanwhile shift nothing.
func formatCursor(sb sandbox.Sandbox) string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d %s", sb.CreatedAt.UnixNano(), sb.ID))
}

func parseCursor(s string) (created int64, id string, err error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		var at string
		at, id, _ = strings.Cut(string(b), " ")
		created, err = strconv.ParseInt(at, 10, 64)
	}
	if err == nil {
		_, err = sandbox.ParseID(id)
	}
	if err != nil {
		return 0, "", sandbox.Errorf(sandbox.ErrInvalid, "invalid_cursor", "cursor %.80q is none: give back what the page before said, or none for the first", s)
	}
	return created, id, nil
}

// collect runs a prepared query and scans every row.
func collect[T any](ctx context.Context, s *sql.Stmt, scan func(scanner) (T, error), args ...any) ([]T, error) {
	rows, err := s.QueryContext(ctx, args...)
	if err != nil {
		return nil, translate(err)
	}
	all, err := drain(rows, scan)
	return all, translate(err)
}

func drain[T any](rows *sql.Rows, scan func(scanner) (T, error)) (all []T, err error) {
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, rows.Err()
}
