//! Threads on a store in memory: each key is asked for by about four of them at once; there are more
//! keys than room.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use oncekey::{Claim, ClaimError, Identity, Outcome, Permit, Settled, Stats, Store};

use crate::{
    Fast, Soak, check_limits,
    common::{Dice, same},
    fail, settles,
};

const THREADS: u64 = 16;
const MAX_KEYS: usize = 15_000;
const MAX_BYTES: usize = 40 << 20;
const MINUTE: Duration = Duration::from_secs(60);

pub struct Memory {
    store: Store,
    pub clock: Fast,
    threads: Vec<JoinHandle<()>>,
    run: Arc<Mutex<HashSet<u64>>>,
}

impl Memory {
    pub fn start(soak: &Arc<Soak>) -> Self {
        let clock = soak.clock.apart();
        let store = Store::builder()
            .clock(clock.clone())
            // Half a minute of real time: far longer than between two who ask for the same key.
            .retention(60 * MINUTE)
            .lease(60 * MINUTE)
            .max_run(24 * 60 * MINUTE)
            .max_keys(MAX_KEYS)
            .max_bytes(MAX_BYTES)
            .build()
            .expect("the settings are in their bounds");
        let run = Arc::<Mutex<HashSet<u64>>>::default();
        let asked = Arc::<AtomicU64>::default();
        let work = |seed| {
            let (store, run, asked) = (store.clone(), Arc::clone(&run), Arc::clone(&asked));
            let soak = Arc::clone(soak);
            thread::spawn(move || {
                let mut dice = Dice::new(seed);
                while soak.goes_on() {
                    let key = asked.fetch_add(1, Ordering::Relaxed) / 4;
                    ask(&soak, &store, &run, key, &mut dice);
                    thread::sleep(Duration::from_millis(dice.roll(10)));
                }
            })
        };
        let threads = (0..THREADS).map(work).collect();
        Self { store, clock, threads, run }
    }

    pub fn check(&self) {
        check_limits("the memory", &self.store.stats(), (MAX_KEYS, MAX_BYTES));
    }

    /// Ends the work; what it came to.
    pub fn stop(&mut self) -> String {
        for thread in self.threads.drain(..) {
            thread.join().unwrap_or_else(|_| fail("a thread has panicked"));
        }
        let store = &self.store;
        settles("somebody is still there", store, || {
            let stats = store.stats();
            (stats.in_flight, stats.waiters) == (0, 0)
        });
        let stats = store.stats();
        let run = self.run.lock().expect("nobody panics with it").len() as u64;
        let counted = stats.completed + stats.not_kept + stats.released;
        if counted != stats.won || run != stats.completed + stats.not_kept {
            fail(format!("{run} keys were run: {stats:?}"));
        }
        if stats.sweep_panics == 0 {
            fail(format!("the sweep has not panicked: {stats:?}"));
        }
        let Stats { replays, refused_full, handed_over, expired, sweep_panics, .. } = stats;
        format!(
            "memory: {run} keys run once each, {replays} replays, {handed_over} handed over, \
             {refused_full} refused, {expired} ended, {sweep_panics} panics of the sweep"
        )
    }

    pub fn check_clean(&self) {
        settles("something is left in memory", &self.store, || {
            let stats = self.store.stats();
            (stats.keys, stats.bytes) == (0, 0)
        });
    }
}

fn ask(soak: &Soak, store: &Store, run: &Mutex<HashSet<u64>>, key: u64, dice: &mut Dice) {
    let name = key.to_string();
    let id = Identity::new("acct", "POST /charges", &name).expect("a key");
    let start = Instant::now();
    let claim = store.claim(&id, same());
    let took = start.elapsed().as_micros() as u64;
    soak.times.core.lock().expect("nobody panics with it").saturating_record(took);
    match claim {
        Ok(Claim::Won(permit)) => own(soak, run, key, permit, dice),
        Ok(Claim::Replay(replay)) => check(key, replay.outcome()),
        Ok(Claim::InFlight(pending)) => match pending.wait_timeout(Duration::from_secs(60)) {
            Ok(Settled::Completed(replay)) => check(key, replay.outcome()),
            Ok(Settled::Yours(permit)) => own(soak, run, key, permit, dice),
            Ok(Settled::NotKept | Settled::Refused(ClaimError::Full { .. })) => {}
            other => fail(format!("{key} was waited for: {other:?}")),
        },
        Ok(Claim::NotKept) | Err(ClaimError::Full { .. }) => {}
        other => fail(format!("{key}: {other:?}")),
    }
}

fn own(soak: &Soak, run: &Mutex<HashSet<u64>>, key: u64, permit: Permit, dice: &mut Dice) {
    permit.attend().unwrap_or_else(|lost| fail(format!("{key} is lost: {lost}")));
    if dice.roll(2) == 0 {
        thread::sleep(Duration::from_millis(dice.roll(5)));
    }
    let settled = if dice.roll(8) == 0 {
        permit.release()
    } else {
        if !run.lock().expect("nobody panics with it").insert(key) {
            fail(format!("{key} is run twice"));
        }
        soak.runs.fetch_add(1, Ordering::Relaxed);
        permit.complete(answer(key)).map(drop)
    };
    settled.unwrap_or_else(|lost| fail(format!("{key} is lost: {lost}")));
}

/// What a key is answered with: of any size, also beyond what a claim reserves.
fn answer(key: u64) -> Outcome {
    let len = key.wrapping_mul(7_919) % 9_000;
    Outcome::new(201).header("key", key.to_string()).body(vec![key as u8; len as usize])
}

fn check(key: u64, outcome: &Outcome) {
    if *outcome != answer(key) {
        fail(format!("{key} got {outcome:?}"));
    }
}
