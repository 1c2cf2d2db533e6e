-- An open claim of the token (?4, ?5) becomes nobody's, as if its owner had died.
UPDATE idempotency_keys SET state = 0, settled = NULL, owner = 0
WHERE account = ?1 AND endpoint = ?2 AND key = ?3
    AND owner = ?4 AND number = ?5 AND state IN (0, 1) AND expires > ?6
