-- Values the gate adds to requests. record is what may be told; value is not.
CREATE TABLE secrets (
    name   TEXT NOT NULL PRIMARY KEY,
    record TEXT NOT NULL,
    value  BLOB NOT NULL
) STRICT;
