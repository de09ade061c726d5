-- A database as schema version 5 leaves it. Never changed once released.
CREATE TABLE schema_version (
		one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL) STRICT;
INSERT INTO schema_version VALUES (1, 2);

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
, reserved INTEGER NOT NULL DEFAULT 0
    CHECK (reserved = 0 OR reserved = 1 AND sandbox IS NULL)) STRICT;
CREATE INDEX slots_free ON slots (freed, slot) WHERE sandbox IS NULL AND reserved = 0;

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

INSERT INTO sandboxes VALUES ('sbaaaaaaaaaaaa', 'web', 'uid:7', 'host', 'running', '', '', 1790000000000000000, 1790000001000000000, NULL,
    1790003600000000000, NULL, 1, 536936448, '10.200.0.1', 4242, 777, 'boot',
    '{"name":"web","image":"host","limits":{"memory_bytes":268435456},"network":{"mode":"off"},"labels":{"a":"b"}}',
    '[{"limit":"memory","asked":"268435456 bytes","enforced":true}]', '{"cpu_seconds":1.5}',
    '{"name":"host","digest":"host","kind":"host","layers":["l0"],"size_bytes":1,"files":1,"config":{},"created_at":"2025-01-01T00:00:00Z"}', NULL);
INSERT INTO sandboxes VALUES ('sbbbbbbbbbbbbb', 'old', 'uid:7', 'host', 'failed', 'oom', 'the kernel killed its workload for memory',
    1780000000000000000, 1780000001000000000, 1780000002000000000, NULL, 137, 0, 536870912, '10.200.0.0', 0, 0, '',
    '{"name":"old","image":"host"}', 'null', '{"oom_kills":1}', '{}', x'627965');
INSERT INTO slots VALUES (0, NULL, 1, 0), (1, 'sbaaaaaaaaaaaa', 0, 0), (2, NULL, 0, 1);
INSERT INTO events VALUES (8, 1790000000000000000, 'sbaaaaaaaaaaaa', 'sandbox.pending', 'uid:7', 'null');
INSERT INTO events VALUES (9, 1790000000000000001, 'sbbbbbbbbbbbbb', 'sandbox.failed', 'daemon', '{"reason":"oom"}');
INSERT INTO images VALUES ('host', '{"name":"host","digest":"host","kind":"host","layers":["l"],"size_bytes":1,"files":1,"config":{},"created_at":"2026-01-01T00:00:00Z"}');
INSERT INTO processes VALUES ('sbbbbbbbbbbbbb', 1, '{"id":"p1","pid":2,"argv":["true"],"started_at":"2026-01-01T00:00:00Z","output":{"start":0,"end":3,"dropped":0}}', x'627965');
INSERT INTO idempotency VALUES ('uid:7', 'key', 'hash', 'sbaaaaaaaaaaaa');

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

-- Ports of sandboxes that the host listens for. That no two want the same is
-- the kernel's to say: rows of sandboxes that end stay a moment longer than
-- their sockets.
CREATE TABLE ports (
    id      TEXT NOT NULL PRIMARY KEY,
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    record  TEXT NOT NULL
) STRICT;
CREATE INDEX ports_sandbox ON ports (sandbox);

-- What opens a sandbox's host names: the SHA-256 of a random token.
CREATE TABLE port_tokens (
    sandbox TEXT NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    hash    BLOB NOT NULL
) STRICT;

-- Bytes the daemon itself carried into and out of a sandbox's loopback, which
-- no counter of the kernel's tells: of the shell whose PID 1 began at
-- init_start, and absolute, so that writing them twice does no harm.
CREATE TABLE carried (
    sandbox    TEXT    NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    init_start INTEGER NOT NULL,
    rx         INTEGER NOT NULL,
    tx         INTEGER NOT NULL
) STRICT;

INSERT INTO ports VALUES ('poaaaaaaaaaaaa', 'sbaaaaaaaaaaaa', '{"id":"poaaaaaaaaaaaa","sandbox":"sbaaaaaaaaaaaa","protocol":"tcp","address":"127.0.0.1","host_port":8080,"port":80,"created_at":"2026-01-01T00:00:00Z"}');
INSERT INTO port_tokens VALUES ('sbaaaaaaaaaaaa', x'00');
INSERT INTO carried VALUES ('sbaaaaaaaaaaaa', 777, 5, 6);

-- Values the gate adds to requests. record is what may be told; value is not.
CREATE TABLE secrets (
    name   TEXT NOT NULL PRIMARY KEY,
    record TEXT NOT NULL,
    value  BLOB NOT NULL
) STRICT;

INSERT INTO secrets VALUES ('key', '{"name":"key","owner":"uid:7","hosts":["example.com"],"created_at":"2026-01-01T00:00:00Z","updated_at":"2026-01-01T00:00:00Z"}', x'76616c7565');

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

INSERT INTO ledger VALUES (1, 'sbaaaaaaaaaaaa', 'uid:7', '', 'web', 'host', '{}', 1790000000000, NULL, 'boot', 0, 1790000005000);
INSERT INTO readings VALUES (1, 1790000005000, 1500000, 0, 0, 5, 6, 0, 0, 5000, 0, 0, 0, 1, 'running', 99000, 0, 0);

-- Costs and revenue from outside. Amounts are billionths of the currency's
-- unit. Rows are added and never change.
CREATE TABLE entries (
    number   INTEGER NOT NULL PRIMARY KEY,
    scope    TEXT    NOT NULL, -- sandbox, project or owner
    target   TEXT    NOT NULL,
    key      TEXT    NOT NULL, -- idempotency key
    kind     TEXT    NOT NULL, -- cost or revenue
    at       INTEGER NOT NULL, -- milliseconds since 1970 UTC, when it was taken in
    amount   INTEGER NOT NULL,
    meter    TEXT    NOT NULL,
    quantity INTEGER NOT NULL, -- of the meter
    book     TEXT    NOT NULL, -- that the amount of a quantity was found with
    upto     INTEGER NOT NULL, -- what the target has used of the meter with that book, this included
    note     TEXT    NOT NULL,
    actor    TEXT    NOT NULL,
    owner    TEXT    NOT NULL, -- of the sandbox, when it was taken in
    project  TEXT    NOT NULL,
    UNIQUE (scope, target, key)
) STRICT;
CREATE INDEX entries_at ON entries (at);
CREATE INDEX entries_target ON entries (scope, target, at);
CREATE INDEX entries_owner ON entries (owner, at);
CREATE INDEX entries_project ON entries (project, at);
CREATE INDEX entries_meter ON entries (scope, target, meter, book, number) WHERE meter <> '';

CREATE TRIGGER entries_stay BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'entries of costs never change'); END;

-- Price books that were in force while a daemon ran.
CREATE TABLE books (
    version     TEXT    NOT NULL PRIMARY KEY,
    fingerprint TEXT    NOT NULL,
    until       INTEGER NOT NULL, -- milliseconds since 1970 UTC, when it was last seen to be
    record      TEXT    NOT NULL
) STRICT;

-- Budgets, and what they have done.
CREATE TABLE budgets (
    id     TEXT NOT NULL PRIMARY KEY,
    scope  TEXT NOT NULL,
    target TEXT NOT NULL,
    meter  TEXT NOT NULL,
    period TEXT NOT NULL,
    record TEXT NOT NULL,
    mark   TEXT NOT NULL DEFAULT '{}',
    UNIQUE (scope, target, meter, period)
) STRICT;

INSERT INTO entries VALUES (1, 'sandbox', 'sbaaaaaaaaaaaa', 'k1', 'cost', 1790000006000, 180000, 'model.tokens', 1200, '2026-09', 1200, '', 'uid:7', 'uid:7', '');
INSERT INTO books VALUES ('2026-09', 'f', 1790000006000, '{"version":"2026-09","currency":"EUR","from":"2026-09-01T00:00:00Z","prices":{"model.tokens":{"price":"0.15","per":1000000,"unit":"token"}}}');
INSERT INTO budgets VALUES ('bg1', 'owner', 'uid:7', 'money', 'month', '{"id":"bg1","scope":"owner","target":"uid:7","meter":"money","limit":"25000000000","period":"month","at":[{"percent":100,"action":"stop"}],"created_at":"2026-09-21T00:00:00Z"}', '{}');

-- The lab: projects and all that belongs to them. Agents of the production
-- world stand in its own database, with an empty project.
CREATE TABLE projects (
    id         TEXT    NOT NULL PRIMARY KEY,
    name       TEXT    NOT NULL,
    status     TEXT    NOT NULL CHECK (status IN ('active', 'promoting', 'promoted', 'killed')),
    created_at INTEGER NOT NULL,
    record     TEXT    NOT NULL
) STRICT;
CREATE UNIQUE INDEX projects_name ON projects (name) WHERE status <> 'killed';

CREATE TABLE agents (
    id         TEXT    NOT NULL PRIMARY KEY,
    project    TEXT    NOT NULL DEFAULT '',
    status     TEXT    NOT NULL CHECK (status IN ('pending', 'active', 'paused', 'failed', 'stopped')),
    created_at INTEGER NOT NULL,
    record     TEXT    NOT NULL
) STRICT;
CREATE INDEX agents_project ON agents (project, created_at);

CREATE TABLE experiments (
    id         TEXT    NOT NULL PRIMARY KEY,
    project    TEXT    NOT NULL REFERENCES projects (id) ON DELETE CASCADE,
    status     TEXT    NOT NULL CHECK (status IN ('running', 'completed', 'expired', 'cancelled')),
    started_at INTEGER NOT NULL,
    record     TEXT    NOT NULL
) STRICT;
CREATE INDEX experiments_project ON experiments (project, started_at);
CREATE INDEX experiments_running ON experiments (started_at) WHERE status = 'running';

CREATE TABLE evaluations (
    id      TEXT    NOT NULL PRIMARY KEY,
    project TEXT    NOT NULL REFERENCES projects (id) ON DELETE CASCADE,
    at      INTEGER NOT NULL,
    record  TEXT    NOT NULL
) STRICT;
CREATE INDEX evaluations_project ON evaluations (project, at);

CREATE TABLE promotions (
    id         TEXT    NOT NULL PRIMARY KEY,
    project    TEXT    NOT NULL REFERENCES projects (id) ON DELETE CASCADE,
    status     TEXT    NOT NULL CHECK (status IN ('moving', 'watching', 'finishing', 'done', 'rolling_back', 'rolled_back')),
    started_at INTEGER NOT NULL,
    record     TEXT    NOT NULL
) STRICT;
CREATE INDEX promotions_project ON promotions (project, started_at);
CREATE UNIQUE INDEX promotions_running ON promotions (project) WHERE status NOT IN ('done', 'rolled_back');

-- Webhooks, each with the number of the last event it is done with, and the
-- events whose delivery was given up. Those of projects were part of the
-- projects alone; what they had still to be told begins their cursor.
CREATE TABLE webhooks (
    id         TEXT    NOT NULL PRIMARY KEY,
    owner      TEXT    NOT NULL,
    project    TEXT    NOT NULL,
    cursor     INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    secret     TEXT    NOT NULL,
    record     TEXT    NOT NULL
) STRICT;
CREATE INDEX webhooks_project ON webhooks (project) WHERE project <> '';

CREATE TABLE dead_letters (
    webhook TEXT    NOT NULL REFERENCES webhooks (id) ON DELETE CASCADE,
    seq     INTEGER NOT NULL,
    record  TEXT    NOT NULL,
    PRIMARY KEY (webhook, seq)
) STRICT, WITHOUT ROWID;

-- The highest number of an event that was deleted.
CREATE TABLE events_pruned (
    one  INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
    upto INTEGER NOT NULL
) STRICT;
INSERT INTO events_pruned VALUES (1, 0);

-- Who may do what: owners, API keys (of a secret the SHA-256 alone), and the
-- chained audit. audit_base is the newest row of those that were deleted for
-- their age, from which the chain goes on.
CREATE TABLE owners (
    name   TEXT NOT NULL PRIMARY KEY,
    record TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
    id         TEXT    NOT NULL PRIMARY KEY,
    hash       BLOB    NOT NULL UNIQUE,
    owner      TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    used_at    INTEGER,
    revoked_at INTEGER,
    record     TEXT    NOT NULL
) STRICT;
CREATE INDEX keys_owner ON keys (owner);

CREATE TABLE audit (
    seq       INTEGER NOT NULL PRIMARY KEY,
    time      INTEGER NOT NULL,
    owner     TEXT    NOT NULL,
    key       TEXT    NOT NULL,
    role      TEXT    NOT NULL,
    origin    TEXT    NOT NULL,
    operation TEXT    NOT NULL,
    object    TEXT    NOT NULL,
    status    INTEGER NOT NULL,
    code      TEXT    NOT NULL,
    request   TEXT    NOT NULL,
    hash      BLOB    NOT NULL
) STRICT;
CREATE INDEX audit_owner ON audit (owner, seq);
CREATE INDEX audit_object ON audit (object, seq) WHERE object <> '';

CREATE TABLE audit_base (
    one  INTEGER NOT NULL PRIMARY KEY CHECK (one = 1),
    seq  INTEGER NOT NULL,
    hash BLOB    NOT NULL
) STRICT;
INSERT INTO audit_base VALUES (1, 0, zeroblob(32));

INSERT INTO projects VALUES ('prj_aaaaaaaaaaaa', 'shop', 'promoting', 1790000000000000000, '{"id":"prj_aaaaaaaaaaaa","name":"shop","status":"promoting","created_at":"2026-09-21T14:13:20Z","workspace":"ws-prj_aaaaaaaaaaaa","criteria":{"min_profit":"1.5"}}');
INSERT INTO agents VALUES ('sandbox_prj_aaaaaaaaaaaa_bot_aaaaaaaa', 'prj_aaaaaaaaaaaa', 'active', 1790000000000000000, '{"id":"sandbox_prj_aaaaaaaaaaaa_bot_aaaaaaaa","project":"prj_aaaaaaaaaaaa","type":"bot","status":"active","created_at":"2026-09-21T14:13:20Z","spec":{"command":["x"]},"restarts":2,"failures":0,"held":"prm_aaaaaaaaaaaa"}');
INSERT INTO experiments VALUES ('exp_aaaaaaaaaaaa', 'prj_aaaaaaaaaaaa', 'running', 1790000000000000000, '{"id":"exp_aaaaaaaaaaaa","project":"prj_aaaaaaaaaaaa","status":"running","hypothesis":"h","started_at":"2026-09-21T14:13:20Z"}');
INSERT INTO evaluations VALUES ('evl_aaaaaaaaaaaa', 'prj_aaaaaaaaaaaa', 1790000000000000000, '{"id":"evl_aaaaaaaaaaaa","project":"prj_aaaaaaaaaaaa","at":"2026-09-21T14:13:20Z","recommendation":"RECOMMEND","verdicts":[],"criteria":{},"inputs":{"at":"2026-09-21T14:13:20Z","age_seconds":1,"total":{"cost":"1","revenue":"2","profit":"1","roi_bp":10000},"agents":[],"experiments":{"running":1,"completed":0,"succeeded":0,"expired":0}}}');
INSERT INTO promotions VALUES ('prm_aaaaaaaaaaaa', 'prj_aaaaaaaaaaaa', 'moving', 1790000000000000000, '{"id":"prm_aaaaaaaaaaaa","project":"prj_aaaaaaaaaaaa","status":"moving","evaluation":"evl_aaaaaaaaaaaa","moves":[{"from":"sandbox_prj_aaaaaaaaaaaa_bot_aaaaaaaa","to":"bot_aaaaaaaa","was":"active","type":"bot","spec":{"command":["x"]}}],"started_at":"2026-09-21T14:13:20Z","window_ms":600000}');

INSERT INTO webhooks VALUES ('whaaaaaaaaaaaa', 'uid:1000', '', 2, 1790000000000000000, 'a secret', '{"id":"whaaaaaaaaaaaa","url":"http://x.example","owner":"uid:1000","filter":{"events":["sandbox.*"]},"created_at":"2026-09-21T14:13:20Z","cursor":2,"waiting":0,"failures":0,"dead":0}');
INSERT INTO dead_letters VALUES ('whaaaaaaaaaaaa', 2, '{"webhook":"whaaaaaaaaaaaa","event":{"seq":2,"time":"2026-09-21T14:13:20Z","type":"sandbox.running"},"attempts":10,"error":"the receiver answered 400 Bad Request","at":"2026-09-21T14:13:21Z"}');

INSERT INTO owners VALUES ('alice', '{"name":"alice","role":"developer","quota":{"max_sandboxes":3,"max_cpus":6,"max_memory_bytes":6442450944,"max_disk_bytes":32212254720,"requests_per_minute":3000},"created_at":"2026-09-21T14:13:20Z","disabled":false,"lifetime_ns":86400000000000,"idle_ns":3600000000000}');
INSERT INTO keys VALUES ('key_aaaaaaaaaaaaaaaa', x'000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f', 'alice', 1790000000000000000, NULL, 1790000000000000000, NULL, '{"id":"key_aaaaaaaaaaaaaaaa","owner":"alice","role":"developer","name":"laptop","begins":"e2b_0123ab","created_at":"2026-09-21T14:13:20Z"}');
INSERT INTO audit VALUES (1, 1790000000000000000, 'uid:0', '', 'admin', 'unix', 'create-key', 'key_aaaaaaaaaaaaaaaa', 201, '', 'rqaaaaaaaaaaaaaaaa', zeroblob(32));


-- Names belong to their owners: two may have the same, and neither finds out.
DROP INDEX sandboxes_living_name;
CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes (owner, name)
    WHERE name <> '' AND status NOT IN ('completed', 'failed');
CREATE INDEX sandboxes_owner ON sandboxes (owner, created_at, id);
CREATE INDEX sandboxes_owner_living ON sandboxes (owner, created_at, id)
    WHERE status NOT IN ('completed', 'failed');

ALTER TABLE snapshots ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE snapshots SET owner = coalesce(record ->> '$.owner', '');
DROP INDEX snapshots_name;
CREATE UNIQUE INDEX snapshots_name ON snapshots (owner, name) WHERE name <> '';
CREATE INDEX snapshots_called ON snapshots (name) WHERE name <> '';
CREATE INDEX snapshots_owner ON snapshots (owner, created_at);

ALTER TABLE projects ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE projects SET owner = coalesce(record ->> '$.owner', '');
DROP INDEX projects_name;
CREATE UNIQUE INDEX projects_name ON projects (owner, name) WHERE status <> 'killed';

-- Whose sandbox or project it is about; of others who caused it.
ALTER TABLE events ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE events SET owner = CASE sandbox WHEN '' THEN actor ELSE coalesce((SELECT owner FROM sandboxes WHERE id = events.sandbox), '') END;
CREATE INDEX events_owner ON events (owner, seq) WHERE owner <> '';

-- Names for what sandboxes are made of: an image or a snapshot, with limits.
-- Each owner has names of their own; those that are shared everybody sees.
CREATE TABLE templates (
    owner  TEXT    NOT NULL,
    name   TEXT    NOT NULL,
    shared INTEGER NOT NULL,
    record TEXT    NOT NULL,
    PRIMARY KEY (owner, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX templates_shared ON templates (name) WHERE shared;

INSERT INTO templates VALUES ('alice', 'mine', 0, '{"name":"mine","owner":"alice","private":true,"snapshot":"snaaaaaaaaaaaa","limits":{"cpus":2},"created_at":"2026-09-21T14:13:20Z","updated_at":"2026-09-21T14:13:20Z"}');
INSERT INTO templates VALUES ('uid:0', 'base', 1, '{"name":"base","owner":"uid:0","image":"debian:12","limits":{},"created_at":"2026-09-21T14:13:20Z","updated_at":"2026-09-21T14:13:20Z"}');

-- Entries are cancelled by entries, have bounds, and add up without overflow.
-- A cancellation repeats what it cancels with the opposite sign, at the same
-- time, so that every sum over any span has both or neither.
ALTER TABLE entries ADD COLUMN cancels INTEGER REFERENCES entries (number);
ALTER TABLE entries ADD COLUMN made_at INTEGER; -- of a cancellation: when it was made
CREATE UNIQUE INDEX entries_cancels ON entries (cancels) WHERE cancels IS NOT NULL;

-- Beyond the bounds of one entry (cost.MaxEntry, cost.MaxEntryQuantity): in
-- quarantine. Such a row was taken in before there were bounds. It is left out
-- of every sum, and the budgets it is of hold until it is cancelled.
ALTER TABLE entries ADD COLUMN beyond INTEGER NOT NULL GENERATED ALWAYS AS (
    amount NOT BETWEEN -1000000000000000000 AND 1000000000000000000
    OR quantity NOT BETWEEN -1000000000000000 AND 1000000000000000) VIRTUAL;
CREATE INDEX entries_beyond ON entries (number) WHERE beyond;

-- What the entries of one target come to, for the bounds of a total and the
-- price of the next quantity. A row is written with the first entry after this
-- migration. Numbers are decimal, of 128 bits.
CREATE TABLE entry_totals (
    scope    TEXT NOT NULL,
    target   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    meter    TEXT NOT NULL,
    book     TEXT NOT NULL,
    amount   TEXT NOT NULL,
    quantity TEXT NOT NULL,
    PRIMARY KEY (scope, target, kind, meter, book)
) STRICT, WITHOUT ROWID;
DROP INDEX entries_meter;
CREATE INDEX entries_meter ON entries (scope, target, meter, book) WHERE meter <> '';

INSERT INTO entries (scope, target, key, kind, at, amount, meter, quantity, book, note, actor, owner, project, upto, cancels, made_at)
    SELECT scope, target, 'cancel ' || number, kind, at, -amount, meter, -quantity, book, 'a mistake', 'uid:0', owner, project, 0, number, 1790000003000
    FROM entries ORDER BY number DESC LIMIT 1;

-- Who had a name first keeps it where no caller says whose is meant.
CREATE INDEX ledger_name ON ledger (name, created_at) WHERE name <> '';

-- What idempotency keys have started in a sandbox, as its last PID 1 said when
-- it was stopped: for the next one, which alone reads it.
CREATE TABLE command_keys (
    sandbox TEXT NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    keys    BLOB NOT NULL
) STRICT;

INSERT INTO command_keys VALUES ('sbaaaaaaaaaaaa', x'6b657973');

-- Who a host name by name leads to. An owner keeps a name until its last
-- sandbox of that name ended 30 days ago (2592000 s, in nanoseconds here);
-- the next sandbox of the name takes it then.
CREATE TABLE host_names (
    name    TEXT    NOT NULL PRIMARY KEY,
    owner   TEXT    NOT NULL,
    used_at INTEGER NOT NULL -- when its last sandbox was created or ended
) STRICT, WITHOUT ROWID;
CREATE INDEX host_names_owner ON host_names (owner);

-- What ended before begins its 30 days now.
INSERT INTO host_names SELECT name, owner, unixepoch() * 1000000000 FROM (
    SELECT name, owner, created_at FROM ledger WHERE name <> ''
    UNION ALL SELECT name, owner, created_at / 1000000 FROM sandboxes WHERE name <> ''
    ORDER BY created_at) WHERE true ON CONFLICT (name) DO NOTHING;
DROP INDEX ledger_name;

CREATE TRIGGER host_names_taken AFTER INSERT ON sandboxes WHEN NEW.name <> ''
BEGIN
    INSERT INTO host_names VALUES (NEW.name, NEW.owner, NEW.created_at)
    ON CONFLICT (name) DO UPDATE SET owner = excluded.owner, used_at = excluded.used_at
    WHERE owner = excluded.owner OR used_at <= excluded.used_at - 2592000000000000
        AND NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.name = host_names.name AND s.owner = host_names.owner
            AND s.status NOT IN ('completed', 'failed'));
END;

CREATE TRIGGER host_names_used AFTER UPDATE OF status ON sandboxes
WHEN NEW.name <> '' AND NEW.status IN ('completed', 'failed') AND OLD.status NOT IN ('completed', 'failed')
BEGIN
    UPDATE host_names SET used_at = coalesce(NEW.ended_at, used_at) WHERE name = NEW.name AND owner = NEW.owner;
END;

-- A name that is given up goes to the oldest living sandbox of that name.
CREATE TRIGGER host_names_free AFTER DELETE ON host_names
BEGIN
    INSERT INTO host_names SELECT name, owner, created_at FROM sandboxes
        WHERE name = OLD.name AND status NOT IN ('completed', 'failed') ORDER BY created_at LIMIT 1;
END;

UPDATE schema_version SET version = 16;
