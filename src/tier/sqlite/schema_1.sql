-- All times are milliseconds of the tier's clock (R23), all identities bytes (R1).
CREATE TABLE idempotency_keys (
    account     BLOB    NOT NULL,
    endpoint    BLOB    NOT NULL,
    key         BLOB    NOT NULL,
    fingerprint BLOB    NOT NULL, -- its scheme, 8 bytes, then its digest, 32 bytes
    state       INTEGER NOT NULL, -- 0 in flight, 1 held, 2 completed, 3 completed but not kept
    status      INTEGER,          -- the outcome, of a completed record
    headers     BLOB,             -- lengths of name (u16) and value (u32), name, value; and so on
    body        BLOB,
    checksum    BLOB,             -- of the outcome, 8 bytes: SQLite has none of its own
    created     INTEGER NOT NULL, -- the claim
    settled     INTEGER,          -- the completion or the hold
    due         INTEGER NOT NULL, -- the end of max_run
    expires     INTEGER NOT NULL, -- the end of the record
    owner       INTEGER NOT NULL, -- owner and number are the token
    number      INTEGER NOT NULL,
    checkpoint  BLOB,
    UNIQUE (account, endpoint, key)
);

CREATE INDEX idempotency_keys_expires ON idempotency_keys (expires);

-- What was forgotten or resolved, for other processes. Its last row stays, for its number.
CREATE TABLE idempotency_recalls (
    number   INTEGER PRIMARY KEY,
    account  BLOB    NOT NULL,
    endpoint BLOB    NOT NULL,
    key      BLOB    NOT NULL,
    told     INTEGER NOT NULL
);

-- One row: the version of these tables, and a time that has been.
CREATE TABLE idempotency_schema (
    version INTEGER NOT NULL,
    stamp   INTEGER NOT NULL
);

INSERT INTO idempotency_schema (version, stamp) VALUES (1, 0);
