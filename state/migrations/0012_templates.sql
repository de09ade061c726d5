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
