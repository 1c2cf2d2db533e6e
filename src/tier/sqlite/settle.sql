-- An open claim of the token (?4, ?5) is completed, resolved (which makes ?13 of its owner) or held,
-- which keeps the checkpoint.
UPDATE idempotency_keys SET
    state = ?7,
    status = ?8,
    headers = ?9,
    body = ?10,
    checksum = ?14,
    settled = ?11,
    expires = ?12,
    owner = ?13,
    checkpoint = CASE WHEN ?7 = 1 THEN checkpoint END
WHERE account = ?1 AND endpoint = ?2 AND key = ?3
    AND owner = ?4 AND number = ?5 AND state IN (0, 1) AND expires > ?6
