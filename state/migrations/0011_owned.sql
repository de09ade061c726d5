-- Names belong to their owners: two may have the same, and neither finds out.
DROP INDEX sandboxes_living_name;
CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes (owner, name)
    WHERE name <> '' AND status NOT IN ('completed', 'failed');
CREATE INDEX sandboxes_owner ON sandboxes (owner, created_at, id);
CREATE INDEX sandboxes_owner_living ON sandboxes (owner, created_at, id)
    WHERE status NOT IN ('completed', 'failed');

ALTER TABLE snapshots ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE snapshots SET owner = coalesce(record ->> '$.owner', '');
DROP INDEX snapshots_name;
CREATE UNIQUE INDEX snapshots_name ON snapshots (owner, name) WHERE name <> '';
CREATE INDEX snapshots_called ON snapshots (name) WHERE name <> '';
CREATE INDEX snapshots_owner ON snapshots (owner, created_at);

ALTER TABLE projects ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE projects SET owner = coalesce(record ->> '$.owner', '');
DROP INDEX projects_name;
CREATE UNIQUE INDEX projects_name ON projects (owner, name) WHERE status <> 'killed';

-- Whose sandbox or project it is about; of others who caused it.
ALTER TABLE events ADD COLUMN owner TEXT NOT NULL DEFAULT '';
UPDATE events SET owner = CASE sandbox WHEN '' THEN actor ELSE coalesce((SELECT owner FROM sandboxes WHERE id = events.sandbox), '') END;
CREATE INDEX events_owner ON events (owner, seq) WHERE owner <> '';
