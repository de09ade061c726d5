package state

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/sandboxd/sandboxd/sandbox"
)

const (
	sqlPutImage = `INSERT INTO images (name, image) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET image = ?2`
	sqlImage    = `SELECT image FROM images WHERE name = ?`
	sqlImages   = `SELECT image FROM images ORDER BY name`
	sqlImageOf  = `SELECT image_record FROM sandboxes WHERE id = ?`
	// An image without layers has null there, which json_each makes a row of.
	sqlLayers = `SELECT value FROM images, json_each(image, '$.layers') WHERE value IS NOT NULL
		UNION SELECT value FROM sandboxes, json_each(image_record, '$.layers')
		WHERE value IS NOT NULL AND status NOT IN ('completed', 'failed')
		UNION SELECT value FROM sandboxes, json_each(stack) WHERE value IS NOT NULL AND status NOT IN ('completed', 'failed')
		UNION SELECT value FROM sandboxes, json_each(CASE pending WHEN '' THEN '{}' ELSE pending END, '$.stack') WHERE value IS NOT NULL
		AND status NOT IN ('completed', 'failed')
		UNION SELECT value FROM snapshots, json_each(record, '$.layers') WHERE value IS NOT NULL AND status = 'ready'
		UNION SELECT value FROM build_cache, json_each(record, '$.layers') WHERE value IS NOT NULL`
	sqlDeleteImage = `DELETE FROM images WHERE name = ?`
	sqlUser        = `SELECT id FROM sandboxes WHERE image = ? AND status NOT IN ('completed', 'failed') LIMIT 1`

	sqlPutProcess = `INSERT INTO processes (sandbox, number, process, tail) VALUES (?1, ?2, ?3, ?4)
		ON CONFLICT (sandbox, number) DO UPDATE SET process = ?3, tail = coalesce(?4, tail)`
	sqlPutCommandKeys = `INSERT INTO command_keys (sandbox, keys) VALUES (?1, ?2) ON CONFLICT (sandbox) DO UPDATE SET keys = ?2`
	sqlCommandKeys    = `SELECT coalesce((SELECT keys FROM command_keys WHERE sandbox = ?), x'')`

	sqlLastProcess = `SELECT coalesce(max(number), 0) FROM processes WHERE sandbox = ?`
	sqlProcesses   = `SELECT process, tail FROM processes WHERE sandbox = ? ORDER BY number`
)

// PutImage adds an image or replaces the one of its name.
func (d *DB) PutImage(ctx context.Context, img sandbox.Image) error {
	if err := sandbox.ValidateImageName(img.Name); err != nil {
		return err
	}
	data, err := toJSON(img)
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil {
			return err
		}
		_, err := t.exec(sqlPutImage, img.Name, data)
		return err
	})
}

// Image returns the image of a name. ErrNotFound.
func (d *DB) Image(ctx context.Context, name string) (sandbox.Image, error) {
	found, err := d.first(ctx, sqlImage, name)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Image{}, imageNotFound(name)
	}
	if err != nil {
		return sandbox.Image{}, err
	}
	return scanImage(found)
}

// ImageOf returns the image a sandbox was made of, as it was then. ErrNotFound
// where there is no such sandbox, or none was given to CreateSandbox.
func (d *DB) ImageOf(ctx context.Context, id sandbox.ID) (sandbox.Image, error) {
	img, err := scanImage(d.reads[sqlImageOf].QueryRowContext(ctx, string(id)))
	if errors.Is(err, sql.ErrNoRows) || err == nil && img.Name == "" {
		return img, sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image is recorded for sandbox %s", id)
	}
	return img, translate(err)
}

// LayersInUse returns every layer that must stay: what an image, a snapshot
// or the build cache names, and what a living sandbox was made of or stands on.
func (d *DB) LayersInUse(ctx context.Context) ([]string, error) {
	return collect(ctx, d.reads[sqlLayers], scanText)
}

func scanText(s scanner) (text string, err error) {
	err = s.Scan(&text)
	return text, err
}

// imageUnchanged refuses a create whose image is no longer what its name
// stands for.
func (t *tx) imageUnchanged(img sandbox.Image, record string) error {
	if img.Name == "" {
		return nil
	}
	now, err := t.text(sqlImage, img.Name)
	if errors.Is(err, sql.ErrNoRows) || err == nil && now != record {
		return sandbox.Errorf(sandbox.ErrConflict, "image_changed", "image %s was removed or replaced meanwhile: try again", img.Name)
	}
	return err
}

// Images returns every image in the order of the names.
func (d *DB) Images(ctx context.Context) ([]sandbox.Image, error) {
	return collect(ctx, d.reads[sqlImages], scanImage)
}

// DeleteImage forgets an image. ErrConflict with code image_in_use while a
// living sandbox was made of it, ErrNotFound.
func (d *DB) DeleteImage(ctx context.Context, name string) error {
	return d.write(ctx, func(t *tx) error {
		if err := t.mustLast(); err != nil { // its layers are deleted next
			return err
		}
		user, err := t.text(sqlUser, name)
		if err == nil {
			return sandbox.Errorf(sandbox.ErrConflict, "image_in_use", "image %s is used by sandbox %s: remove that first", name, user)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		if ok, err := t.changed(sqlDeleteImage, name); err != nil || !ok {
			return errors.Join(err, imageNotFound(name))
		}
		return nil
	})
}

func imageNotFound(name string) error {
	return sandbox.Errorf(sandbox.ErrNotFound, "image_not_found", "no image %.80q", name)
}

func scanImage(s scanner) (img sandbox.Image, err error) {
	var data []byte
	if err := s.Scan(&data); err != nil {
		return img, err
	}
	if err := json.Unmarshal(data, &img); err != nil {
		return img, fmt.Errorf("reading an image: %w", err)
	}
	return img, nil
}

// ProcessRecord is a process as it is remembered after its sandbox is gone.
type ProcessRecord struct {
	sandbox.Process
	Tail []byte // the end of its output, at most 64 KiB
}

// PutProcess keeps a process's record and the last 64 KiB of tail, replacing
// what was kept of it; a nil tail leaves the one that is kept. ErrConflict
// where the sandbox has no record itself.
func (d *DB) PutProcess(ctx context.Context, id sandbox.ID, p sandbox.Process, output []byte) error {
	args, err := processArgs(id, ProcessRecord{Process: p, Tail: output})
	if err != nil {
		return err
	}
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlPutProcess, args...)
		return err
	})
}

// processArgs are the arguments of sqlPutProcess.
func processArgs(id sandbox.ID, r ProcessRecord) ([]any, error) {
	digits, ok := strings.CutPrefix(string(r.ID), "p")
	number, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || !ok {
		return nil, sandbox.Errorf(sandbox.ErrInvalid, "invalid_process_id", "%.40q is not a process id", r.ID)
	}
	data, err := toJSON(r.Process)
	if err != nil {
		return nil, err
	}
	var kept any // nil, not an empty blob, where there is no tail
	if r.Tail != nil {
		kept = tail(r.Tail)
	}
	return []any{string(id), int64(number), data, kept}, nil
}

// Processes returns what is kept of a sandbox's processes, in the order of
// their ids.
func (d *DB) Processes(ctx context.Context, id sandbox.ID) ([]ProcessRecord, error) {
	return collect(ctx, d.reads[sqlProcesses], scanProcess, string(id))
}

// LastProcess returns the highest process number kept of a sandbox, 0 where
// there is none.
func (d *DB) LastProcess(ctx context.Context, id sandbox.ID) (number int64, err error) {
	found, err := d.first(ctx, sqlLastProcess, string(id))
	if err != nil {
		return 0, err
	}
	err = found.Scan(&number)
	return number, err
}

// PutCommandKeys keeps what PID 1 of a sandbox that is being stopped knows of
// idempotency keys, in place of what was kept before.
func (d *DB) PutCommandKeys(ctx context.Context, id sandbox.ID, keys []byte) error {
	return d.write(ctx, func(t *tx) error {
		_, err := t.exec(sqlPutCommandKeys, string(id), keys)
		return err
	})
}

// CommandKeys returns what PutCommandKeys kept; nothing where that was not called.
func (d *DB) CommandKeys(ctx context.Context, id sandbox.ID) (keys []byte, err error) {
	found, err := d.first(ctx, sqlCommandKeys, string(id))
	if err != nil {
		return nil, err
	}
	err = found.Scan(&keys)
	return bytes.Clone(keys), err
}

func scanProcess(s scanner) (r ProcessRecord, err error) {
	var data []byte
	if err := s.Scan(&data, &r.Tail); err != nil {
		return r, err
	}
	if err := json.Unmarshal(data, &r.Process); err != nil {
		return r, fmt.Errorf("reading a process: %w", err)
	}
	return r, nil
}

// writeStatements lists what the writer has prepared.
func writeStatements() []string {
	return []string{
		sqlBegin, sqlCommit, sqlRollback,
		sqlIdempotent, sqlNextSlot, sqlFreeSlot, sqlFreeSlots, sqlLease, sqlLeaseReserved, sqlFree, sqlFreeOf,
		sqlReserve, sqlRelease, sqlReleaseAll,
		sqlInsertSandbox, sqlInsertKey, sqlFreeKey, sqlPutCommandKeys, sqlSandbox, sqlStatus, sqlMove, sqlSet, sqlPruneEnded,
		sqlInsertEvent, sqlImage, sqlPutImage, sqlUser, sqlDeleteImage, sqlPutProcess,
		sqlRootOf, sqlBeginRoot, sqlEndRoot, sqlDropRoot,
		sqlLedger, sqlInsertLedger, sqlLedgerBoot, sqlEndLedger, sqlPutReading, sqlDue, sqlThin, sqlLastAt, sqlRolled,
		sqlInsertSnapshot, sqlFinishSnapshot, sqlDropSnapshot, sqlDeleteSnapshot,
	}
}

// readStatements lists what the readers have prepared.
func readStatements() []string {
	return []string{
		sqlByPrefix, sqlOwnByPrefix, sqlLiving, sqlEvents, sqlEventsOf, sqlImages, sqlImageOf, sqlLayers, sqlProcesses, sqlLastEvent,
		sqlVolumes, sqlVolumeUsers, sqlSecrets, sqlTemplates,
		sqlSnapshotPrefix, sqlSnapshots, sqlLostSnapshots, sqlSchedules,
		sqlCounts, sqlEventTypes,
		sqlOwnSnapshotPrefix, sqlOwnSnapshots, sqlOwnSchedules, sqlOwnPorts, sqlOwnEvents,
	}
}
