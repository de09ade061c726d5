package state

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"

	"github.com/sandboxd/sandboxd/access"
	"github.com/sandboxd/sandboxd/project"
	"github.com/sandboxd/sandboxd/sandbox"
)

// What one owner has. To these queries another owner's object does not exist:
// what they say of it is word for word what they say of none.

const (
	sqlOwnByID           = `SELECT ` + columns + ` FROM sandboxes WHERE id = ?1 AND owner = ?2`
	sqlOwnSnapshot       = `SELECT record FROM snapshots WHERE id = ?1 AND status = 'ready' AND owner = ?2`
	sqlOwnSnapshotNamed  = `SELECT record FROM snapshots WHERE name = ?1 AND name <> '' AND status = 'ready' AND owner = ?2`
	sqlOwnSnapshotPrefix = `SELECT record FROM snapshots WHERE id >= ?1 AND id < ?3 AND status = 'ready' AND owner = ?2 ORDER BY id LIMIT 2`
	sqlOwnSnapshots      = `SELECT record FROM snapshots WHERE owner = ? AND status = 'ready' ORDER BY created_at DESC, id DESC`
	sqlOwnSchedule       = `SELECT record FROM schedules WHERE id = ?1 AND EXISTS (SELECT 1 FROM sandboxes WHERE id = schedules.sandbox AND owner = ?2)`
	sqlOwnSchedules      = `SELECT record FROM schedules WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = schedules.sandbox AND owner = ?) ORDER BY sandbox, id`
	sqlOwnPort           = `SELECT record FROM ports WHERE id = ?1 AND EXISTS (SELECT 1 FROM sandboxes WHERE id = ports.sandbox AND owner = ?2)`
	sqlOwnPorts          = `SELECT record FROM ports WHERE EXISTS (SELECT 1 FROM sandboxes WHERE id = ports.sandbox AND owner = ?) ORDER BY sandbox, rowid`
	sqlOwnVolume         = `SELECT name FROM volumes WHERE name IN (?1, ?2) AND record ->> '$.owner' = ?3 ORDER BY name <> ?1 LIMIT 1`
	sqlOwnEvents         = `SELECT seq, time, sandbox, type, actor, data FROM events
		WHERE owner = ?1 AND owner <> '' AND seq > ?2 ORDER BY seq LIMIT ?3`
	sqlOwnLedger       = `SELECT 1 FROM ledger WHERE sandbox = ?1 AND owner = ?2`
	sqlOwnProject      = `SELECT record FROM projects WHERE id = ?1 AND owner = ?2`
	sqlOwnProjectNamed = `SELECT record FROM projects WHERE name = ?1 AND owner = ?2 ORDER BY status = 'killed', created_at DESC LIMIT 1`
	sqlOwnAgent        = `SELECT record FROM agents WHERE id = ?1 AND project <> '' AND project IN (SELECT id FROM projects WHERE owner = ?2)`

	// Sandboxes of a build belong to build:OWNER.
	// total() adds up without overflow, and is exact to 2^53; what is beyond
	// 2^63 stays at 9e18, more than any quota.
	sqlHeld = `SELECT count(*), total(spec ->> '$.limits.cpus'), CAST(min(total(spec ->> '$.limits.memory_bytes'), 9e18) AS INTEGER), CAST(min(total(spec ->> '$.limits.disk_bytes'), 9e18) AS INTEGER)
		FROM sandboxes WHERE owner IN (?1, 'build:' || ?1) AND status NOT IN ('completed', 'failed')`
	sqlHeldStored = `SELECT CAST(min((SELECT total(record ->> '$.size_bytes') FROM volumes WHERE record ->> '$.owner' = ?1)
		+ (SELECT total(record ->> '$.size_bytes') FROM snapshots WHERE owner = ?1 AND status = 'ready'), 9e18) AS INTEGER)`
	sqlKeyUsed = `SELECT 1 FROM idempotency WHERE owner = ? AND key = ?`
)

// meant says whose object a caller means by a name: the caller's own, or with
// NAME@OWNER, from who sees all, that owner's. A name alone never leads to what
// another has: whoever takes a name first would be handed what is meant for it.
func meant(ctx context.Context, ref string) (name, owner string, called bool) {
	c, called := access.Of(ctx)
	name, owner = ref, c.Owner
	if n, of, given := strings.Cut(ref, "@"); given && called && c.SeesAll() {
		name, owner = n, of
	}
	return name, owner, called
}

// ByRef returns the sandbox a ref names: an id, a name, or the beginning of an
// id if that is unique. A name means the caller's living sandbox of that name,
// else the one that ended last; NAME@OWNER that of another. ErrNotFound, or ErrInvalid where it is no ref.
func (d *DB) ByRef(ctx context.Context, ref string) (sandbox.Sandbox, error) {
	if name, owner, called := meant(ctx, ref); called && name != ref {
		return d.OwnByRef(ctx, owner, name)
	}
	return refers(ref, func(id sandbox.ID) (sandbox.Sandbox, error) { return d.Sandbox(ctx, id) },
		func() (sandbox.Sandbox, error) { return d.ByName(ctx, ref) },
		func() (sandbox.Sandbox, error) { return d.ByPrefix(ctx, ref) })
}

// OwnByRef is ByRef among what one owner has.
func (d *DB) OwnByRef(ctx context.Context, owner, ref string) (sandbox.Sandbox, error) {
	return refers(ref, func(id sandbox.ID) (sandbox.Sandbox, error) {
		// By both: what was read and thrown away would tell by its time.
		return d.one(ctx, id, sqlOwnByID, string(id), owner)
	}, func() (sandbox.Sandbox, error) { return d.one(ctx, ref, sqlOwnByName, ref, owner) },
		func() (sandbox.Sandbox, error) { return d.byPrefix(ctx, ref, sqlOwnByPrefix, owner) })
}

// refers tries the ways a ref can be meant.
func refers(ref string, byID func(sandbox.ID) (sandbox.Sandbox, error), byName, byPrefix func() (sandbox.Sandbox, error)) (sandbox.Sandbox, error) {
	if id, err := sandbox.ParseID(ref); err == nil {
		return byID(id)
	}
	if err := sandbox.ValidateName(ref); err != nil {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.ErrInvalid, "invalid_reference", "%.80q names no sandbox: use an id, a name, or the beginning of an id", ref)
	}
	sb, err := byName()
	if errors.Is(err, sandbox.ErrNotFound) && sandbox.IsIDPrefix(ref) {
		sb, err = byPrefix()
	}
	if errors.Is(err, sandbox.ErrNotFound) {
		return sb, sandbox.Errorf(sandbox.ErrNotFound, "sandbox_not_found", "no sandbox %q: 'sandbox ls -a' shows those there are", ref)
	}
	return sb, err
}

// OwnInLedger returns the id of a sandbox of an owner, who may have had it long
// ago: the ledger remembers. ErrNotFound.
func (d *DB) OwnInLedger(ctx context.Context, owner, ref string) (string, error) {
	sb, err := d.OwnByRef(ctx, owner, ref)
	if err == nil {
		return string(sb.ID), nil
	}
	if errors.Is(err, sandbox.ErrNotFound) {
		if _, lerr := d.first(ctx, sqlOwnLedger, ref, owner); lerr == nil {
			return ref, nil
		}
	}
	return "", err
}

// OwnSnapshot is Snapshot among what one owner has.
func (d *DB) OwnSnapshot(ctx context.Context, owner, ref string) (sandbox.Snapshot, error) {
	return d.snapshotBy(ctx, ref, sqlOwnSnapshot, sqlOwnSnapshotNamed, func() ([]sandbox.Snapshot, error) {
		return collect(ctx, d.reads[sqlOwnSnapshotPrefix], scanSnapshot, ref, owner, ref+"{")
	}, owner)
}

// OwnSnapshots lists an owner's snapshots, newest first.
func (d *DB) OwnSnapshots(ctx context.Context, owner string, kinds ...sandbox.SnapshotKind) ([]sandbox.Snapshot, error) {
	all, err := collect(ctx, d.reads[sqlOwnSnapshots], scanSnapshot, owner)
	if len(kinds) > 0 {
		all = slices.DeleteFunc(all, func(s sandbox.Snapshot) bool { return !slices.Contains(kinds, s.Kind) })
	}
	return all, err
}

// OwnSchedule returns a schedule of an owner's sandbox. ErrNotFound.
func (d *DB) OwnSchedule(ctx context.Context, owner, id string) (sandbox.Schedule, error) {
	found, err := d.first(ctx, sqlOwnSchedule, id, owner)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Schedule{}, scheduleNotFound(id)
	}
	if err != nil {
		return sandbox.Schedule{}, err
	}
	return scanSchedule(found)
}

// OwnSchedules lists those of an owner's sandboxes.
func (d *DB) OwnSchedules(ctx context.Context, owner string) ([]sandbox.Schedule, error) {
	return collect(ctx, d.reads[sqlOwnSchedules], scanSchedule, owner)
}

// OwnPort returns a published port of an owner's sandbox. ErrNotFound.
func (d *DB) OwnPort(ctx context.Context, owner, id string) (sandbox.Port, error) {
	found, err := d.first(ctx, sqlOwnPort, id, owner)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Port{}, portNotFound(id)
	}
	if err != nil {
		return sandbox.Port{}, err
	}
	return scanPort(found)
}

// OwnPorts lists those of an owner's sandboxes, as they are written down.
func (d *DB) OwnPorts(ctx context.Context, owner string) ([]sandbox.Port, error) {
	return collect(ctx, d.reads[sqlOwnPorts], scanPort, owner)
}

// OwnVolume returns under which of two names an owner has a volume; ErrNotFound
// names the second.
func (d *DB) OwnVolume(ctx context.Context, owner, stored, name string) (string, error) {
	found, err := d.first(ctx, sqlOwnVolume, stored, name, owner)
	if errors.Is(err, sql.ErrNoRows) {
		return "", volumeNotFound(name)
	}
	if err == nil {
		err = found.Scan(&stored)
	}
	return stored, err
}

// OwnEvents returns events after a number, as Events: of an owner's sandboxes
// and projects, and of what else the owner caused.
func (d *DB) OwnEvents(ctx context.Context, owner string, after int64, limit int) ([]sandbox.Event, error) {
	if limit <= 0 {
		limit = defaultEvents
	}
	return collect(ctx, d.reads[sqlOwnEvents], scanEvent, owner, after, min(limit, maxEvents))
}

// OwnProject returns a project of an owner by id or name. ErrNotFound.
func (d *DB) OwnProject(ctx context.Context, owner, ref string) (project.Project, error) {
	query := sqlOwnProjectNamed
	if _, err := project.ParseID(ref); err == nil {
		query = sqlOwnProject
	}
	return lookUp[project.Project](ctx, d, "project", ref, query, owner)
}

// OwnAgent returns an agent of one of an owner's projects. ErrNotFound.
func (d *DB) OwnAgent(ctx context.Context, owner string, id project.AgentID) (project.Agent, error) {
	return lookUp[project.Agent](ctx, d, "agent", string(id), sqlOwnAgent, owner)
}

// Held adds up what an owner has. Of every sandbox created until it is called
// the row is there.
func (d *DB) Held(ctx context.Context, owner string) (h access.Held, err error) {
	var stored int64
	if err := d.reader.QueryRowContext(ctx, sqlHeld, owner).Scan(&h.Sandboxes, &h.CPUs, &h.MemoryBytes, &h.DiskBytes); err != nil {
		return h, translate(err)
	}
	err = d.reader.QueryRowContext(ctx, sqlHeldStored, owner).Scan(&stored)
	h.DiskBytes = sandbox.AddHeld(h.DiskBytes, stored)
	return h, translate(err)
}

// KeyUsed reports whether an owner's idempotency key has made a sandbox.
func (d *DB) KeyUsed(ctx context.Context, owner, key string) (bool, error) {
	if key == "" {
		return false, nil
	}
	_, err := d.first(ctx, sqlKeyUsed, owner, key)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}
