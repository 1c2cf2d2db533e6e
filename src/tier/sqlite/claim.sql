-- A new claim, where nothing is there or what is there ends by ?11.
INSERT INTO idempotency_keys (
    account, endpoint, key, fingerprint, state, created, due, expires, owner, number, checkpoint
) VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6, ?7, ?8, ?9, ?10)
ON CONFLICT (account, endpoint, key) DO UPDATE SET
    fingerprint = excluded.fingerprint,
    state = excluded.state,
    status = NULL,
    headers = NULL,
    body = NULL,
    checksum = NULL,
    created = excluded.created,
    settled = NULL,
    due = excluded.due,
    expires = excluded.expires,
    owner = excluded.owner,
    number = excluded.number,
    checkpoint = excluded.checkpoint
WHERE idempotency_keys.expires <= ?11
