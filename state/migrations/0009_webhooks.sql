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

INSERT INTO webhooks (id, owner, project, cursor, created_at, secret, record)
SELECT 'wh' || substr(lower(hex(randomblob(6))), 1, 12), '', p.id,
    coalesce((SELECT max(e.seq) FROM events e WHERE e.time < (
            SELECT min(unixepoch(json_extract(n.record, '$.at'))) * 1000000000 FROM notices n WHERE n.project = p.id)),
        (SELECT max(seq) FROM events), 0),
    p.created_at, coalesce(json_extract(w.value, '$.secret'), ''),
    json_object('id', '', 'url', json_extract(w.value, '$.url'), 'project', p.id,
        'filter', json(CASE WHEN json_extract(w.value, '$.events') IS NULL THEN '{}' ELSE json_object('events', json(json_extract(w.value, '$.events'))) END),
        'created_at', json_extract(p.record, '$.created_at'))
FROM projects p, json_each(p.record, '$.webhooks') w;
DROP TABLE notices;
