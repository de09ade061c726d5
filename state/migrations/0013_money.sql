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
