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
