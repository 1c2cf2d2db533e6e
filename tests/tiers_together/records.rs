//! Records: that each has an end, that a claim is answered whatever it meets, and that it leaves the
//! user's transaction alone.

use futures_util::future::join_all;

use super::{books::Open, *};

const SHORT: Duration = Duration::from_millis(300);

/// Every step of a life, given up after every one of its awaits: its owner is gone, and nobody ever
/// asks for the key.
#[tokio::test(flavor = "multi_thread")]
async fn t3_case_108_wherever_its_owner_dies_a_record_ends() {
    const STEPS: [&str; 8] =
        ["claim", "checkpoint", "take over", "hold", "complete", "not kept", "resolve", "release"];
    // More awaits than any of the steps has: then it was done.
    const POLLS: usize = 12;
    let _watchdog = watchdog();
    for place in places("case_108").await {
        let tier = &place.tier;
        tier.beat(1, LONG).await.unwrap();
        let mut keys = Vec::new();
        for (step, name) in STEPS.into_iter().enumerate() {
            for polls in 0..POLLS {
                let key = format!("{name}, {polls}");
                let number = (step * POLLS + polls) as u64 * 2 + 1;
                let claim =
                    |number| NewClaim { max_run: SHORT, retention: SHORT, ..claim(1, number) };
                let token = Token::new(1, number);
                let (id, body) = (id(&key), outcome(name));
                if step > 0 {
                    let won = tier.claim(id, claim(number)).await.unwrap();
                    assert_eq!(won, Claimed::Won { checkpoint: None });
                }
                if matches!(name, "take over" | "resolve") {
                    let _ = tier.hold(id, token, SHORT).await.unwrap();
                }
                // Whatever the step answers: on a slow machine the record has ended before it.
                let step = async {
                    match name {
                        "claim" => tier.claim(id, claim(number)).await.map(drop),
                        "take over" => tier.take_over(id, token, claim(number + 1)).await.map(drop),
                        "checkpoint" => tier.checkpoint(id, token, "half".into()).await.map(drop),
                        "hold" => tier.hold(id, token, SHORT).await.map(drop),
                        "complete" => tier.complete(id, token, Some(&body), SHORT).await.map(drop),
                        "not kept" => tier.complete(id, token, None, SHORT).await.map(drop),
                        "resolve" => tier.resolve(id, Some(&body), SHORT).await.map(drop),
                        _ => tier.release(id, token).await.map(drop),
                    }
                };
                if let Some(done) = given_up(step, polls).await {
                    done.unwrap();
                }
                keys.push(key);
            }
        }
        for key in &keys {
            until(async || found(&place, key).await.is_none()).await;
        }
        // It is a new key, to a claim as well.
        for (number, key) in keys.iter().enumerate() {
            let won = tier.claim(id(key), claim(1, 1_000 + number as u64)).await.unwrap();
            assert_eq!(won, Claimed::Won { checkpoint: None }, "{}, {key}", place.name);
        }
    }
}

/// A claim is under way when others come: within a transaction of the user's that stays open, where
/// the tier has such, else as a step that has begun and is not driven on. Each of the others is told
/// who owns the key, whether that one stays or goes.
#[tokio::test(flavor = "multi_thread")]
async fn case_100_a_claim_that_meets_one_under_way_is_told_who_owns() {
    let _watchdog = watchdog();
    for place in places("case_100").await {
        place.tier.beat(1, LONG).await.unwrap();
        for stays in [true, false] {
            let key = format!("stays: {stays}");
            let tier = &place.tier;
            let mut open = place.books.begin().await;
            let mut first = tier.claim(id(&key), claim(1, 1));
            let mut answers = Vec::new();
            let in_transaction = match &mut open {
                Some(Open::Postgres(tier, tx)) => {
                    let won = tier.claim_in(tx, id(&key), claim(1, 1)).await.unwrap();
                    assert_eq!(won, Claimed::Won { checkpoint: None });
                    true
                }
                // SQLite has no claim within a transaction: this one waits for the other's end.
                _ => {
                    answers.extend(given_up(&mut first, 1).await);
                    false
                }
            };
            let others = (2..10).map(|number| tier.claim(id(&key), claim(1, number)));
            let mut others = pin!(join_all(others));
            let begun = match &place.books {
                Books::Postgres(_, pool) => tokio::select! {
                    answers = &mut others => panic!("nobody waited: {answers:?}"),
                    () = blocked(pool, 8) => None,
                },
                _ => given_up(&mut others, 1).await,
            };
            if let Some(open) = open {
                open.end(stays).await;
            }
            if answers.is_empty() && !in_transaction && stays {
                answers.push(first.await);
            } else {
                drop(first);
            }
            if answers.is_empty() {
                // It has gone, and may have claimed.
                answers.push(tier.claim(id(&key), claim(1, 1)).await);
            }
            answers.extend(match begun {
                Some(answers) => answers,
                None => others.await,
            });
            let owner = found(&place, &key).await.unwrap().token;
            for (number, answer) in (1..).zip(answers) {
                match answer.unwrap() {
                    Claimed::Won { .. } => assert_eq!(owner, Token::new(1, number)),
                    Claimed::Met(met) => {
                        assert_eq!((met.token, met.state), (owner, State::InFlight))
                    }
                }
            }
            if in_transaction {
                assert_eq!(owner == Token::new(1, 1), stays, "{}", place.name);
            }
        }
    }
}

/// A unit of work meets a key that another has: it is told, and goes on. Where the tier lies in no
/// database there is no such transaction.
#[tokio::test(flavor = "multi_thread")]
async fn case_103_a_transaction_that_meets_a_key_stays_usable() {
    let _watchdog = watchdog();
    for place in places("case_103").await {
        place.tier.beat(1, LONG).await.unwrap();
        let won = place.tier.claim(id("k"), claim(1, 1)).await.unwrap();
        assert_eq!(won, Claimed::Won { checkpoint: None });
        let Some(mut open) = place.books.begin().await else { continue };
        open.execute("CREATE TABLE case_103_ledger (what TEXT NOT NULL)").await;
        open.execute("INSERT INTO case_103_ledger VALUES ('before')").await;
        if let Open::Postgres(tier, tx) = &mut open {
            let Claimed::Met(met) = tier.claim_in(tx, id("k"), claim(1, 2)).await.unwrap() else {
                panic!("it won")
            };
            assert_eq!((met.token, met.state), (Token::new(1, 1), State::InFlight));
        }
        let lost = open.complete("k", Token::new(1, 2), &outcome("2")).await;
        let Landed::Lost(Some(met)) = lost else { panic!("{}: {lost:?}", place.name) };
        assert_eq!((met.token, met.state), (Token::new(1, 1), State::InFlight), "{}", place.name);
        open.execute("INSERT INTO case_103_ledger VALUES ('after')").await;
        let landed = open.complete("k", Token::new(1, 1), &outcome("1")).await;
        assert_eq!(landed, Landed::Done, "{}", place.name);
        open.end(true).await;
        let rows = place.books.count("SELECT count(*) FROM case_103_ledger").await;
        assert_eq!(rows, 2, "{}", place.name);
        assert_eq!(state(&place, "k").await, Some(State::Completed(outcome("1"))));
    }
}

/// Returns when so many statements wait for a lock.
async fn blocked(pool: &sqlx::PgPool, many: i64) {
    let query = "SELECT count(*) FROM pg_stat_activity \
                 WHERE wait_event_type = 'Lock' AND query LIKE '%case_100.%'";
    until(async || {
        let waiting: i64 = sqlx::query_scalar(query).fetch_one(pool).await.unwrap();
        waiting == many
    })
    .await;
}
