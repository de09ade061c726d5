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
