-- Roots change in place: what a sandbox's root stands on now, the change of
-- root that was begun and not finished, and the snapshot its files began with.
ALTER TABLE sandboxes ADD COLUMN stack   TEXT NOT NULL DEFAULT 'null'; -- layers, lowest first; null: those of image_record
ALTER TABLE sandboxes ADD COLUMN pending TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN point   TEXT NOT NULL DEFAULT '';

-- Snapshots outlive their sandboxes, so sandbox is no reference.
CREATE TABLE snapshots (
    id         TEXT    NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL DEFAULT '',
    sandbox    TEXT    NOT NULL DEFAULT '',
    kind       TEXT    NOT NULL,
    status     TEXT    NOT NULL CHECK (status IN ('creating', 'ready')),
    created_at INTEGER NOT NULL,
    boot_id    TEXT    NOT NULL DEFAULT '', -- of a snapshot that is not on disk yet
    schedule   TEXT    NOT NULL DEFAULT '',
    record     TEXT    NOT NULL
) STRICT;
CREATE UNIQUE INDEX snapshots_name ON snapshots (name) WHERE name <> '';
CREATE INDEX snapshots_sandbox ON snapshots (sandbox, created_at);

-- One layer that stands for the beginning of longer stacks: key is the JSON
-- list of the layers it was made of.
CREATE TABLE flattened (
    layers TEXT NOT NULL PRIMARY KEY,
    layer  TEXT NOT NULL
) STRICT;

CREATE TABLE schedules (
    id      TEXT    NOT NULL PRIMARY KEY,
    sandbox TEXT    NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    next_at INTEGER NOT NULL,
    record  TEXT    NOT NULL
) STRICT;
CREATE INDEX schedules_next ON schedules (next_at);

CREATE TABLE volumes (
    name       TEXT    NOT NULL PRIMARY KEY,
    created_at INTEGER NOT NULL,
    record     TEXT    NOT NULL
) STRICT;

-- What a step of an image build came to: key names parent, instruction and
-- content; record is an image without a name, whose layers it keeps.
CREATE TABLE build_cache (
    key     TEXT    NOT NULL PRIMARY KEY,
    used_at INTEGER NOT NULL,
    record  TEXT    NOT NULL
) STRICT;
