SELECT
    fingerprint, state, status, headers, body, checksum, created, settled, due, expires, owner,
    number, checkpoint
FROM idempotency_keys
WHERE account = ?1 AND endpoint = ?2 AND key = ?3
