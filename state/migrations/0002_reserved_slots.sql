-- A slot may be reserved for a shell made in advance, of no sandbox yet.
-- Taking it into use turns the reservation into the lease.
ALTER TABLE slots ADD COLUMN reserved INTEGER NOT NULL DEFAULT 0
    CHECK (reserved = 0 OR reserved = 1 AND sandbox IS NULL);
DROP INDEX slots_free;
CREATE INDEX slots_free ON slots (freed, slot) WHERE sandbox IS NULL AND reserved = 0;
