//! The client against the example service, a process of its own, over a line that loses, cuts, delays
//! and doubles requests and answers at random: so many intents, so many charges, and each intent
//! knows its own.
//!
//! `ONCEKEY_CLIENT_INTENTS=10000` makes it longer, `ONCEKEY_SEED` repeats a run's dice.
#![cfg(all(unix, feature = "client", feature = "axum"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;
#[path = "common/mischief.rs"]
mod mischief;
#[path = "common/payments.rs"]
mod payments;
#[path = "common/program.rs"]
mod program;

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::{client::legacy, rt::TokioExecutor};
use oncekey::{
    IntentKey,
    client::{IntentLayer, Report},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tower::{Layer as _, Service as _};

use crate::{
    common::{Dice, LONG, MS, watchdog_of},
    mischief::{Fate, Mischief},
    payments::Payments,
};

/// How many intents are under way at a time.
const AT_ONCE: usize = 32;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn fate(dice: &mut Dice) -> Fate {
    match dice.roll(100) {
        0..8 => Fate::Drop,
        8..16 => Fate::Lose,
        16..24 => Fate::Cut(dice.roll(100) as usize),
        24..40 => Fate::Delay(MS * dice.roll(20) as u32),
        40..52 => Fate::Double,
        52..64 => Fate::Again(MS * dice.roll(50) as u32),
        64 => Fate::Silence,
        _ => Fate::Pass,
    }
}

/// What an intent has learnt.
struct Known {
    cents: u64,
    id: String,
    report: Report,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn so_many_intents_so_many_charges_and_each_knows_its_own() {
    let _watchdog = watchdog_of(Duration::from_secs(1_200));
    let intents = setting("ONCEKEY_CLIENT_INTENTS", 300);
    let seed = setting("ONCEKEY_SEED", u64::from(std::process::id()));
    println!("{intents} intents, ONCEKEY_SEED={seed}");

    let service = Payments::start(&[]);
    let line = Mischief::to(service.address, move |nth, _| {
        let mut dice = Dice::new(seed.wrapping_add(nth as u64));
        dice.roll(2); // the first throws of neighbours are alike
        fate(&mut dice)
    })
    .await;

    let layer = IntentLayer::new()
        .backoff(MS, 50 * MS)
        .attempt_timeout(1_000 * MS)
        .deadline(LONG)
        .warn_of_new_keys(false);
    let reqwest =
        reqwest_middleware::ClientBuilder::new(reqwest::Client::new()).with(layer.clone()).build();
    let tower =
        layer.layer(legacy::Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>());
    let url = format!("http://{}/charges?delay_ms=3", line.address);
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..AT_ONCE {
        let (reqwest, mut tower) = (reqwest.clone(), tower.clone());
        let (url, next) = (url.clone(), Arc::clone(&next));
        workers.spawn(async move {
            let mut known = Vec::new();
            loop {
                let nth = next.fetch_add(1, Ordering::SeqCst) as u64;
                if nth >= intents {
                    return known;
                }
                // An amount of its own, so that a charge can be told to be this intent's.
                let cents = nth + 1;
                let order = json!({"amount_cents": cents, "currency": "usd", "source": "pm_card"});
                // Half of them have a key of their own, the other half one that the layer makes.
                let key = (nth % 4 < 2).then(|| IntentKey::derived("charge", [cents.to_string()]));
                let (status, report, body) = if nth.is_multiple_of(2) {
                    let mut request = reqwest
                        .post(&url)
                        .header("authorization", "Bearer acme")
                        .body(order.to_string());
                    if let Some(key) = key {
                        request = request.with_extension(key);
                    }
                    let response = request.send().await.unwrap();
                    let report = response.extensions().get::<Report>().unwrap().clone();
                    (response.status(), report, response.bytes().await.unwrap())
                } else {
                    let mut request = Request::post(&url)
                        .header("authorization", "Bearer acme")
                        .body(Full::from(order.to_string()))
                        .unwrap();
                    if let Some(key) = key {
                        request.extensions_mut().insert(key);
                    }
                    let response = tower.call(request).await.unwrap();
                    let report = response.extensions().get::<Report>().unwrap().clone();
                    let status = response.status();
                    (status, report, response.into_body().collect().await.unwrap().to_bytes())
                };
                assert_eq!(status, 201, "{body:?}");
                let charge: Value = serde_json::from_slice(&body).unwrap();
                assert_eq!(charge["amount_cents"], cents);
                let id = charge["id"].as_str().unwrap().to_owned();
                known.push(Known { cents, id, report });
            }
        });
    }
    let known: Vec<Known> = workers.join_all().await.into_iter().flatten().collect();
    while line.strays() > 0 {
        tokio::time::sleep(MS).await;
    }

    assert_eq!(known.len() as u64, intents);
    assert_eq!(service.stat("executions").await, intents, "charges");
    let ids: HashMap<&str, u64> = known.iter().map(|one| (&*one.id, one.cents)).collect();
    assert_eq!(ids.len() as u64, intents, "each has a charge of its own");
    let keys: HashSet<_> = known.iter().map(|one| one.report.key()).collect();
    assert_eq!(keys.len() as u64, intents);
    // What the service has in its book under the id is what the intent asked for.
    let client = reqwest::Client::new();
    for (id, cents) in &ids {
        let url = format!("http://{}/charges/{id}", service.address);
        let asked = client.get(url).header("authorization", "Bearer acme").send().await.unwrap();
        let charge: Value = serde_json::from_slice(&asked.bytes().await.unwrap()).unwrap();
        assert_eq!(charge["amount_cents"], *cents, "{id}");
    }
    let attempts: u64 = known.iter().map(|one| u64::from(one.report.attempts())).sum();
    let replays = known.iter().filter(|one| one.report.is_replay()).count();
    println!("{attempts} attempts, {} requests on the line, {replays} replays", line.requests());
    assert!(attempts > intents && replays > 0, "the line did no harm");
}
