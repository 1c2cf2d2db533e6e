//! The Postgres tier against a private server, and through a private PgBouncer.
#![cfg(all(feature = "postgres", feature = "conformance"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/postgres.rs"]
mod postgres;

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use common::{DAY, HOUR, LEASE, LONG, MS, SECOND, fp, id, outcome, watchdog};
use oncekey::{
    Identity, Outcome, Token,
    tier::{
        Claimed, Durability, Forgotten, Found, Landed, NewClaim, PostgresBuilder, PostgresTier,
        Resolved, State, Tier, TierError,
        conformance::{Host, check},
    },
};
use postgres::{Pooler, Relay, Server, shared};
use sqlx::{
    AssertSqlSafe, PgPool, Row as _,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};

/// The settings of a tier in a schema of its own, on a server that syncs nothing.
fn tier_in(schema: &str) -> PostgresBuilder {
    PostgresTier::builder().schema(schema).durability(Durability::KilledProcess)
}

async fn tier(schema: &str) -> Option<(PostgresTier, PgPool)> {
    let pool = shared()?.pool().await;
    Some((tier_in(schema).connect(pool.clone()).await.unwrap(), pool))
}

/// Runs statements.
async fn sql(pool: &PgPool, statements: impl Into<String>) {
    sqlx::raw_sql(AssertSqlSafe(statements.into())).execute(pool).await.unwrap();
}

/// The number that a query answers.
async fn count(pool: &PgPool, query: impl Into<String>) -> i64 {
    let row = sqlx::raw_sql(AssertSqlSafe(query.into())).fetch_one(pool).await.unwrap();
    row.try_get(0).unwrap()
}

/// Shifts all stamps back, because the clock of a server cannot be moved.
async fn advance(pool: &PgPool, schema: &str, by: Duration) {
    let by = format!("interval '{} us'", by.as_micros());
    sql(
        pool,
        format!(
            "UPDATE {schema}.idempotency_keys SET created_at = created_at - {by}, due_at = due_at \
             - {by}, settled_at = settled_at - {by}, expires_at = expires_at - {by}; \
             UPDATE {schema}.idempotency_owners SET alive_until = alive_until - {by}; \
             UPDATE {schema}.idempotency_recalls SET at = at - {by}"
        ),
    )
    .await;
}

/// Where the suite finds the tier.
struct Nodes {
    builder: PostgresBuilder,
    options: PgConnectOptions,
    schema: &'static str,
    pool: PgPool,
}

impl Nodes {
    async fn new(server: &Server, schema: &'static str) -> Self {
        let (options, pool) = (server.options(), server.pool().await);
        Self { builder: tier_in(schema), options, schema, pool }
    }

    async fn must_conform(&self) {
        let failures = check(self).await;
        assert!(failures.is_empty(), "{failures:#?}");
    }
}

impl Host for Nodes {
    fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
        Box::pin(async {
            let pool = postgres::pool(self.options.clone()).await;
            Arc::new(self.builder.clone().connect(pool).await.unwrap()) as Arc<dyn Tier>
        })
    }

    fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(advance(&self.pool, self.schema, by))
    }
}

/// A claim of owner 1 or another.
fn claim(owner: u64, number: u64, body: &str) -> NewClaim {
    let (token, fingerprint) = (Token::new(owner, number), fp(body));
    NewClaim { token, fingerprint, max_run: HOUR, retention: DAY }
}

/// Returns when so many statements wait for a lock in a schema. Under a watchdog only.
async fn until_blocked(pool: &PgPool, schema: &str, many: i64) {
    let query = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE \
         '%{schema}.%'"
    );
    while count(pool, &query).await != many {
        tokio::time::sleep(MS).await;
    }
}

trait MustBe {
    fn won(self) -> Option<Bytes>;
    fn met(self) -> Found;
}

impl MustBe for Result<Claimed, TierError> {
    #[track_caller]
    fn won(self) -> Option<Bytes> {
        match self {
            Ok(Claimed::Won { checkpoint }) => checkpoint,
            other => panic!("not won: {other:?}"),
        }
    }

    #[track_caller]
    fn met(self) -> Found {
        match self {
            Ok(Claimed::Met(found)) => found,
            other => panic!("met nothing: {other:?}"),
        }
    }
}

#[tokio::test]
async fn t8_it_keeps_the_contract() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    Nodes::new(server, "contract").await.must_conform().await;
}

/// Two connections to the server for all nodes, handed on after each transaction, and nothing
/// prepared.
#[tokio::test]
async fn t8_it_keeps_the_contract_through_a_pooler() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let Some(pooler) = Pooler::start(server) else { return };
    let mut nodes = Nodes::new(server, "pooled").await;
    nodes.options = pooler.options().statement_cache_capacity(0);
    nodes.builder = nodes.builder.through_pooler();
    nodes.must_conform().await;
}

#[tokio::test]
async fn t8_it_keeps_the_contract_in_partitions() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("parted").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("before"), claim(1, 1, "a")).await.won();
    let partition = include_str!("../src/tier/postgres/partition.sql");
    sql(&pool, partition.replace("oncekey.", "parted.")).await;
    let parts = "SELECT count(*) FROM pg_inherits WHERE inhparent = \
                 'parted.idempotency_keys'::regclass";
    assert_eq!(count(&pool, parts).await, 16);
    // What was there is there, and connections that knew the old table know the new one.
    assert_eq!(tier.claim(id("before"), claim(1, 2, "a")).await.met().token, Token::new(1, 1));
    Nodes::new(shared().unwrap(), "parted").await.must_conform().await;
}

/// By a user's own transaction, which the commit of another one may make impossible; the verbs
/// themselves are tried again.
#[tokio::test]
async fn t3_serialization_failures_are_tried_again() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let mut nodes = Nodes::new(server, "serial").await;
    nodes.options = nodes.options.options([("default_transaction_isolation", "serializable")]);
    nodes.must_conform().await;
}

#[tokio::test]
async fn t3_each_verb_is_one_statement_and_one_round_trip() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    // One message each way; the parts of a prepared one are sent together, and `S` asks for the
    // answer.
    for form in [("prepared", "BECS"), ("inline", "Q")] {
        let relay = Relay::start(server).await;
        let one = PgPoolOptions::new().max_connections(1).test_before_acquire(false);
        let pool = one.connect_with(relay.options()).await.unwrap();
        let mut builder = tier_in("counted");
        if form.0 == "inline" {
            builder = builder.through_pooler();
        }
        let tier = builder.connect(pool.clone()).await.unwrap();
        // Twice: the first time prepares the statements of the connection.
        for round in 0..2 {
            let key = format!("{}-{round}", form.0);
            let (id, token) = (id(&key), Token::new(1, 1));
            let answer = outcome("done");
            let mut transaction = pool.begin().await.unwrap();
            let business = &mut *transaction;
            macro_rules! counted {
                ($said:expr, $($verb:expr),* $(,)?) => {$(
                    relay.said();
                    let _ = $verb.await.unwrap();
                    let said = $said(relay.said()).await;
                    if round == 1 {
                        assert_eq!(said, form.1, "{}: {}", form.0, stringify!($verb));
                    }
                )*};
            }
            // The pool has one connection, so its transaction comes first.
            sqlx::raw_sql("SELECT counted.idempotency_beat(1, 60000)")
                .execute(&mut *business)
                .await
                .unwrap();
            counted!(
                async |said| said,
                tier.claim_in(business, id, claim(1, 1, "a")),
                tier.claim_in(business, id, claim(1, 2, "a")),
                tier.complete_in(business, id, token, Some(&answer), DAY),
            );
            transaction.rollback().await.unwrap();
            // After the answer, the driver asks a connection once more when it goes back to the pool.
            let without_the_question_after = async |mut said: String| {
                while pool.num_idle() != 1 {
                    tokio::task::yield_now().await;
                }
                said.push_str(&relay.said());
                said.strip_suffix('S').unwrap().to_owned()
            };
            without_the_question_after(String::new()).await;
            counted!(
                without_the_question_after,
                tier.beat(1, LEASE),
                tier.claim(id, claim(1, 1, "a")),
                tier.claim(id, claim(1, 2, "a")),
                tier.look_up(id),
                tier.checkpoint(id, token, Bytes::from_static(b"half")),
                tier.take_over(id, token, claim(1, 3, "a")),
                tier.hold(id, token, DAY),
                tier.take_over(id, token, claim(1, 3, "a")),
                tier.release(id, token),
                tier.complete(id, Token::new(1, 3), Some(&answer), DAY),
                tier.resolve(id, Some(&answer), DAY),
                tier.forget(id, false),
                tier.reap(100),
                tier.recalls(None),
                tier.recalls(Some(0)),
            );
        }
    }
}

/// The race of case 100: a snapshot that is older than the winner of a lost insert.
#[tokio::test]
async fn case_100_a_claim_that_waited_for_an_open_one_sees_what_became_of_it() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case100").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let tier = tier_in("case100").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    for (commits, inside) in [(true, false), (false, false), (true, true), (false, true)] {
        let key = format!("{commits}-{inside}");
        let mut transaction = pool.begin().await.unwrap();
        tier.claim_in(&mut transaction, id(&key), claim(1, 1, "a")).await.won();
        let second = tokio::spawn({
            let (tier, pool, key) = (tier.clone(), pool.clone(), key.clone());
            async move {
                if !inside {
                    return tier.claim(id(&key), claim(1, 2, "b")).await;
                }
                // Where a failure would end the transaction, and nothing can be tried again.
                let mut own = pool.begin().await.unwrap();
                let claimed = tier.claim_in(&mut own, id(&key), claim(1, 2, "b")).await;
                own.commit().await.unwrap();
                claimed
            }
        });
        until_blocked(&pool, "case100", 1).await;
        if commits {
            transaction.commit().await.unwrap();
            let found = second.await.unwrap().met();
            assert_eq!((found.token, found.state), (Token::new(1, 1), State::InFlight));
            assert_eq!(found.fingerprint, fp("a"), "a mismatch can be told");
        } else {
            transaction.rollback().await.unwrap();
            second.await.unwrap().won();
        }
    }
}

/// The winner that all others have lost against vanishes, again and again.
#[tokio::test]
async fn t4_of_many_that_lost_to_one_that_vanished_one_owns() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("vanished").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let tier = tier_in("vanished").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    for round in 0..20 {
        let key = format!("round-{round}");
        let mut transaction = pool.begin().await.unwrap();
        tier.claim_in(&mut transaction, id(&key), claim(1, 1, "a")).await.won();
        let others: Vec<_> = (2..12)
            .map(|number| {
                let (tier, key) = (tier.clone(), key.clone());
                tokio::spawn(async move { tier.claim(id(&key), claim(1, number, "a")).await })
            })
            .collect();
        until_blocked(&pool, "vanished", 10).await;
        transaction.rollback().await.unwrap();
        let mut winners = Vec::new();
        let mut owners = Vec::new();
        for (number, other) in (2..).zip(others) {
            match other.await.unwrap().unwrap() {
                Claimed::Won { .. } => winners.push(Token::new(1, number)),
                Claimed::Met(found) => owners.push(found.token),
            }
        }
        assert_eq!(winners.len(), 1);
        assert!(owners.iter().all(|owner| *owner == winners[0]), "{winners:?} {owners:?}");
    }
}

#[tokio::test]
async fn case_103_a_claim_that_meets_a_key_leaves_the_transaction_usable() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case103").await else { return };
    sql(&pool, "CREATE TABLE case103.ledger (what text NOT NULL)").await;
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("committed"), claim(1, 1, "a")).await.won();
    let mut open = pool.begin().await.unwrap();
    tier.claim_in(&mut open, id("open"), claim(1, 2, "a")).await.won();
    let hasty = tier_in("case103").lock_limit(MS).connect(pool.clone()).await.unwrap();
    for (key, token) in [("committed", Token::new(1, 1)), ("open", Token::new(0, 0))] {
        let mut transaction = pool.begin().await.unwrap();
        let found = hasty.claim_in(&mut transaction, id(key), claim(1, 3, "a")).await.met();
        assert_eq!((found.state, found.token), (State::InFlight, token), "{key}");
        // Nobody alive claims nothing, and leaves it usable too.
        let unborn = hasty.claim_in(&mut transaction, id("new"), claim(9, 1, "a")).await;
        assert!(matches!(unborn, Err(TierError::OwnerLapsed)), "{unborn:?}");
        sqlx::query("INSERT INTO case103.ledger VALUES ('used')")
            .execute(&mut *transaction)
            .await
            .unwrap();
        // The time limits of the transaction are its own again.
        let row = sqlx::raw_sql("SHOW lock_timeout").fetch_one(&mut *transaction).await.unwrap();
        assert_eq!(row.get::<String, _>(0), "0");
        transaction.commit().await.unwrap();
    }
    assert_eq!(count(&pool, "SELECT count(*) FROM case103.ledger").await, 2);
    // And by itself: in flight, by nobody that can be named.
    let found = hasty.claim(id("open"), claim(1, 4, "b")).await.met();
    assert_eq!((found.state, found.token), (State::InFlight, Token::new(0, 0)));
    assert_eq!(found.fingerprint, fp("b"));
    // Claimed, done and completed in one transaction.
    let answer = outcome("all in one");
    let token = Token::new(1, 2);
    let landed = tier.complete_in(&mut open, id("open"), token, Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    open.commit().await.unwrap();
    let found = hasty.claim(id("open"), claim(1, 4, "a")).await.met();
    assert_eq!(found.state, State::Completed(answer));
}

/// The rows of the work and the outcome become visible together or not at all.
#[tokio::test]
async fn t6_the_outcome_shares_the_fate_of_the_transaction() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("fate").await else { return };
    sql(&pool, "CREATE TABLE fate.ledger (what text NOT NULL)").await;
    tier.beat(1, LEASE).await.unwrap();
    let (answer, token) = (outcome("charged"), Token::new(1, 1));
    for commits in [false, true] {
        let id = id("charge");
        if !commits {
            tier.claim(id, claim(1, 1, "a")).await.won();
        }
        let mut transaction = pool.begin().await.unwrap();
        sqlx::query("INSERT INTO fate.ledger VALUES ('7')")
            .execute(&mut *transaction)
            .await
            .unwrap();
        let landed = tier.complete_in(&mut transaction, id, token, Some(&answer), DAY).await;
        assert_eq!(landed.unwrap(), Landed::Done);
        // Nobody who only looks waits for it, nor a claim.
        let found = tier.look_up(id).await.unwrap().unwrap();
        assert_eq!(found.state, State::InFlight);
        let found = tier.claim(id, claim(1, 2, "b")).await.met();
        assert_eq!((found.state, found.fingerprint), (State::InFlight, fp("a")));
        let (rows, state) = if commits {
            transaction.commit().await.unwrap();
            (1, State::Completed(answer.clone()))
        } else {
            transaction.rollback().await.unwrap();
            (0, State::InFlight)
        };
        assert_eq!(count(&pool, "SELECT count(*) FROM fate.ledger").await, rows);
        assert_eq!(tier.look_up(id).await.unwrap().unwrap().state, state);
    }
    // A stale token is lost, and the transaction can be rolled back in peace.
    let mut transaction = pool.begin().await.unwrap();
    let stale = Token::new(1, 9);
    let landed = tier.complete_in(&mut transaction, id("charge"), stale, None, DAY).await.unwrap();
    let Landed::Lost(Some(found)) = landed else { panic!("{landed:?}") };
    assert_eq!((found.token, found.state), (token, State::Completed(answer)));
    sqlx::query("INSERT INTO fate.ledger VALUES ('8')").execute(&mut *transaction).await.unwrap();
    transaction.rollback().await.unwrap();
}

/// The client has sent its commit and got no answer: the transaction is over, one way or the
/// other, or it is still open on the server.
#[tokio::test]
async fn t6_a_commit_whose_answer_was_lost_is_settled_by_a_write() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("lost").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let patient = tier_in("lost").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    let hasty = tier_in("lost").lock_limit(MS).connect(pool.clone()).await.unwrap();
    let (answer, token) = (outcome("charged"), Token::new(1, 1));
    for (key, commits) in [("commits", true), ("ends", false)] {
        let id = id(key);
        tier.claim(id, claim(1, 1, "a")).await.won();
        let mut transaction = pool.begin().await.unwrap();
        let landed = tier.complete_in(&mut transaction, id, token, Some(&answer), DAY).await;
        assert_eq!(landed.unwrap(), Landed::Done);
        // Still open: unknown, after a time.
        for unknown in [
            hasty.release(id, token).await,
            hasty.complete(id, token, None, DAY).await,
            hasty.hold(id, token, DAY).await,
            hasty.checkpoint(id, token, Bytes::new()).await,
        ] {
            assert!(matches!(unknown, Err(TierError::Locked(_))), "{unknown:?}");
        }
        let settled = tokio::spawn({
            let patient = patient.clone();
            async move { patient.release(common::id(key), token).await }
        });
        until_blocked(&pool, "lost", 1).await;
        if commits {
            transaction.commit().await.unwrap();
            let landed = settled.await.unwrap().unwrap();
            let Landed::Lost(Some(found)) = landed else { panic!("{landed:?}") };
            assert_eq!((found.token, found.state), (token, State::Completed(answer.clone())));
        } else {
            // The server gives up the client that it has lost.
            let pid = "SELECT pg_backend_pid()::bigint";
            let row = sqlx::raw_sql(pid).fetch_one(&mut *transaction).await.unwrap();
            let pid: i64 = row.get(0);
            sql(&pool, format!("SELECT pg_terminate_backend({pid})")).await;
            assert_eq!(settled.await.unwrap().unwrap(), Landed::Done);
            assert_eq!(tier.look_up(id).await.unwrap(), None);
        }
    }
}

/// One row for each owner: a business transaction may have a record in its hands, and a takeover
/// may wait for it, but a heartbeat waits for neither (T10).
#[tokio::test]
async fn t10_a_heartbeat_waits_for_no_record() {
    let _watchdog = watchdog();
    let Some((_, pool)) = tier("beats").await else { return };
    let tier = tier_in("beats").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    let token = Token::new(1, 1);
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("key"), claim(1, 1, "a")).await.won();
    advance(&pool, "beats", LEASE).await;
    tier.beat(2, LEASE).await.unwrap();
    let mut transaction = pool.begin().await.unwrap();
    let answer = outcome("late");
    let landed = tier.complete_in(&mut transaction, id("key"), token, Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    let over = tokio::spawn({
        let tier = tier.clone();
        async move { tier.take_over(common::id("key"), token, claim(2, 1, "a")).await }
    });
    until_blocked(&pool, "beats", 1).await;
    tier.beat(1, LEASE).await.unwrap();
    tier.beat(2, LEASE).await.unwrap();
    transaction.rollback().await.unwrap();
    // It beats again: nothing is taken over, although it had lapsed when the takeover began.
    let found = over.await.unwrap().met();
    assert_eq!((found.token, found.state), (token, State::InFlight));
}

/// Between the look at a lapsed owner and the commit of the takeover, that owner cannot come back.
#[tokio::test]
async fn t10_a_late_heartbeat_does_not_slip_into_a_takeover() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("slips").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("key"), claim(1, 1, "a")).await.won();
    advance(&pool, "slips", LEASE).await;
    tier.beat(2, LEASE).await.unwrap();
    let mut over = pool.begin().await.unwrap();
    let take_over = "SELECT (slips.idempotency_take_over('acct', 'POST /charges', 'key', 1, 1, 2, \
                     1, '12345678', '', 1000, 1000, 1000)).answer";
    let row = sqlx::raw_sql(take_over).fetch_one(&mut *over).await.unwrap();
    assert_eq!(row.get::<String, _>(0), "won");
    let beat = tokio::spawn({
        let tier = tier.clone();
        async move { tier.beat(1, LEASE).await }
    });
    until_blocked(&pool, "slips", 1).await;
    over.commit().await.unwrap();
    beat.await.unwrap().unwrap();
}

/// The bytes of (R1), in a database whose collation takes "a" for "A".
#[tokio::test]
async fn r1_identities_are_bytes_whatever_the_collation() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let pool = server.pool().await;
    sql(
        &pool,
        "CREATE DATABASE loose TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'und-u-ks-level1'",
    )
    .await;
    let pool = postgres::pool(server.options().database("loose")).await;
    let tier = tier_in("oncekey").connect(pool).await.unwrap();
    tier.beat(1, LEASE).await.unwrap();
    let all: &[(&[u8], &[u8], &str)] = &[
        (b"a:b", b"c", "k"),
        (b"a", b"b:c", "k"),
        (b"ab", b"c", "k"),
        (b"a", b"bc", "k"),
        (b"A", b"bc", "k"),
        (b"a ", b"bc", "k"),
        (b"a\0", b"bc", "k"),
        (b"a", b"\0bc", "k"),
        (b"a", b"bc", "K"),
        (b"a", b"bc", "k "),
        (b"\xff", b"bc", "k"),
        (b"\xfe", b"bc", "k"),
        (b"\\xff", b"bc", "k"),
        ("\u{e9}".as_bytes(), b"bc", "k"),
        ("e\u{301}".as_bytes(), b"bc", "k"),
        (b"e", b"bc", "k"),
        (b"", b"bc", "k"),
        (b"a", b"", "k"),
    ];
    for through_pooler in [false, true] {
        let builder = tier_in("oncekey");
        let builder = if through_pooler { builder.through_pooler() } else { builder };
        let pool = postgres::pool(server.options().database("loose")).await;
        let tier = builder.connect(pool).await.unwrap();
        for (number, (account, endpoint, key)) in (1..).zip(all) {
            let id = Identity::new(*account, *endpoint, *key).unwrap();
            if !through_pooler {
                tier.claim(id, claim(1, number, "a")).await.won();
            }
            let found = tier.look_up(id).await.unwrap().unwrap();
            assert_eq!(found.token, Token::new(1, number));
        }
    }
}

/// An outcome of a megabyte of bytes of all kinds, in both forms of a call.
#[tokio::test]
async fn r16_a_large_outcome_comes_back_byte_for_byte() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("large").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let inline = tier_in("large").through_pooler().connect(pool).await.unwrap();
    let body: Vec<u8> =
        (0..1 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let answer = Outcome::new(599)
        .header("a", b"\0\xff'\\")
        .header("a", "")
        .header("", "'; DROP SCHEMA large CASCADE; --")
        .body(body);
    for (number, key) in [(1, "'one"), (2, "\\two$1")] {
        let token = Token::new(1, number);
        let [by, other]: [&PostgresTier; 2] =
            if number == 1 { [&tier, &inline] } else { [&inline, &tier] };
        by.claim(id(key), claim(1, number, "a")).await.won();
        assert_eq!(by.complete(id(key), token, Some(&answer), DAY).await.unwrap(), Landed::Done);
        for reader in [by, other] {
            let found = reader.look_up(id(key)).await.unwrap().unwrap();
            assert_eq!(found.state, State::Completed(answer.clone()));
        }
    }
}

/// Duplicates of a key that is in flight read: no row is written, locked or tried in vain.
#[tokio::test]
async fn case_29_duplicates_in_flight_write_nothing() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case29").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("hot"), claim(1, 1, "a")).await.won();
    // Where the row is, who has written it, and who has locked it.
    let row = "SELECT (ctid::text || xmin::text || '/' || xmax::text) AS row FROM \
               case29.idempotency_keys";
    let before: String = sqlx::raw_sql(row).fetch_one(&pool).await.unwrap().get(0);
    for number in 2..202 {
        let found = tier.claim(id("hot"), claim(1, number, "a")).await.met();
        assert_eq!(found.token, Token::new(1, 1));
    }
    let after: String = sqlx::raw_sql(row).fetch_one(&pool).await.unwrap().get(0);
    assert_eq!(before, after);
    let blocks = "SELECT pg_relation_size('case29.idempotency_keys')";
    assert_eq!(count(&pool, blocks).await, 8192, "a failed insert leaves a dead row");
}

/// Whatever the moment at which a caller goes away, a record has an end and is whole.
#[tokio::test]
async fn case_108_no_record_is_without_an_end() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("case108").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    // The tables themselves refuse one, and an outcome in parts.
    for broken in [
        "expires_at = NULL",
        "due_at = NULL",
        "state = 2, settled_at = now(), status = 200, headers = ''",
        "state = 2, settled_at = now()",
        "state = 1",
        "state = 4, settled_at = now()",
        "owner = NULL",
    ] {
        tier.claim(id("key"), claim(1, 1, "a")).await.won();
        let set = AssertSqlSafe(format!("UPDATE case108.idempotency_keys SET {broken}"));
        let refused = sqlx::raw_sql(set).execute(&pool).await.unwrap_err();
        let code = refused.as_database_error().unwrap().code().unwrap().into_owned();
        assert!(matches!(code.as_str(), "23502" | "23514"), "{broken}: {refused}");
    }
    // A connection that ends in the middle of a claim leaves nothing.
    let patient = tier_in("case108").lock_limit(LONG).connect(pool.clone()).await.unwrap();
    let mut open = pool.begin().await.unwrap();
    patient.claim_in(&mut open, id("cut"), claim(1, 1, "a")).await.won();
    let cut = tokio::spawn({
        let patient = patient.clone();
        async move { patient.claim(common::id("cut"), claim(1, 2, "a")).await }
    });
    until_blocked(&pool, "case108", 1).await;
    sql(
        &pool,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
         AND query LIKE '%case108.%'",
    )
    .await;
    let cut = cut.await.unwrap();
    assert!(matches!(cut, Err(TierError::Unavailable(_))), "{cut:?}");
    open.rollback().await.unwrap();
    assert_eq!(tier.look_up(id("cut")).await.unwrap(), None);
}

/// Two nodes on one database.
#[tokio::test]
async fn case_109_what_one_node_finished_another_replays() {
    let _watchdog = watchdog();
    let Some((a, pool)) = tier("case109").await else { return };
    let b = tier_in("case109").connect(shared().unwrap().pool().await).await.unwrap();
    a.beat(1, LEASE).await.unwrap();
    b.beat(2, LEASE).await.unwrap();
    assert_eq!(b.look_up(id("key")).await.unwrap(), None);
    a.claim(id("key"), claim(1, 1, "a")).await.won();
    let answer = outcome("by a");
    let landed = a.complete(id("key"), Token::new(1, 1), Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    let found = b.claim(id("key"), claim(2, 1, "another")).await.met();
    assert_eq!((found.fingerprint, found.state), (fp("a"), State::Completed(answer.clone())));
    // A is restarted.
    pool.close().await;
    let a = tier_in("case109").connect(shared().unwrap().pool().await).await.unwrap();
    assert_eq!(a.look_up(id("key")).await.unwrap().unwrap().state, State::Completed(answer));
}

/// What somebody has in hands is stepped over, and claims go on: of new identities, and of ended
/// ones that are still there.
#[tokio::test]
async fn t3_reaping_fights_no_claim() {
    let _watchdog = watchdog();
    let Some((tier, pool)) = tier("reaped").await else { return };
    tier.beat(1, LEASE).await.unwrap();
    let keys: Vec<_> = (0..200).map(|n| format!("old-{n}")).collect();
    for (number, key) in (1..).zip(&keys) {
        tier.claim(id(key), claim(1, number, "a")).await.won();
    }
    advance(&pool, "reaped", HOUR + DAY).await;
    tier.beat(1, LEASE).await.unwrap();
    // One is being claimed anew at this moment, another is looked at by somebody.
    let mut open = pool.begin().await.unwrap();
    tier.claim_in(&mut open, id("old-7"), claim(1, 1001, "b")).await.won();
    sqlx::raw_sql("SELECT FROM reaped.idempotency_keys WHERE key = 'old-8' FOR UPDATE")
        .execute(&mut *open)
        .await
        .unwrap();
    assert_eq!(tier.reap(50).await.unwrap(), 50);
    tier.claim(id("new"), claim(1, 1002, "a")).await.won();
    let anew = async {
        for (number, key) in (2001..).zip(&keys[150..]) {
            tier.claim(id(key), claim(1, number, "b")).await.won();
        }
    };
    let reaping = async {
        let mut reaped = 50;
        loop {
            match tier.reap(10).await.unwrap() {
                0 => break reaped,
                some => reaped += some,
            }
        }
    };
    let ((), reaped) = tokio::join!(anew, reaping);
    open.commit().await.unwrap();
    assert_eq!(tier.reap(10).await.unwrap(), 1, "the one that was stepped over");
    let found = tier.look_up(id("old-7")).await.unwrap().unwrap();
    assert_eq!((found.token, found.fingerprint), (Token::new(1, 1001), fp("b")));
    for (number, key) in (2001..).zip(&keys[150..]) {
        let found = tier.look_up(id(key)).await.unwrap().unwrap();
        assert_eq!(found.token, Token::new(1, number), "it was claimed anew and not reaped");
    }
    assert!((148..=198).contains(&reaped), "{reaped}");
    assert_eq!(count(&pool, "SELECT count(*) FROM reaped.idempotency_keys").await, 52);
}

/// A notification for what is waited for, and for nothing else (T5).
#[tokio::test]
async fn t5_whoever_waits_is_told_and_nobody_else() {
    let _watchdog = watchdog();
    let Some((a, pool)) = tier("heard").await else { return };
    let options = shared().unwrap().options();
    let b = tier_in("heard").listen(options).connect(pool.clone()).await.unwrap();
    a.beat(1, LEASE).await.unwrap();
    let mut heard = PgListener::connect_with(&pool).await.unwrap();
    heard.listen("heard.settled").await.unwrap();
    let answer = outcome("told");
    let watched = "SELECT count(*) FROM heard.idempotency_keys WHERE waited IS NOT NULL";
    for (number, end) in (1..).zip(["complete", "release", "hold", "forget", "resolve"]) {
        let token = Token::new(1, number);
        let unwatched = format!("{end}-unwatched");
        for key in [end, &unwatched] {
            a.claim(id(key), claim(1, number, "a")).await.won();
        }
        if end == "resolve" {
            advance(&pool, "heard", LEASE).await;
        }
        let wait = tokio::spawn({
            let b = b.clone();
            async move { b.settled(common::id(end)).await }
        });
        while count(&pool, watched).await != 1 {
            tokio::time::sleep(MS).await;
        }
        // A checkpoint settles nothing.
        let landed = a.checkpoint(id(end), token, Bytes::from_static(b"half")).await;
        assert_eq!(landed.unwrap(), Landed::Done);
        assert!(!wait.is_finished());
        for key in [&unwatched, end] {
            match end {
                "complete" => {
                    let landed = a.complete(id(key), token, Some(&answer), DAY).await;
                    assert_eq!(landed.unwrap(), Landed::Done);
                }
                "release" => {
                    assert_eq!(a.release(id(key), token).await.unwrap(), Landed::Done);
                }
                "hold" => assert_eq!(a.hold(id(key), token, DAY).await.unwrap(), Landed::Done),
                "forget" => assert_eq!(a.forget(id(key), true).await.unwrap(), Forgotten::Gone),
                _ => {
                    let resolved = a.resolve(id(key), Some(&answer), DAY).await;
                    assert_eq!(resolved.unwrap(), Resolved::Done);
                }
            }
        }
        wait.await.unwrap();
        // One was told, of one hash; all that was said before this comes before it.
        sql(&pool, "SELECT pg_notify('heard.settled', 'all')").await;
        assert_eq!(heard.recv().await.unwrap().payload().len(), 32, "{end}");
        assert_eq!(heard.recv().await.unwrap().payload(), "all", "{end}");
        assert_eq!(count(&pool, watched).await, 0);
        // What is settled is not waited for.
        if end != "hold" {
            b.settled(id(end)).await;
        }
    }
    // At the commit, when a transaction of the user's own completes it.
    a.beat(1, LEASE).await.unwrap();
    a.claim(id("in"), claim(1, 77, "a")).await.won();
    let wait = tokio::spawn({
        let b = b.clone();
        async move { b.settled(common::id("in")).await }
    });
    while count(&pool, watched).await != 1 {
        tokio::time::sleep(MS).await;
    }
    let mut transaction = pool.begin().await.unwrap();
    let landed =
        a.complete_in(&mut transaction, id("in"), Token::new(1, 77), Some(&answer), DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    assert!(!wait.is_finished());
    transaction.commit().await.unwrap();
    wait.await.unwrap();
}

/// A record that somebody has in hands is not waited for on the server; the connection may be cut.
#[tokio::test]
async fn t5_waiting_blocks_nobody_and_survives_a_cut() {
    let _watchdog = watchdog();
    let Some((_, pool)) = tier("cut").await else { return };
    let options = shared().unwrap().options().application_name("listens");
    let tier = tier_in("cut").listen(options).connect(pool.clone()).await.unwrap();
    tier.beat(1, LEASE).await.unwrap();
    tier.claim(id("key"), claim(1, 1, "a")).await.won();
    let mut open = pool.begin().await.unwrap();
    let landed = tier.complete_in(&mut open, id("key"), Token::new(1, 1), None, DAY).await;
    assert_eq!(landed.unwrap(), Landed::Done);
    let watch = "SELECT cut.idempotency_watch('acct', 'POST /charges', 'key', 'name')";
    let row = sqlx::raw_sql(watch).fetch_one(&pool).await.unwrap();
    assert!(row.get::<bool, _>(0), "it is not settled yet");
    open.rollback().await.unwrap();

    let listening = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'listens'";
    for _ in 0..2 {
        let wait = tokio::spawn({
            let tier = tier.clone();
            async move { tier.settled(common::id("key")).await }
        });
        let watched = "SELECT count(*) FROM cut.idempotency_keys WHERE length(waited) = 16";
        while count(&pool, watched).await != 1 {
            tokio::time::sleep(MS).await;
        }
        // Whoever may have missed something looks.
        sql(
            &pool,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = \
             'listens'",
        )
        .await;
        wait.await.unwrap();
        while count(&pool, listening).await != 1 {
            tokio::time::sleep(MS).await;
        }
    }
}

/// What makes a tier unusable is said when it is opened, with what to do (T2).
#[tokio::test]
async fn t2_a_server_that_cannot_keep_the_promise_is_refused() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let (_, pool) = tier("refused").await.unwrap();
    let refused = async |builder: PostgresBuilder, options: PgConnectOptions| {
        let pool = postgres::pool(options).await;
        match builder.connect(pool).await {
            Err(TierError::Unusable(why)) => why.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let with = |name, value| server.options().options([(name, value)]);
    let said = refused(PostgresTier::builder(), server.options()).await;
    assert!(said.contains("fsync"), "{said}");
    let said = refused(tier_in("refused"), with("synchronous_commit", "off")).await;
    assert!(said.contains("synchronous_commit"), "{said}");
    let said = refused(tier_in("refused"), with("default_transaction_read_only", "on")).await;
    assert!(said.contains("read-only"), "{said}");
    let inline = tier_in("refused").through_pooler();
    let said = refused(inline, with("bytea_output", "escape")).await;
    assert!(said.contains("bytea_output"), "{said}");
    for name in ["", "1st", "Upper", "a-b", "a\"b", "a.b", &"a".repeat(41)] {
        let said = refused(tier_in(name), server.options()).await;
        assert!(said.contains("no name for a schema"), "{name}: {said}");
    }
    sql(&pool, "CREATE ROLE weak LOGIN; GRANT USAGE ON SCHEMA refused TO weak").await;
    let said = refused(tier_in("another"), server.options().username("weak")).await;
    assert!(said.contains("CREATE SCHEMA another AUTHORIZATION"), "{said}");
    let said = refused(tier_in("refused"), server.options().username("weak")).await;
    assert!(said.contains("needs USAGE on the schema"), "{said}");
    sql(&pool, "ALTER TABLE refused.idempotency_keys SET UNLOGGED").await;
    let said = refused(tier_in("refused"), server.options()).await;
    assert!(said.contains("SET LOGGED"), "{said}");
    sql(
        &pool,
        "ALTER TABLE refused.idempotency_keys SET LOGGED; INSERT INTO refused.idempotency_schema \
         VALUES (99)",
    )
    .await;
    let said = refused(tier_in("refused"), server.options()).await;
    assert!(said.contains("version 99") && said.contains("newer version"), "{said}");
    // Not to be reached is another thing: trying again may help.
    let lazy = PgPoolOptions::new().acquire_timeout(SECOND);
    let nowhere = lazy.connect_lazy_with(server.options().port(1));
    let away = tier_in("refused").connect(nowhere).await;
    assert!(matches!(away, Err(TierError::Unavailable(_))), "{away:?}");
}

/// The pooler is told from its symptom, if it does not keep prepared statements apart by itself.
#[tokio::test]
async fn t2_a_pooler_that_nobody_spoke_of_is_named() {
    let _watchdog = watchdog();
    let Some((_, _)) = tier("unspoken").await else { return };
    let Some(pooler) = Pooler::start(shared().unwrap()) else { return };
    for owner in 1..4 {
        let pool = postgres::pool(pooler.options()).await;
        let tier = tier_in("unspoken").connect(pool).await.unwrap();
        match tier.beat(owner, LEASE).await {
            Ok(()) => {}
            Err(TierError::Unusable(why)) => {
                assert!(why.to_string().contains("through_pooler"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn t2_processes_that_start_at_once_make_the_tables_once() {
    let _watchdog = watchdog();
    let Some(server) = shared() else { return };
    let starts: Vec<_> = (0..8)
        .map(|_| {
            let options = server.options();
            tokio::spawn(
                async move { tier_in("together").connect(postgres::pool(options).await).await },
            )
        })
        .collect();
    for start in starts {
        start.await.unwrap().unwrap();
    }
    let pool = server.pool().await;
    let versions = "SELECT count(*) FROM together.idempotency_schema";
    assert_eq!(count(&pool, versions).await, 1);
}

/// The server is killed under load, with everything that it keeps in memory only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t7_a_killed_server_has_all_that_it_acknowledged() {
    let _watchdog = watchdog();
    let Some(server) = Server::start(&[]) else { return };
    type Acknowledged = HashMap<String, (Token, Option<Outcome>)>;
    let acknowledged = Arc::<Mutex<Acknowledged>>::default();
    for round in 0..4_u64 {
        // While the server is away, the driver tries to reach it for so long.
        let pool = PgPoolOptions::new().acquire_timeout(SECOND).max_connections(8);
        let pool = pool.connect_with(server.options()).await.unwrap();
        let tier = PostgresTier::connect(pool.clone()).await.unwrap();
        tier.beat(round + 1, LEASE).await.unwrap();
        // Somebody who waits meanwhile is told to look.
        let listens = PostgresTier::builder().listen(server.options());
        let listens = listens.connect(server.pool().await).await.unwrap();
        let waited = format!("waited-{round}");
        let claim_of_it = claim(round + 1, 1 << 40, "a");
        tier.claim(id(&waited), claim_of_it).await.won();
        let wait = tokio::spawn(async move { listens.settled(id(&waited)).await });
        let marked = "SELECT count(*) FROM oncekey.idempotency_keys WHERE waited IS NOT NULL";
        while count(&pool, marked).await == 0 {
            tokio::time::sleep(MS).await;
        }
        // One kind of step at a time: another that waits for its own commit would take those of
        // steps that do not along.
        let claims = |each: u64| -> Vec<_> {
            (0..8)
                .map(|task| {
                    let (tier, acknowledged) = (tier.clone(), Arc::clone(&acknowledged));
                    tokio::spawn(async move {
                        for number in 0..each {
                            let key = format!("{round}-{task}-{number}");
                            let token = Token::new(round + 1, number * 8 + task);
                            let claim = NewClaim { token, ..claim(0, 0, &key) };
                            let Ok(Claimed::Won { .. }) = tier.claim(id(&key), claim).await else {
                                return;
                            };
                            acknowledged.lock().unwrap().insert(key, (token, None));
                        }
                    })
                })
                .collect()
        };
        let load = if round % 2 == 0 {
            claims(u64::MAX >> 8)
        } else {
            for task in claims(50) {
                task.await.unwrap();
            }
            let claimed: Vec<_> = acknowledged
                .lock()
                .unwrap()
                .iter()
                .filter(|(key, _)| key.starts_with(&format!("{round}-")))
                .map(|(key, (token, _))| (key.clone(), *token))
                .collect();
            assert_eq!(claimed.len(), 400);
            claimed
                .chunks(50)
                .map(|part| {
                    let (tier, part) = (tier.clone(), part.to_vec());
                    let acknowledged = Arc::clone(&acknowledged);
                    tokio::spawn(async move {
                        for (key, token) in part {
                            let answer = outcome(&key);
                            let landed = tier.complete(id(&key), token, Some(&answer), DAY).await;
                            let Ok(landed) = landed else { return };
                            assert_eq!(landed, Landed::Done);
                            acknowledged.lock().unwrap().insert(key, (token, Some(answer)));
                        }
                    })
                })
                .collect()
        };
        let is_enough = || {
            let acknowledged = acknowledged.lock().unwrap();
            let of_round = acknowledged.iter().filter(|(key, (_, answer))| {
                key.starts_with(&format!("{round}-")) && answer.is_some() == (round % 2 == 1)
            });
            of_round.count() >= 100
        };
        while !is_enough() {
            tokio::time::sleep(MS).await;
        }
        server.kill();
        for task in load {
            task.await.unwrap();
        }
        server.restart();
        wait.await.unwrap();
        let tier = PostgresTier::connect(server.pool().await).await.unwrap();
        sql(&server.pool().await, "UPDATE oncekey.idempotency_keys SET waited = NULL").await;
        let acknowledged = acknowledged.lock().unwrap().clone();
        for (key, (token, answer)) in &acknowledged {
            let found = tier.look_up(id(key)).await.unwrap();
            let found = found.unwrap_or_else(|| panic!("{key} is lost"));
            assert_eq!(found.token, *token);
            if let Some(answer) = answer {
                assert_eq!(found.state, State::Completed(answer.clone()), "{key}");
            }
        }
    }
}
