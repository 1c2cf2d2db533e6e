-- Turns the table of keys of version 1 into 16 partitions by hash of the identity, with what is in
-- it. For operators: `psql -1 -f partition.sql`, with the schema's name in place of `oncekey` if it
-- has another one. Verbs wait meanwhile, for the time it takes to copy the table.
--
-- By hash and not by day, because only so the unique constraint stays one for the whole table.

LOCK TABLE oncekey.idempotency_keys IN ACCESS EXCLUSIVE MODE;
ALTER TABLE oncekey.idempotency_keys RENAME TO idempotency_keys_whole;
CREATE TABLE oncekey.idempotency_keys (LIKE oncekey.idempotency_keys_whole INCLUDING ALL)
    PARTITION BY HASH (account, endpoint, key);
DO $$
DECLARE
    partitions integer := 16;
BEGIN
    FOR n IN 0..partitions - 1 LOOP
        -- The settings of 1.sql: a partitioned table has none of its own.
        EXECUTE format(
            'CREATE TABLE oncekey.idempotency_keys_%1$s PARTITION OF oncekey.idempotency_keys
                FOR VALUES WITH (MODULUS %2$s, REMAINDER %1$s)
                WITH (
                    autovacuum_vacuum_scale_factor = 0.01,
                    autovacuum_vacuum_threshold = 10000,
                    autovacuum_vacuum_insert_scale_factor = 0.05,
                    autovacuum_analyze_scale_factor = 0.05,
                    autovacuum_vacuum_cost_delay = 0,
                    toast.autovacuum_vacuum_scale_factor = 0.01,
                    toast.autovacuum_vacuum_threshold = 10000,
                    toast.autovacuum_vacuum_cost_delay = 0,
                    vacuum_truncate = off
                )',
            n, partitions
        );
    END LOOP;
    -- The pages that stay, about 64 for each part.
    INSERT INTO oncekey.idempotency_keys (
        account, endpoint, key, scheme, fingerprint, owner, number, state, checkpoint,
        created_at, due_at, expires_at
    ) SELECT
        '', '', int4send(n), '', '', 0, 0, 0, decode(repeat('00', 1800), 'hex'),
        '-infinity', '-infinity', '-infinity'
    FROM generate_series(1, partitions * 64 * 4) n;
    DELETE FROM oncekey.idempotency_keys;
END
$$;
INSERT INTO oncekey.idempotency_keys SELECT * FROM oncekey.idempotency_keys_whole;
DROP TABLE oncekey.idempotency_keys_whole;
