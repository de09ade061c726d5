-- Times are nanoseconds since 1970 UTC. JSON columns hold the wire form of
-- API v1. Columns a request never reads stand last, so that the pages of a
-- listing hold many rows.

CREATE TABLE sandboxes (
    id          TEXT    NOT NULL PRIMARY KEY,
    name        TEXT    NOT NULL DEFAULT '',
    owner       TEXT    NOT NULL DEFAULT '',
    image       TEXT    NOT NULL DEFAULT '',
    status      TEXT    NOT NULL CHECK (status IN ('pending', 'creating', 'running', 'paused',
                                                   'stopped', 'completing', 'completed', 'failed')),
    reason      TEXT    NOT NULL DEFAULT '',
    detail      TEXT    NOT NULL DEFAULT '',
    created_at  INTEGER NOT NULL,
    started_at  INTEGER,
    ended_at    INTEGER,
    deadline    INTEGER,
    exit_code   INTEGER,
    slot        INTEGER NOT NULL CHECK (slot >= 0),
    uid_base    INTEGER NOT NULL DEFAULT 0,
    address     TEXT    NOT NULL DEFAULT '',
    init_pid    INTEGER NOT NULL DEFAULT 0,
    init_start  INTEGER NOT NULL DEFAULT 0,
    boot_id     TEXT    NOT NULL DEFAULT '',
    spec        TEXT    NOT NULL,
    enforcement TEXT    NOT NULL DEFAULT 'null',
    usage       TEXT    NOT NULL DEFAULT '{}',
    image_record TEXT   NOT NULL DEFAULT '{}', -- the image as it was; its name may since stand for another
    last_output BLOB
) STRICT;

-- A name belongs to one living sandbox.
CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes (name)
    WHERE name <> '' AND status NOT IN ('completed', 'failed');
CREATE INDEX sandboxes_name ON sandboxes (name, created_at) WHERE name <> '';
CREATE INDEX sandboxes_created ON sandboxes (created_at, id);
CREATE INDEX sandboxes_living ON sandboxes (created_at, id)
    WHERE status NOT IN ('completed', 'failed');
CREATE INDEX sandboxes_ended ON sandboxes (ended_at, id)
    WHERE status IN ('completed', 'failed');

-- A slot that was ever used has a row; sandbox is its lease. freed counts up
-- with each release, so the least recently freed slot is the next to be used.
CREATE TABLE slots (
    slot    INTEGER NOT NULL PRIMARY KEY CHECK (slot >= 0),
    sandbox TEXT    UNIQUE REFERENCES sandboxes (id),
    freed   INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX slots_free ON slots (freed, slot) WHERE sandbox IS NULL;

-- AUTOINCREMENT: a number once read by a follower is never given out again,
-- not even after the newest rows were pruned.
CREATE TABLE events (
    seq     INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    time    INTEGER NOT NULL,
    sandbox TEXT    NOT NULL DEFAULT '',
    type    TEXT    NOT NULL,
    actor   TEXT    NOT NULL DEFAULT '',
    data    TEXT    NOT NULL DEFAULT 'null'
) STRICT;
CREATE INDEX events_sandbox ON events (sandbox, seq) WHERE sandbox <> '';

CREATE TABLE images (
    name  TEXT NOT NULL PRIMARY KEY,
    image TEXT NOT NULL
) STRICT;

CREATE TABLE processes (
    sandbox TEXT    NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    number  INTEGER NOT NULL,
    process TEXT    NOT NULL,
    tail    BLOB,
    PRIMARY KEY (sandbox, number)
) STRICT;

CREATE TABLE idempotency (
    owner   TEXT NOT NULL,
    key     TEXT NOT NULL,
    hash    TEXT NOT NULL,
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    PRIMARY KEY (owner, key)
) STRICT;
CREATE INDEX idempotency_sandbox ON idempotency (sandbox);
