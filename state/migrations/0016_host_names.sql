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
