//! What single operations of oncekey cost, without peers: `cargo bench -p compare`.
//!
//! For watching a change, not for comparing stores: one thread, a small store, warm caches.

use std::{
    hint::black_box,
    pin::pin,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use criterion::{Criterion, criterion_group, criterion_main};
use oncekey::{
    Claim, Fingerprint, Identity, ManualClock, Outcome, Permit, Scheme, Settled, Store, Sweep,
};

const RETENTION: Duration = Duration::from_secs(600);

/// As many records a store gets until all of them end, so that it does not grow with the number of
/// iterations.
const BATCH: u64 = 100_000;

const PRINT: Fingerprint = Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32]);

fn store() -> (Store, ManualClock) {
    let clock = ManualClock::new();
    let builder = Store::builder().retention(RETENTION).sweep(Sweep::Manual).clock(clock.clone());
    (builder.max_bytes(4 << 30).build().expect("valid settings"), clock)
}

fn key(n: u64) -> String {
    format!("{n:016x}-0000-0000-0000-0000000")
}

fn id(key: &str) -> Identity<'_> {
    Identity::new("acct_42", "POST /charges", key).expect("within its bounds")
}

fn won(store: &Store, id: &Identity<'_>) -> Permit {
    match store.claim(id, PRINT).expect("there is room") {
        Claim::Won(permit) => permit,
        other => panic!("not won: {other:?}"),
    }
}

fn answer() -> Outcome {
    Outcome::new(201).body(vec![b'x'; 200])
}

/// Times `operation` on new keys; what it leaves behind ends between the batches.
fn timed_on_new_keys(iterations: u64, operation: impl Fn(&Store, &Identity<'_>)) -> Duration {
    let (store, clock) = store();
    let mut took = Duration::ZERO;
    let mut done = 0;
    while done < iterations {
        let batch = BATCH.min(iterations - done);
        let keys: Vec<String> = (done..done + batch).map(key).collect();
        let start = Instant::now();
        keys.iter().for_each(|key| operation(&store, &id(key)));
        took += start.elapsed();
        clock.advance(RETENTION);
        store.sweep();
        done += batch;
    }
    took
}

fn on_new_keys(c: &mut Criterion) {
    let mut group = c.benchmark_group("new key");
    group.bench_function("claim + complete", |b| {
        b.iter_custom(|iterations| {
            timed_on_new_keys(iterations, |store, id| {
                won(store, id).complete(Outcome::new(201)).expect("the permit is good");
            })
        });
    });
    group.bench_function("claim + complete, 200 B", |b| {
        b.iter_custom(|iterations| {
            timed_on_new_keys(iterations, |store, id| {
                won(store, id).complete(answer()).expect("the permit is good");
            })
        });
    });
    group.finish();
}

fn on_a_completed_key(c: &mut Criterion) {
    let (store, _clock) = store();
    let key = key(0);
    let id = id(&key);
    won(&store, &id).complete(answer()).expect("the permit is good");
    let other = Fingerprint::from_parts(Scheme::REQUEST_1, [8; 32]);

    let mut group = c.benchmark_group("completed key");
    group.bench_function("replay, 200 B", |b| {
        b.iter(|| match store.claim(black_box(&id), PRINT) {
            Ok(Claim::Replay(replay)) => replay,
            other => panic!("not a replay: {other:?}"),
        });
    });
    group.bench_function("mismatch", |b| {
        b.iter(|| {
            let met = store.claim(black_box(&id), other);
            assert!(matches!(met, Ok(Claim::Mismatch)));
        });
    });
    group.finish();
}

fn on_a_running_owner(c: &mut Criterion) {
    let (store, _clock) = store();
    let key = key(0);
    let id = id(&key);
    let _permit = won(&store, &id);

    let mut group = c.benchmark_group("key in flight");
    group.bench_function("losing claim", |b| {
        b.iter(|| {
            let met = store.claim(black_box(&id), PRINT);
            assert!(matches!(met, Ok(Claim::InFlight(_))));
        });
    });
    group.finish();
}

fn giving_up(c: &mut Criterion) {
    let (store, _clock) = store();
    let key = key(0);
    let id = id(&key);

    let mut group = c.benchmark_group("giving up");
    group.bench_function("claim + release, again and again", |b| {
        b.iter(|| won(&store, black_box(&id)).release().expect("the permit is good"));
    });
    group.finish();
}

fn waiting(c: &mut Criterion) {
    let mut group = c.benchmark_group("waiting");
    for waiters in [1, 100] {
        group.bench_function(format!("claim, {waiters} wait, complete, all are told"), |b| {
            b.iter_custom(|iterations| {
                timed_on_new_keys(iterations, |store, id| wait_and_wake(store, id, waiters))
            });
        });
    }
    group.finish();
}

fn wait_and_wake(store: &Store, id: &Identity<'_>, waiters: usize) {
    let permit = won(store, id);
    let mut cx = Context::from_waker(Waker::noop());
    let wait = |_| match store.claim(id, PRINT) {
        Ok(Claim::InFlight(pending)) => Box::pin(pending.wait()),
        other => panic!("nobody runs: {other:?}"),
    };
    let mut waits: Vec<_> = (0..waiters).map(wait).collect();
    for wait in &mut waits {
        assert!(pin!(wait).poll(&mut cx).is_pending());
    }
    permit.complete(Outcome::new(201)).expect("the permit is good");
    for wait in &mut waits {
        let told = pin!(wait).poll(&mut cx);
        assert!(matches!(told, Poll::Ready(Settled::Completed(_))));
    }
}

criterion_group! {
    name = ops;
    config = Criterion::default()
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3))
        .sample_size(30);
    targets = on_new_keys, on_a_completed_key, on_a_running_owner, giving_up, waiting
}
criterion_main!(ops);
