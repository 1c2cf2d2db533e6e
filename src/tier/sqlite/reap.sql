DELETE FROM idempotency_keys WHERE rowid IN (
    SELECT rowid FROM idempotency_keys WHERE expires <= ?1 ORDER BY expires LIMIT ?2
)
