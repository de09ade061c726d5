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
	sqlAddVolume    = `INSERT INTO volumes (name, created_at, record) VALUES (?1, ?2, ?3)`
	sqlVolume       = `SELECT record FROM volumes WHERE name = ?`
	sqlVolumes      = `SELECT record FROM volumes ORDER BY name`
	sqlPutVolume    = `UPDATE volumes SET record = ?2 WHERE name = ?1`
	sqlDeleteVolume = `DELETE FROM volumes WHERE name = ?`
	// Most specs name no volume: those are passed over as text, unread.
	sqlVolumeUsers = `SELECT json_extract(value, '$.volume'), sandboxes.id FROM sandboxes, json_each(spec, '$.volumes')
		WHERE status NOT IN ('completed', 'failed') AND spec LIKE '%"volumes":%'
		AND json_extract(value, '$.volume') IS NOT NULL ORDER BY sandboxes.created_at, sandboxes.id`
	sqlVolumeUser = `SELECT sandboxes.id FROM sandboxes, json_each(spec, '$.volumes')
		WHERE status NOT IN ('completed', 'failed') AND spec LIKE '%"volumes":%'
		AND json_extract(value, '$.volume') = ? LIMIT 1`
)

// AddVolume writes a new volume down: Name, CreatedAt and what was asked for
// count. ErrConflict with code volume_exists.
func (d *DB) AddVolume(ctx context.Context, v sandbox.Volume) error {
	if err := sandbox.ValidateName(v.Name); err != nil {
		return err
	}
	data, err := volumeRecord(v)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // its directory is made next
			return err
		}
		_, err := t.exec(sqlAddVolume, v.Name, v.CreatedAt.UnixNano(), data)
		if isUnique(err) {
			return sandbox.Errorf(sandbox.ErrConflict, "volume_exists", "there is a volume %s already: use it, or choose another name", v.Name)
		}
		return err
	})
}

// Volume returns a volume without what only the kernel knows. ErrNotFound with
// code volume_not_found.
func (d *DB) Volume(ctx context.Context, name string) (sandbox.Volume, error) {
	found, err := d.first(ctx, sqlVolume, name)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Volume{}, volumeNotFound(name)
	}
	if err != nil {
		return sandbox.Volume{}, err
	}
	return scanVolume(found)
}

// Volumes returns every volume in the order of the names, whatever their
// status.
func (d *DB) Volumes(ctx context.Context) ([]sandbox.Volume, error) {
	return collect(ctx, d.reads[sqlVolumes], scanVolume)
}

// VolumeUsers tells for each volume which living sandboxes mount it, the
// oldest first.
func (d *DB) VolumeUsers(ctx context.Context) (map[string][]sandbox.ID, error) {
	type use struct {
		volume string
		id     sandbox.ID
	}
	uses, err := collect(ctx, d.reads[sqlVolumeUsers], func(s scanner) (u use, err error) {
		var id string
		err = s.Scan(&u.volume, &id)
		u.id = sandbox.ID(id)
		return u, err
	})
	users := map[string][]sandbox.ID{}
	for _, u := range uses {
		if ids := users[u.volume]; len(ids) == 0 || ids[len(ids)-1] != u.id { // once, however often mounted
			users[u.volume] = append(ids, u.id)
		}
	}
	return users, err
}

// ChangeVolume replaces a volume's record by what change makes of it. The
// name cannot be changed. ErrNotFound; errors of change as they are.
func (d *DB) ChangeVolume(ctx context.Context, name string, change func(*sandbox.Volume) error) (v sandbox.Volume, err error) {
	err = d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // what follows on disk counts on it
			return err
		}
		if v, err = t.volume(name); err != nil {
			return err
		}
		if err := change(&v); err != nil {
			return err
		}
		return t.putVolume(name, v)
	})
	return v, err
}

// RemoveVolume marks a volume as being removed: from then on no sandbox can be
// made with it. Repeating it is safe. ErrConflict with code volume_in_use
// while a living sandbox mounts it, ErrNotFound.
func (d *DB) RemoveVolume(ctx context.Context, name string) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // its files are deleted next
			return err
		}
		v, err := t.volume(name)
		if err != nil {
			return err
		}
		user, err := t.text(sqlVolumeUser, name)
		if err == nil {
			return sandbox.Errorf(sandbox.ErrConflict, "volume_in_use", "volume %s is used by sandbox %s: 'sandbox rm %s' ends that", name, user, user)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		v.Status = sandbox.VolumeRemoving
		return t.putVolume(name, v)
	})
}

// DeleteVolume forgets a volume whose files are gone. Repeating it is safe.
func (d *DB) DeleteVolume(ctx context.Context, name string) error {
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlDeleteVolume, name)
		return err
	})
}

// volumesReady refuses a sandbox with a volume that is not there to be used.
func (t *tx) volumesReady(mounts []sandbox.VolumeMount) error {
	for _, m := range mounts {
		if m.Volume == "" {
			continue
		}
		v, err := t.volume(m.Volume)
		if err != nil {
			return err
		}
		if v.Status != sandbox.VolumeReady {
			return volumeNotFound(m.Volume)
		}
	}
	return nil
}

func (t *tx) volume(name string) (sandbox.Volume, error) {
	found, err := t.row(sqlVolume, name)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Volume{}, volumeNotFound(name)
	}
	if err != nil {
		return sandbox.Volume{}, err
	}
	return scanVolume(found)
}

func (t *tx) putVolume(name string, v sandbox.Volume) error {
	v.Name = name
	data, err := volumeRecord(v)
	if err == nil {
		_, err = t.exec(sqlPutVolume, name, data)
	}
	return err
}

// volumeRecord leaves out what is asked of the kernel each time.
func volumeRecord(v sandbox.Volume) (string, error) {
	v.UsedBytes, v.UsedInodes, v.Uncounted, v.UsedBy, v.Enforcement = 0, 0, false, nil, nil
	return toJSON(v)
}

func scanVolume(s scanner) (v sandbox.Volume, err error) {
	var data []byte
	if err := s.Scan(&data); err != nil {
		return v, err
	}
	if err := json.Unmarshal(data, &v); err != nil {
		return v, fmt.Errorf("reading a volume: %w", err)
	}
	return v, nil
}

func volumeNotFound(name string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "volume_not_found", "no volume %.70q: 'sandbox volume create %s' makes it, 'sandbox volume ls' shows those there are", name, name)
}
