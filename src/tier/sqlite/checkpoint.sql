UPDATE idempotency_keys SET checkpoint = ?7
WHERE account = ?1 AND endpoint = ?2 AND key = ?3
    AND owner = ?4 AND number = ?5 AND state IN (0, 1) AND expires > ?6
