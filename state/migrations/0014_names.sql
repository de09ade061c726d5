-- Who had a name first keeps it where no caller says whose is meant.
CREATE INDEX ledger_name ON ledger (name, created_at) WHERE name <> '';
