-- Version 1 of what the Postgres tier keeps: four tables, and a function for each verb of `Tier`.
--
-- `connect` runs it in one transaction, once for each database and schema, which it makes if it is
-- not there. The schema's name stands as `oncekey` here and is replaced if another one is set.
-- Whoever wants no program to change tables runs this file with psql -1 before the first start.
--
-- Ground rules:
--  1. A verb is one call of one function, so one statement and one round trip, and it needs no
--     session: it works through a pooler that hands connections on after each transaction.
--     The functions of a claim and of a completion do what is the rule and hand the rest on: each
--     expression and variable costs, because every transaction prepares it anew.
--  2. Time is clock_timestamp(), read when the rows are locked that it is compared for: not when
--     the transaction began, and not before a wait. A function that is a transaction of its own
--     may take now(), which costs less, if it looks afterwards whether it has waited.
--  3. A function that writes locks the record first, then reads it; who comes second waits, and
--     for no longer than `lock_ms`. Record first, then owner: nobody waits in a circle.
--  4. A heartbeat writes one row of idempotency_owners and waits for no record (T10).
--  5. The tables are as small or as large as what they hold, from one minute to the next: a plan
--     that was made while they were empty must still be right. So the tables begin with pages that
--     hold nothing and that vacuum does not give back, which makes reading a whole table the dearer
--     plan; where one was written anew without them (VACUUM FULL), plans that read whole tables are
--     off in all functions but the first steps of a claim and of a completion. And a condition on
--     `expires_at` beside an identity says `IS TRUE`, so that no plan takes its index for it.
--  6. A verb with a token answers NULL for what it was asked to do: it has won, or it is done. Else
--     with one idempotency_answer in bytes: twelve columns would cost a tenth of the verb.
--  7. A function is never changed in a later version, because processes of both versions run
--     during a deploy: a new one gets a new name.

CREATE TABLE oncekey.idempotency_schema (
    version integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row for each start of a process. All its claims live as long as it beats.
CREATE TABLE oncekey.idempotency_owners (
    owner bigint PRIMARY KEY,
    alive_until timestamptz NOT NULL
) WITH (
    -- A heartbeat changes no index: it stays within its page, if that has room.
    fillfactor = 50,
    autovacuum_vacuum_threshold = 1000,
    vacuum_truncate = off
);

-- Bytes, compared as bytes: no collation, no case, no padding, NUL bytes too (R1).
CREATE TABLE oncekey.idempotency_keys (
    account bytea NOT NULL,
    endpoint bytea NOT NULL,
    key bytea NOT NULL,
    -- Which fingerprint it is, 8 bytes, and the SHA-256.
    scheme bytea NOT NULL,
    fingerprint bytea NOT NULL,
    -- The token: the process that claimed, and the number it gave to the claim. Unsigned numbers
    -- of 64 bits, so half of them look negative.
    owner bigint NOT NULL,
    number bigint NOT NULL,
    -- 0 in flight, 1 held, 2 completed, 3 completed, but the answer was not kept.
    state smallint NOT NULL CHECK (state BETWEEN 0 AND 3),
    status integer,
    -- Header lines in order, each: length of the name, 2 bytes; of the value, 4 bytes; both.
    headers bytea,
    body bytea,
    -- What the owner left for the next one.
    checkpoint bytea,
    -- What a notification is to say when this record is settled; null if nobody waits for it.
    waited bytea,
    created_at timestamptz NOT NULL,
    -- When `max_run` is over.
    due_at timestamptz NOT NULL,
    settled_at timestamptz,
    -- No record is without an end (T3).
    expires_at timestamptz NOT NULL,
    UNIQUE (account, endpoint, key),
    CHECK ((state = 2) = (status IS NOT NULL AND headers IS NOT NULL AND body IS NOT NULL)),
    CHECK ((state = 0) = (settled_at IS NULL))
) WITH (
    -- Each key is inserted, updated and deleted once: two dead rows each. Vacuum comes after
    -- 1 % of them or 10,000, not after a fifth of the table, and does not pause.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.01,
    toast.autovacuum_vacuum_threshold = 10000,
    toast.autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

CREATE INDEX idempotency_keys_expires_at ON oncekey.idempotency_keys (expires_at);

-- What was forgotten or resolved, for other processes to take out of their memory (T9).
CREATE TABLE oncekey.idempotency_recalls (
    -- The transaction that wrote it. Numbers of a sequence become visible out of order.
    transaction bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    account bytea NOT NULL,
    endpoint bytea NOT NULL,
    key bytea NOT NULL
);

CREATE INDEX idempotency_recalls_at ON oncekey.idempotency_recalls (at);

CREATE TYPE oncekey.idempotency_answer AS (
    -- What the verb did, in a word.
    answer text,
    -- What is there.
    scheme bytea,
    fingerprint bytea,
    owner bigint,
    number bigint,
    -- As in idempotency_keys, but 0 only while the owner lives, 4 when it has lapsed.
    state smallint,
    status integer,
    headers bytea,
    body bytea,
    checkpoint bytea,
    -- Microseconds.
    age bigint,
    remaining bigint
);

-- What is there now: one row, or none. Waits for nobody.
CREATE FUNCTION oncekey.idempotency_look_up(a bytea, e bytea, k bytea)
RETURNS SETOF oncekey.idempotency_answer LANGUAGE sql STABLE AS $$
    SELECT
        'met',
        r.scheme, r.fingerprint, r.owner, r.number,
        s.state, r.status, r.headers, r.body, r.checkpoint,
        (greatest(extract(epoch FROM t.now - coalesce(r.settled_at, r.created_at)), 0)
            * 1000000)::bigint,
        (greatest(extract(epoch FROM s.until - t.now), 0) * 1000000)::bigint
    FROM (SELECT clock_timestamp() AS now) t
    JOIN oncekey.idempotency_keys r
        ON r.account = a AND r.endpoint = e AND r.key = k AND (r.expires_at > t.now) IS TRUE
    LEFT JOIN oncekey.idempotency_owners o ON o.owner = r.owner
    CROSS JOIN LATERAL (
        SELECT
            CASE
                WHEN r.state <> 0 THEN r.state
                WHEN o.alive_until IS NULL OR o.alive_until <= t.now THEN 4::smallint
                WHEN r.due_at <= t.now THEN 1::smallint
                ELSE 0::smallint
            END AS state,
            CASE
                WHEN r.state = 0 AND o.alive_until > t.now AND r.due_at > t.now
                THEN least(r.due_at, o.alive_until)
                ELSE r.expires_at
            END AS until
    ) s
$$;

-- A claim, as a transaction of its own. As a rule nothing is there: NULL, it has won. It waits for
-- whoever has the record in hands, but only for a moment, and for no longer than `lock_ms`: then it is
-- an error, and idempotency_met looks without waiting.
CREATE FUNCTION oncekey.idempotency_claim(
    a bytea, e bytea, k bytea,
    by_owner bigint, by_number bigint,
    with_scheme bytea, with_fingerprint bytea,
    max_run_ms bigint, retention_ms bigint, lock_ms bigint,
    OUT answer bytea
) LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO oncekey.idempotency_keys (
        account, endpoint, key, scheme, fingerprint, owner, number, state,
        created_at, due_at, expires_at
    ) SELECT
        a, e, k, with_scheme, with_fingerprint, by_owner, by_number, 0,
        now(), now() + max_run_ms * interval '1 ms',
        now() + (max_run_ms + retention_ms) * interval '1 ms'
    FROM oncekey.idempotency_owners o
    WHERE o.owner = by_owner AND o.alive_until > now()
        AND set_config('lock_timeout', least(lock_ms, 50)::text, true) IS NOT NULL
    ON CONFLICT (account, endpoint, key) DO NOTHING;
    IF NOT FOUND THEN
        answer := oncekey.idempotency_met(
            a, e, k, by_owner, by_number, with_scheme, with_fingerprint, max_run_ms, retention_ms,
            lock_ms
        );
    END IF;
END
$$;

-- A claim that looks before it waits: NULL or 'won', 'met' with what is there, or 'owner lapsed'. It
-- never answers nothing: if the winner of a lost insert has vanished, it inserts again (T4).
CREATE FUNCTION oncekey.idempotency_met(
    a bytea, e bytea, k bytea,
    by_owner bigint, by_number bigint,
    with_scheme bytea, with_fingerprint bytea,
    max_run_ms bigint, retention_ms bigint, lock_ms bigint
) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
    met oncekey.idempotency_answer;
    as_asked bytea;
    started timestamptz;
    due timestamptz;
BEGIN
    PERFORM set_config('lock_timeout', lock_ms::text, true),
        set_config('enable_seqscan', 'off', true);
    FOR round IN 1..100 LOOP
        SELECT * INTO met FROM oncekey.idempotency_look_up(a, e, k);
        IF met.answer IS NOT NULL THEN
            -- Its own claim, whose answer was lost, unless somebody has settled it.
            IF met.owner = by_owner AND met.number = by_number AND EXISTS (
                SELECT FROM oncekey.idempotency_keys r
                WHERE r.account = a AND r.endpoint = e AND r.key = k
                    AND r.owner = by_owner AND r.number = by_number AND r.state = 0
            ) THEN
                met.answer := 'won';
            END IF;
            RETURN record_send(met);
        END IF;
        started := clock_timestamp();
        IF NOT EXISTS (
            SELECT FROM oncekey.idempotency_owners o
            WHERE o.owner = by_owner AND o.alive_until > started
        ) THEN
            met.answer := 'owner lapsed';
            RETURN record_send(met);
        END IF;
        due := started + max_run_ms * interval '1 ms';
        -- Waits for whoever has inserted, renewed or deleted this record and not committed yet.
        INSERT INTO oncekey.idempotency_keys AS r (
            account, endpoint, key, scheme, fingerprint, owner, number, state,
            created_at, due_at, expires_at
        ) VALUES (
            a, e, k, with_scheme, with_fingerprint, by_owner, by_number, 0,
            started, due, due + retention_ms * interval '1 ms'
        ) ON CONFLICT (account, endpoint, key) DO UPDATE SET
            scheme = excluded.scheme, fingerprint = excluded.fingerprint,
            owner = excluded.owner, number = excluded.number, state = 0,
            status = NULL, headers = NULL, body = NULL, checkpoint = NULL, waited = NULL,
            created_at = excluded.created_at, due_at = excluded.due_at, settled_at = NULL,
            expires_at = excluded.expires_at
        WHERE r.expires_at <= clock_timestamp();
        IF FOUND THEN
            RETURN as_asked;
        END IF;
    END LOOP;
    -- Somebody else was faster each time, or hides the record, as a row-level policy does.
    RAISE EXCEPTION 'the record was neither seen nor inserted in 100 rounds'
        USING ERRCODE = 'serialization_failure';
END
$$;

-- As idempotency_met, in a transaction of the caller's own, which stays usable: 'locked' if
-- another transaction has the record in its hands for longer than `lock_ms`.
CREATE FUNCTION oncekey.idempotency_claim_in(
    a bytea, e bytea, k bytea,
    by_owner bigint, by_number bigint,
    with_scheme bytea, with_fingerprint bytea,
    max_run_ms bigint, retention_ms bigint, lock_ms bigint
) RETURNS bytea LANGUAGE plpgsql
SET lock_timeout = 0 SET enable_seqscan = off SET jit = off AS $$
DECLARE
    met oncekey.idempotency_answer;
BEGIN
    RETURN oncekey.idempotency_met(
        a, e, k, by_owner, by_number, with_scheme, with_fingerprint, max_run_ms, retention_ms,
        lock_ms
    );
EXCEPTION WHEN lock_not_available THEN
    met.answer := 'locked';
    RETURN record_send(met);
END
$$;

-- 'won', with what the owner before has left; else as idempotency_met.
CREATE FUNCTION oncekey.idempotency_take_over(
    a bytea, e bytea, k bytea,
    seen_owner bigint, seen_number bigint,
    by_owner bigint, by_number bigint,
    with_scheme bytea, with_fingerprint bytea,
    max_run_ms bigint, retention_ms bigint, lock_ms bigint
) RETURNS bytea LANGUAGE plpgsql
SET lock_timeout = 0 SET enable_seqscan = off SET jit = off AS $$
DECLARE
    met oncekey.idempotency_answer;
    seen record;
    alive timestamptz;
    started timestamptz;
    due timestamptz;
BEGIN
    PERFORM set_config('lock_timeout', lock_ms::text, true);
    IF NOT EXISTS (
        SELECT FROM oncekey.idempotency_owners o
        WHERE o.owner = by_owner AND o.alive_until > clock_timestamp()
    ) THEN
        met.answer := 'owner lapsed';
        RETURN record_send(met);
    END IF;
    SELECT r.state, r.due_at, r.expires_at, r.checkpoint INTO seen
    FROM oncekey.idempotency_keys r
    WHERE r.account = a AND r.endpoint = e AND r.key = k
        AND r.owner = seen_owner AND r.number = seen_number AND r.state IN (0, 1)
    FOR UPDATE;
    IF FOUND THEN
        -- Shared, so that no late heartbeat revives it between here and the commit.
        SELECT o.alive_until INTO alive FROM oncekey.idempotency_owners o
        WHERE o.owner = seen_owner FOR SHARE;
        started := clock_timestamp();
        IF seen.expires_at > started AND (
            seen.state = 1 OR alive IS NULL OR alive <= started OR seen.due_at <= started
        ) THEN
            due := started + max_run_ms * interval '1 ms';
            UPDATE oncekey.idempotency_keys r SET
                scheme = with_scheme, fingerprint = with_fingerprint,
                owner = by_owner, number = by_number, state = 0,
                created_at = started, due_at = due, settled_at = NULL,
                expires_at = due + retention_ms * interval '1 ms'
            WHERE r.account = a AND r.endpoint = e AND r.key = k;
            met.answer := 'won';
            met.checkpoint := seen.checkpoint;
            RETURN record_send(met);
        END IF;
    END IF;
    RETURN oncekey.idempotency_met(
        a, e, k, by_owner, by_number, with_scheme, with_fingerprint, max_run_ms, retention_ms,
        lock_ms
    );
END
$$;

-- A completion, as a transaction of its own, with a null status: not kept. As a rule the record is
-- there, it is free, and nobody waits for it: NULL, it is done. Else as idempotency_act.
CREATE FUNCTION oncekey.idempotency_complete(
    a bytea, e bytea, k bytea,
    by_owner bigint, by_number bigint,
    with_status bigint, with_headers bytea, with_body bytea,
    retention_ms bigint, lock_ms bigint,
    OUT answer bytea
) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE oncekey.idempotency_keys r SET
        state = CASE WHEN with_status IS NULL THEN 3 ELSE 2 END,
        status = with_status, headers = with_headers, body = with_body,
        checkpoint = NULL,
        settled_at = now(), expires_at = now() + retention_ms * interval '1 ms'
    WHERE r.account = a AND r.endpoint = e AND r.key = k
        AND r.owner = by_owner AND r.number = by_number
        AND r.state < 2 AND (r.expires_at > now()) IS TRUE AND r.waited IS NULL
        AND set_config('lock_timeout', lock_ms::text, true) IS NOT NULL;
    IF FOUND AND clock_timestamp() < now() + interval '50 ms' THEN
        RETURN;
    ELSIF FOUND THEN
        -- It has waited for a transaction that had the record: its time counts from here.
        UPDATE oncekey.idempotency_keys r SET
            settled_at = clock_timestamp(),
            expires_at = clock_timestamp() + retention_ms * interval '1 ms'
        WHERE r.account = a AND r.endpoint = e AND r.key = k;
    ELSE
        answer := oncekey.idempotency_act(
            'complete', a, e, k, by_owner, by_number, with_status, with_headers, with_body,
            retention_ms, lock_ms
        );
    END IF;
END
$$;

-- What a token may do: 'complete' (with a null status: not kept), 'release', 'hold', 'lapse',
-- 'checkpoint' (the bytes are `with_body`). NULL, or 'lost' with what is there.
CREATE FUNCTION oncekey.idempotency_act(
    verb text,
    a bytea, e bytea, k bytea,
    by_owner bigint, by_number bigint,
    with_status bigint, with_headers bytea, with_body bytea,
    retention_ms bigint, lock_ms bigint
) RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
    met oncekey.idempotency_answer;
    as_asked bytea;
    started timestamptz;
    found_state smallint;
    found_end timestamptz;
    found_waited bytea;
BEGIN
    PERFORM set_config('lock_timeout', lock_ms::text, true),
        set_config('enable_seqscan', 'off', true);
    SELECT r.state, r.expires_at, r.waited INTO found_state, found_end, found_waited
    FROM oncekey.idempotency_keys r
    WHERE r.account = a AND r.endpoint = e AND r.key = k
        AND r.owner = by_owner AND r.number = by_number
    FOR UPDATE;
    started := clock_timestamp();
    IF found_end > started AND found_state IN (0, 1) THEN
        IF verb IN ('complete', 'complete in') THEN
            UPDATE oncekey.idempotency_keys r SET
                state = CASE WHEN with_status IS NULL THEN 3 ELSE 2 END,
                status = with_status, headers = with_headers, body = with_body,
                checkpoint = NULL, waited = NULL,
                settled_at = started, expires_at = started + retention_ms * interval '1 ms'
            WHERE r.account = a AND r.endpoint = e AND r.key = k;
        ELSIF verb = 'release' THEN
            DELETE FROM oncekey.idempotency_keys r
            WHERE r.account = a AND r.endpoint = e AND r.key = k;
        ELSIF verb = 'hold' THEN
            UPDATE oncekey.idempotency_keys r SET
                state = 1, waited = NULL,
                settled_at = started, expires_at = started + retention_ms * interval '1 ms'
            WHERE r.account = a AND r.endpoint = e AND r.key = k;
        ELSIF verb = 'lapse' THEN
            -- Nobody's: owner 0 never beats.
            UPDATE oncekey.idempotency_keys r SET
                state = 0, owner = 0, waited = NULL, settled_at = NULL
            WHERE r.account = a AND r.endpoint = e AND r.key = k;
        ELSIF verb = 'checkpoint' THEN
            UPDATE oncekey.idempotency_keys r SET checkpoint = with_body
            WHERE r.account = a AND r.endpoint = e AND r.key = k;
            found_waited := NULL;
        ELSE
            RAISE EXCEPTION 'no such verb: %', verb;
        END IF;
        IF found_waited IS NOT NULL THEN
            PERFORM pg_notify('oncekey.settled', encode(found_waited, 'hex'));
        END IF;
        RETURN as_asked;
    END IF;
    -- A completion whose answer was lost. Not one in another transaction of the caller's: what that
    -- one holds beside it would be there twice.
    IF verb = 'complete' AND found_end > started AND found_state IN (2, 3) THEN
        RETURN as_asked;
    END IF;
    SELECT * INTO met FROM oncekey.idempotency_look_up(a, e, k);
    met.answer := 'lost';
    RETURN record_send(met);
END
$$;

-- As idempotency_act, in a transaction of the caller's own.
CREATE FUNCTION oncekey.idempotency_act_in(
    verb text,
    a bytea, e bytea, k bytea,
    by_owner bigint, by_number bigint,
    with_status bigint, with_headers bytea, with_body bytea,
    retention_ms bigint, lock_ms bigint
) RETURNS bytea LANGUAGE plpgsql
SET lock_timeout = 0 SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN oncekey.idempotency_act(
        CASE verb WHEN 'complete' THEN 'complete in' ELSE verb END, a, e, k, by_owner, by_number,
        with_status, with_headers, with_body, retention_ms, lock_ms
    );
END
$$;

-- What an operator may do: 'forget', 'force' (to forget, whatever runs) or 'resolve' (with a null
-- status: by giving it up). 'done', or 'absent', 'in flight', 'completed': nothing changed.
CREATE FUNCTION oncekey.idempotency_operate(
    verb text,
    a bytea, e bytea, k bytea,
    with_status bigint, with_headers bytea, with_body bytea,
    retention_ms bigint, lock_ms bigint
) RETURNS text LANGUAGE plpgsql
SET lock_timeout = 0 SET enable_seqscan = off SET jit = off AS $$
DECLARE
    met oncekey.idempotency_answer;
    found_waited bytea;
    started timestamptz;
BEGIN
    PERFORM set_config('lock_timeout', lock_ms::text, true);
    SELECT r.waited INTO found_waited FROM oncekey.idempotency_keys r
    WHERE r.account = a AND r.endpoint = e AND r.key = k
    FOR UPDATE;
    -- Locked, so the record stays what it is; its owner may beat again meanwhile.
    PERFORM FROM oncekey.idempotency_keys r
    JOIN oncekey.idempotency_owners o ON o.owner = r.owner
    WHERE r.account = a AND r.endpoint = e AND r.key = k FOR SHARE OF o;
    SELECT * INTO met FROM oncekey.idempotency_look_up(a, e, k);
    IF met.answer IS NULL THEN
        RETURN 'absent';
    ELSIF met.state = 0 AND verb <> 'force' THEN
        RETURN 'in flight';
    ELSIF met.state IN (2, 3) AND verb = 'resolve' THEN
        RETURN 'completed';
    END IF;
    IF verb = 'resolve' AND with_status IS NOT NULL THEN
        started := clock_timestamp();
        -- Owner 0 is nobody: the former owner's token is stale.
        UPDATE oncekey.idempotency_keys r SET
            owner = 0, state = 2, status = with_status, headers = with_headers, body = with_body,
            checkpoint = NULL, waited = NULL,
            settled_at = started, expires_at = started + retention_ms * interval '1 ms'
        WHERE r.account = a AND r.endpoint = e AND r.key = k;
    ELSE
        DELETE FROM oncekey.idempotency_keys r
        WHERE r.account = a AND r.endpoint = e AND r.key = k;
    END IF;
    INSERT INTO oncekey.idempotency_recalls (account, endpoint, key) VALUES (a, e, k);
    IF found_waited IS NOT NULL THEN
        PERFORM pg_notify('oncekey.settled', encode(found_waited, 'hex'));
    END IF;
    RETURN 'done';
END
$$;

CREATE FUNCTION oncekey.idempotency_beat(by_owner bigint, lease_ms bigint)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO oncekey.idempotency_owners AS o (owner, alive_until)
    VALUES (by_owner, clock_timestamp() + lease_ms * interval '1 ms')
    ON CONFLICT (owner) DO UPDATE SET alive_until = excluded.alive_until
$$;

-- How many records it has deleted. It steps over what somebody has in hands.
CREATE FUNCTION oncekey.idempotency_reap(most bigint)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off AS $$
DECLARE
    -- A variable, because no index is read for a function that gives another answer each time.
    ended timestamptz := clock_timestamp();
    reaped bigint;
BEGIN
    WITH gone AS (
        SELECT r.account, r.endpoint, r.key FROM oncekey.idempotency_keys r
        WHERE r.expires_at <= ended
        ORDER BY r.expires_at LIMIT most
        FOR UPDATE SKIP LOCKED
    )
    DELETE FROM oncekey.idempotency_keys r USING gone
    WHERE r.account = gone.account AND r.endpoint = gone.endpoint AND r.key = gone.key
        AND r.expires_at <= ended;
    GET DIAGNOSTICS reaped = ROW_COUNT;
    -- An owner that comes back within a day finds its row.
    DELETE FROM oncekey.idempotency_owners o WHERE o.owner IN (
        SELECT d.owner FROM oncekey.idempotency_owners d
        WHERE d.alive_until < ended - interval '1 day' LIMIT most
        FOR UPDATE SKIP LOCKED
    );
    DELETE FROM oncekey.idempotency_recalls c WHERE c.at < ended - interval '5 minutes';
    RETURN reaped;
END
$$;

-- The present point, and what was recalled since the point before, if one is given. The point is
-- the oldest transaction that still runs: whatever is not seen yet carries its number or a higher
-- one. A point from the future is one of another life of this database: all is told then.
CREATE FUNCTION oncekey.idempotency_recalled(since bigint)
RETURNS TABLE (point bigint, account bytea, endpoint bytea, key bytea) LANGUAGE sql STABLE AS $$
    SELECT pg_snapshot_xmin(t.seen)::text::bigint, c.account, c.endpoint, c.key
    FROM (SELECT pg_current_snapshot() AS seen) t
    LEFT JOIN oncekey.idempotency_recalls c
        ON c.transaction >= since OR since > pg_snapshot_xmax(t.seen)::text::bigint
$$;

-- Asks for a notification that says `name` when the record is settled. False: there is nothing to
-- wait for. It waits for nobody: if somebody has the record in hands, there will be none.
CREATE FUNCTION oncekey.idempotency_watch(a bytea, e bytea, k bytea, name bytea)
RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM FROM oncekey.idempotency_keys r
    WHERE r.account = a AND r.endpoint = e AND r.key = k AND r.waited = name;
    IF FOUND THEN
        RETURN true;
    END IF;
    -- To lose this in a crash costs a poll. It ends with the transaction, which is this statement.
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE oncekey.idempotency_keys r SET waited = name
    FROM (
        SELECT w.account, w.endpoint, w.key FROM oncekey.idempotency_keys w
        WHERE w.account = a AND w.endpoint = e AND w.key = k
            AND w.state IN (0, 1) AND (w.expires_at > clock_timestamp()) IS TRUE
        FOR UPDATE SKIP LOCKED
    ) free
    WHERE r.account = free.account AND r.endpoint = free.endpoint AND r.key = free.key;
    RETURN FOUND OR EXISTS (
        SELECT FROM oncekey.idempotency_keys r
        WHERE r.account = a AND r.endpoint = e AND r.key = k
            AND r.state IN (0, 1) AND (r.expires_at > clock_timestamp()) IS TRUE
    );
END
$$;

-- 64 pages that stay (rule 5), half a megabyte each.
INSERT INTO oncekey.idempotency_owners SELECT n, '-infinity' FROM generate_series(1, 64 * 80) n;
DELETE FROM oncekey.idempotency_owners;
INSERT INTO oncekey.idempotency_keys (
    account, endpoint, key, scheme, fingerprint, owner, number, state, checkpoint,
    created_at, due_at, expires_at
) SELECT
    '', '', int4send(n), '', '', 0, 0, 0, decode(repeat('00', 1800), 'hex'),
    '-infinity', '-infinity', '-infinity'
FROM generate_series(1, 64 * 4) n;
DELETE FROM oncekey.idempotency_keys;

INSERT INTO oncekey.idempotency_schema (version) VALUES (1);
