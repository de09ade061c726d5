-- What sandboxes used. A sandbox's row here stays when the one in sandboxes is
-- pruned, and says who had it. It is written with the first reading. Times of
-- the ledger are milliseconds since 1970 UTC.
CREATE TABLE ledger (
    number     INTEGER NOT NULL PRIMARY KEY,
    sandbox    TEXT    NOT NULL UNIQUE,
    owner      TEXT    NOT NULL,
    project    TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    image      TEXT    NOT NULL,
    labels     TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    ended_at   INTEGER,
    boot       TEXT    NOT NULL DEFAULT '', -- of the last reading
    rolled     INTEGER NOT NULL DEFAULT 0,  -- when its readings were last thinned out
    due        INTEGER                      -- when next; null: never again
) STRICT;
CREATE INDEX ledger_due ON ledger (due) WHERE due IS NOT NULL;

-- Totals since the sandbox was created, which was with none. What was used in
-- a span of time is the difference of those at its ends; readings between them
-- may go.
CREATE TABLE readings (
    ledger     INTEGER NOT NULL REFERENCES ledger (number) ON DELETE CASCADE,
    at         INTEGER NOT NULL,
    cpu        INTEGER NOT NULL, -- microseconds
    memory     INTEGER NOT NULL, -- KiB times seconds
    storage    INTEGER NOT NULL, -- KiB times seconds
    net_rx     INTEGER NOT NULL, -- bytes
    net_tx     INTEGER NOT NULL, -- bytes
    io_read    INTEGER NOT NULL, -- bytes
    io_write   INTEGER NOT NULL, -- bytes
    running    INTEGER NOT NULL, -- milliseconds
    paused     INTEGER NOT NULL, -- milliseconds
    stopped    INTEGER NOT NULL, -- milliseconds
    other      INTEGER NOT NULL, -- milliseconds
    starts     INTEGER NOT NULL,
    status     TEXT    NOT NULL, -- from here on
    clock      INTEGER NOT NULL, -- milliseconds since the boot
    memory_kib  INTEGER NOT NULL, -- now
    storage_kib INTEGER NOT NULL, -- now
    PRIMARY KEY (ledger, at)
) STRICT, WITHOUT ROWID;

-- One that comes late says nothing the last does not include.
CREATE TRIGGER readings_late BEFORE INSERT ON readings
WHEN NEW.at < (SELECT max(at) FROM readings WHERE ledger = NEW.ledger)
BEGIN SELECT RAISE(IGNORE); END;

CREATE TRIGGER readings_rise BEFORE INSERT ON readings
WHEN EXISTS (SELECT 1 FROM readings WHERE ledger = NEW.ledger
    AND at = (SELECT max(at) FROM readings WHERE ledger = NEW.ledger) AND at <= NEW.at
    AND (cpu > NEW.cpu OR memory > NEW.memory OR storage > NEW.storage OR net_rx > NEW.net_rx OR net_tx > NEW.net_tx
        OR io_read > NEW.io_read OR io_write > NEW.io_write OR running > NEW.running OR paused > NEW.paused
        OR stopped > NEW.stopped OR other > NEW.other OR starts > NEW.starts))
BEGIN SELECT RAISE(ABORT, 'totals of the ledger never go down'); END;

CREATE TRIGGER readings_stay BEFORE UPDATE ON readings
BEGIN SELECT RAISE(ABORT, 'readings of the ledger never change'); END;
