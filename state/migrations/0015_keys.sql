-- What idempotency keys have started in a sandbox, as its last PID 1 said when
-- it was stopped: for the next one, which alone reads it.
CREATE TABLE command_keys (
    sandbox TEXT NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    keys    BLOB NOT NULL
) STRICT;
