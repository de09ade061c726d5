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

-- What webhooks are still to be told.
CREATE TABLE notices (
    id      INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    project TEXT    NOT NULL,
    next_at INTEGER NOT NULL,
    record  TEXT    NOT NULL
) STRICT;
CREATE INDEX notices_next ON notices (next_at);
