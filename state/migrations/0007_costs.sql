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
