//! The bytes of a store against the bytes of the allocator: the limit is hard, and what is over
//! gives everything back (R25, R26).
//!
//! The allocator counts for each thread by itself, the stores here are swept by hand, and one test
//! runs at a time, because a thread of another test that loses its processor in the middle of a look
//! holds back what every store would free: so a test sees its own store and nothing else, to the
//! byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]
#![allow(unsafe_code, reason = "an allocator that counts is unsafe by its trait")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::{Mutex, MutexGuard, PoisonError},
};

use oncekey::{Claim, ClaimError, Identity, Lapse, Outcome, Store, StoreBuilder};

mod common;

use common::*;

struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that ends frees after its locals are gone; nobody asks for its count then.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

/// What the system's allocator takes for a request: glibc puts a word before it, rounds up to 16
/// bytes and takes at least 32.
fn taken(layout: Layout) -> isize {
    isize::try_from((layout.size() + 8).next_multiple_of(16).max(32)).unwrap_or(isize::MAX)
}

// SAFETY: every call goes to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(taken(layout));
        // SAFETY: the caller keeps the contract of `alloc`, which is the same one.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-taken(layout));
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Live bytes of this thread since some point, with the process to itself from there on.
struct Since(isize, #[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

impl Since {
    fn now() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        stay_here();
        PEAK.set(LIVE.get());
        Self(LIVE.get(), alone)
    }

    fn bytes(&self) -> usize {
        usize::try_from(LIVE.get() - self.0).unwrap_or(0)
    }

    /// The most there was since this was last asked.
    fn peak(&self) -> usize {
        usize::try_from(PEAK.replace(LIVE.get()) - self.0).unwrap_or(0)
    }
}

/// What a store takes that holds nothing: the slots of its timers, the locks of its tables, and what
/// these keep for the next record. It is not counted against `max_bytes`.
const NOTHING: usize = 144 << 10;

/// What may wait beside that on a machine with many processors, until those who looked at it are
/// seen to be gone.
fn waiting() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    processors.next_power_of_two().saturating_sub(8) * (16 << 10)
}

/// Keeps the test on one processor: each has memory of a store to itself.
fn stay_here() {
    #[cfg(target_os = "linux")]
    {
        use nix::{sched, unistd::Pid};
        let mut here = sched::CpuSet::new();
        here.set(sched::sched_getcpu().unwrap()).unwrap();
        sched::sched_setaffinity(Pid::from_raw(0), &here).unwrap();
    }
}

fn roomy(builder: StoreBuilder) -> StoreBuilder {
    builder.max_bytes(8 << 30)
}

#[test]
fn r25_the_bytes_that_are_counted_cover_those_that_are_taken() {
    // The first store of a process makes what all of them share.
    let alone = Since::now();
    drop(by_hand());
    drop(alone);
    for (keys, key, lines, body) in [
        (100_000, 1, 0, 0),
        (100_000, 36, 1, 200),
        (50_000, 255, 0, 1),
        (10_000, 100, 30, 5_000),
        // Just behind a doubling of what a buffer of header lines would take on its way.
        (10_000, 1, 34, 0),
    ] {
        for shares in [false, true] {
            let start = Since::now();
            let (store, clock) = by_hand_with(|builder| {
                let builder = roomy(builder);
                if shares { builder.max_keys_per_account(10) } else { builder }
            });
            let endpoint = "e".repeat(key);
            let mut closest = 0.0_f64;
            for n in 0..keys {
                // With shares each key has an account of its own: the worst there is.
                let account = if shares { n } else { 0 };
                complete_one(&store, [account, n], &endpoint, lines, body);
                if n % 8 != 0 {
                    continue;
                }
                let (live, counted) = (start.bytes(), store.stats().bytes);
                assert!(live <= counted + NOTHING + waiting(), "{live} of {counted} after {n}");
                // With so many keys what is counted for each outweighs what is counted for none: a
                // store's own bytes, and tables and cells that wait until nobody can see them.
                if n >= 2_000 {
                    assert!(live <= counted + waiting(), "{live} of {counted} after {n}");
                    closest = closest.max(live as f64 / counted as f64);
                }
            }
            // And it is no wild guess: a limit in bytes is worth something.
            assert!(closest > 0.6, "{closest} at most, keys of {key}, bodies of {body}");
            let (live, counted) = (start.bytes(), store.stats().bytes);
            clock.advance(LEASE + SECOND);
            store.sweep();
            assert!(start.bytes() <= store.stats().bytes);
            clock.advance(2 * DAY);
            store.sweep();
            assert_eq!(store.stats().bytes, 0);
            assert!(start.bytes() <= NOTHING, "{}", start.bytes());
            drop((store, clock, endpoint));
            assert_eq!(start.bytes(), 0);
            // Last, because the first line takes memory for the harness.
            println!(
                "key {key}, lines {lines}, body {body}, shares {shares}: {} of {} bytes for each \
                 key, {:.0} % at most",
                live / keys,
                counted / keys,
                100.0 * closest
            );
        }
    }
}

/// Claims and completes one key, as long as `endpoint`, and replays it.
fn complete_one(store: &Store, [account, key]: [usize; 2], endpoint: &str, lines: u8, body: usize) {
    let width = endpoint.len();
    let (account, key) = (format!("{account:0width$}"), format!("{key:0width$}"));
    let id = Identity::new(&account, endpoint, &key).unwrap();
    let permit = store.claim(&id, same()).won();
    let mut outcome = Outcome::new(201);
    for line in 0..lines {
        outcome = outcome.header(format!("x-line-{line}"), "application/json");
    }
    permit.complete(outcome.body(vec![7; body])).unwrap();
    // The first replay makes the counts by which the bytes are shared.
    store.claim(&id, same()).replayed();
}

#[test]
fn r25_the_bytes_that_are_counted_cover_those_that_are_taken_while_they_go() {
    // They came in the course of a day and go in the course of the next.
    let (start, keys) = (Since::now(), 96_000);
    let (store, clock) = by_hand_with(roomy);
    for n in 0..keys {
        complete_one(&store, [0, n], "e", 0, 0);
        if n % 1_000 == 999 {
            clock.advance(DAY / 96);
            store.sweep();
        }
    }
    for _ in 0..94 {
        let (live, counted) = (start.bytes(), store.stats().bytes);
        let left = store.stats().keys;
        let most = counted + waiting() + if left < 10_000 { NOTHING } else { 0 };
        assert!(live <= most, "{live} of {counted}, {left} left");
        clock.advance(DAY / 96);
        store.sweep();
    }
    assert_eq!(store.stats().keys, 1_000);
    clock.advance(DAY);
    store.sweep();
    assert!(start.bytes() <= NOTHING);
}

#[test]
fn r25_what_is_forgotten_here_and_there_leaves_holes_but_no_more() {
    // Half of the rest is forgotten, again and again. The timers of those that stay keep the memory
    // of their neighbours' timers until new ones come: 33 bytes for each key there was at most.
    const KEYS: usize = 100_000;
    let mut left: Vec<usize> = (0..KEYS).collect();
    let mut dice = Dice::new(7);
    let start = Since::now();
    let (store, clock) = by_hand_with(roomy);
    for n in 0..KEYS {
        complete_one(&store, [0, n], "e", 0, 0);
    }
    clock.advance(LEASE + SECOND);
    while left.len() > 1_000 {
        left.retain(|n| {
            let stays = dice.roll(2) == 0;
            stays || {
                let key = n.to_string();
                !store.forget(&Identity::new("0", "e", &key).unwrap()).unwrap()
            }
        });
        store.sweep();
        let (live, counted) = (start.bytes(), store.stats().bytes);
        let most = counted + waiting() + 33 * KEYS;
        assert!(live <= most, "{live} of {counted}, {} left", left.len());
    }
}

#[test]
fn case_082_expired_records_are_freed_though_nobody_asks_for_them_again() {
    let start = Since::now();
    let (store, clock) = by_hand_with(|builder| roomy(builder).retention(SECOND));
    for n in 0..200_000 {
        let key = n.to_string();
        store.claim(&id(&key), same()).won().complete(outcome(&key)).unwrap();
    }
    assert!(start.bytes() > 200_000 * 100);
    clock.advance(3 * SECOND);
    assert_eq!(store.sweep().reaped, 200_000);
    assert!(start.bytes() <= NOTHING, "{}", start.bytes());
}

#[test]
fn case_085_the_byte_limit_holds_for_megabyte_bodies_and_a_full_store_is_flat() {
    const MIB: usize = 1 << 20;
    let start = Since::now();
    let (store, _) = by_hand_with(|builder| builder.max_bytes(256 * MIB));
    let (mut kept, mut refused) = (0, 0);
    let mut calls = Vec::new();
    for n in 0..10_000 {
        let key = n.to_string();
        let before = CALLS.get();
        match store.claim(&id(&key), same()) {
            Ok(Claim::Won(permit)) => {
                // Zeroed pages, so that only the bytes are counted and none is touched.
                kept +=
                    u32::from(permit.complete(Outcome::new(200).body(vec![0; MIB])).unwrap().kept);
            }
            Err(ClaimError::Full { .. }) => refused += 1,
            other => panic!("{other:?}"),
        }
        calls.push(CALLS.get() - before);
        drop(key);
        assert!(store.stats().bytes <= 256 * MIB);
        let most = start.peak() - calls.capacity() * size_of::<usize>();
        // What is offered and not kept is the caller's.
        assert!(most <= 257 * MIB + waiting(), "{most} bytes after {n}");
    }
    let not_kept = store.stats().not_kept_no_room;
    assert!(kept == 255 && refused > 0 && not_kept > 0, "{kept}, {refused}, {not_kept}");
    // Neither the look nor the refusal walks over what is there.
    let (early, late) = (&calls[300..1_300], &calls[9_000..]);
    let mean = |calls: &[usize]| calls.iter().sum::<usize>() / calls.len();
    assert!(mean(late) <= mean(early) + 1, "{} and {}", mean(early), mean(late));
}

#[test]
fn case_088_a_hundred_rounds_of_everything_leave_the_heap_as_after_the_second() {
    let start = Since::now();
    let (store, clock) = by_hand_with(|builder| {
        roomy(builder).on_lapse(Lapse::TakeOver).max_keys_per_account(1 << 20)
    });
    let mut second = 0;
    for round in 0..100 {
        fill_and_empty(&store, &clock);
        let stats = store.stats();
        assert_eq!((stats.keys, stats.bytes, stats.in_flight, stats.waiters), (0, 0, 0, 0));
        let live = start.bytes();
        match round {
            0 => {}
            1 => second = live,
            _ => assert_eq!(live, second, "after round {round}"),
        }
    }
    assert!(second <= NOTHING, "{second}");
}

/// Every way in which a record can come and go.
fn fill_and_empty(store: &Store, clock: &oncekey::ManualClock) {
    for n in 0..1_000_u32 {
        let key = n.to_string();
        let id = Identity::new(&key, "POST /charges", &key).unwrap();
        let permit = store.claim(&id, same()).won();
        let mut tasks: Vec<_> =
            (0..n % 3).map(|_| Task::listed(store.claim(&id, same()).pending())).collect();
        match n % 10 {
            0 => drop(permit.complete(outcome(&key)).unwrap()),
            1 => drop(permit.complete_not_kept().unwrap()),
            2 => permit.hold().unwrap(),
            3 => permit.release().unwrap(),
            4 => permit.release_with(outcome(&key)).unwrap(),
            5 => drop(permit),
            6 => assert!(store.forget_forced(&id)),
            7 => {
                permit.complete(outcome(&key)).unwrap();
                store.claim(&id, same()).replayed();
                assert!(store.forget(&id).unwrap());
            }
            8 => {
                clock.advance(LEASE);
                store.claim(&id, same()).won().release().unwrap();
            }
            _ => {
                permit.hold().unwrap();
                store.resolve(&id, oncekey::Resolution::Complete(outcome(&key))).unwrap();
            }
        }
        // Of those who wait, some look and some leave.
        if n % 2 == 0 {
            tasks.iter_mut().for_each(|task| drop(task.poll()));
        }
    }
    clock.advance(LEASE);
    store.sweep();
    clock.advance(2 * DAY);
    store.sweep();
    clock.advance(2 * DAY);
    store.sweep();
}

#[test]
fn r15_those_who_waited_leave_nothing_behind() {
    let start = Since::now();
    let (store, _) = by_hand();
    let mut second = 0;
    for round in 0..20 {
        let permit = store.claim(&id("k"), same()).won();
        let tasks: Vec<_> =
            (0..1_000).map(|_| Task::listed(store.claim(&id("k"), same()).pending())).collect();
        drop(tasks);
        // Drains that nobody waits for any more, one after the other.
        permit.release().unwrap();
        let live = start.bytes();
        match round {
            0 => {}
            1 => second = live,
            _ => assert_eq!(live, second, "after round {round}"),
        }
    }
}

#[test]
fn drain_a_look_that_was_given_up_leaves_nothing_behind() {
    let start = Since::now();
    let (store, _) = by_hand();
    let _permit = store.claim(&id("k"), same()).won();
    let mut second = 0;
    for round in 0..1_000 {
        // An operator's loop: how far is it?
        assert!(!store.drain().wait_timeout(std::time::Duration::ZERO));
        let live = start.bytes();
        match round {
            0 => {}
            1 => second = live,
            _ => assert_eq!(live, second, "after round {round}"),
        }
    }
}

/// Replaces one value of a KiB after the other. Unoptimised it does a tenth of the case's ten
/// million.
#[test]
fn case_093_what_is_replaced_does_not_pile_up() {
    const LIMIT: usize = 16 << 20;
    let times = if cfg!(debug_assertions) { 1_000_000 } else { 10_000_000 };
    let start = Since::now();
    let (store, _) = by_hand_with(|builder| builder.max_bytes(LIMIT));
    let id = id("k");
    for n in 0..times {
        store.claim(&id, same()).won().complete(Outcome::new(200).body(vec![0; 1024])).unwrap();
        assert!(store.forget(&id).unwrap());
        if n % 1_000 == 0 {
            let peak = start.peak();
            assert!(peak <= LIMIT + LIMIT / 2, "{peak} after {n}");
            store.sweep();
        }
    }
}

/// A thread that has looked into the store once and sleeps, and replays that are held for long: no
/// round of others' work costs more than the one before.
#[test]
fn r26_a_thread_that_sleeps_and_a_replay_that_is_held_hold_nothing_back() {
    let start = Since::now();
    let (store, clock) = by_hand_with(roomy);
    let large = Outcome::new(200).body(vec![7; 100_000]);
    store.claim(&id("small"), same()).won().complete(Outcome::new(200).body("7")).unwrap();
    store.claim(&id("large"), same()).won().complete(large.clone()).unwrap();
    let (looked, asleep) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    let _watchdog = watchdog();
    let live: Vec<usize> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let held = [
                store.claim(&id("small"), same()).replayed(),
                store.claim(&id("large"), same()).replayed(),
            ];
            looked.wait();
            asleep.wait();
            assert_eq!(held.map(|replay| replay.bytes().len()), [1, 100_000]);
        });
        looked.wait();
        let round = |_| {
            for n in 0..5_000 {
                let key = n.to_string();
                store.claim(&id(&key), same()).won().complete(outcome(&key)).unwrap();
            }
            clock.advance(2 * DAY);
            store.sweep();
            clock.advance(2 * DAY);
            store.sweep();
            start.bytes()
        };
        let live = (0..20).map(round).collect();
        asleep.wait();
        live
    });
    // Only now: a test that fails must not leave the other thread asleep.
    assert!(live[2..].iter().all(|live_then| *live_then == live[1]), "{live:?}");
}
