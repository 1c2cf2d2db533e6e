//! R22 to R24: when a record ends. And the drain, which ends the taking in.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Wake, Waker},
    thread,
    time::Duration,
};

use oncekey::{
    Claim, ClaimError, Clock, ConfigError, EntryState, Lapse, Settled, Store, StoreBuilder, Sweep,
};

use crate::common::*;

#[test]
fn r22_retention_counts_from_completion_and_reads_do_not_extend_it() {
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    permit.attend().unwrap();
    clock.advance(10 * LEASE);
    permit.complete(outcome("1")).unwrap();
    for hour in 1..24 {
        clock.advance(HOUR);
        store.sweep();
        match store.claim(&id("k"), fp("")) {
            Ok(Claim::Replay(replay)) => {
                assert_eq!((replay.age(), replay.remaining()), (hour * HOUR, DAY - hour * HOUR));
            }
            other => panic!("hour {hour}: {other:?}"),
        }
        assert!(matches!(store.observe(&id("k"), fp("")), Some(Claim::Replay(_))));
        assert_eq!(store.look_up(&id("k")).unwrap().remaining, DAY - hour * HOUR);
    }
    clock.advance(HOUR - MS);
    store.claim(&id("k"), fp("")).replayed();
    clock.advance(MS);
    store.claim(&id("k"), fp("")).won().release().unwrap();
}

/// As the system's coarse clock: a reading is up to 4 ms behind, and a store cuts it to whole
/// milliseconds.
#[derive(Clone, Default)]
struct Behind {
    micros: Arc<AtomicU64>,
}

impl Clock for Behind {
    fn now(&self) -> Duration {
        Duration::from_millis(self.micros.load(Ordering::SeqCst) / 4_000 * 4)
    }

    fn lag(&self) -> Duration {
        5 * MS
    }
}

#[test]
fn r22_a_clock_that_is_behind_cuts_nothing_short() {
    let clock = Behind::default();
    let builder = Store::builder().retention(10 * MS).sweep(Sweep::Manual).clock(clock.clone());
    let store = builder.build().unwrap();
    assert_eq!(store.retention(), 10 * MS, "as it was asked for");
    clock.micros.store(3_900, Ordering::SeqCst);
    store.claim(&id("k"), fp("")).won().complete(outcome("1")).unwrap();
    // By the clock 12 ms have passed, in truth 9.
    clock.micros.store(12_900, Ordering::SeqCst);
    store.claim(&id("k"), fp("")).replayed();
    clock.micros.store(3_900 + 10_000 + 2 * 5_000, Ordering::SeqCst);
    store.claim(&id("k"), fp("")).won().release().unwrap();
}

#[test]
fn r22_nothing_is_shown_at_or_after_its_end_though_nobody_sweeps() {
    let (store, clock) = by_hand_with(|builder| builder.tick(HOUR));
    store.claim(&id("completed"), fp("")).won().complete(outcome("1")).unwrap();
    store.claim(&id("not kept"), fp("")).won().complete_not_kept().unwrap();
    store.claim(&id("held"), fp("")).won().hold().unwrap();
    let permit = store.claim(&id("waited"), fp("")).won();
    let mut late = Task::listed(store.claim(&id("waited"), fp("")).pending());
    permit.complete(outcome("1")).unwrap();
    let keys = ["completed", "not kept", "held", "waited"];
    clock.advance(DAY - MS);
    for key in keys {
        assert!(store.look_up(&id(key)).is_some(), "{key}");
    }
    clock.advance(MS);
    for key in keys {
        assert!(store.look_up(&id(key)).is_none(), "{key}");
        assert!(store.observe(&id(key), fp("")).is_none(), "{key}");
        assert!(!store.forget(&id(key)).unwrap(), "{key}");
    }
    // The key is new, for a waiter too that looks so late.
    late.poll().yours().release().unwrap();
    for key in keys {
        store.claim(&id(key), fp("another body")).won().release().unwrap();
    }
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
}

#[test]
fn r22_the_sweep_gives_everything_back_within_a_tick() {
    let (store, clock) = by_hand();
    clock.advance(MS);
    let first = store.claim(&id("waited"), fp("")).won();
    let mut task = Task::listed(store.claim(&id("waited"), fp("")).pending());
    first.complete(outcome("1")).unwrap();
    task.poll().completed();
    store.claim(&id("completed"), fp("")).won().complete(outcome("1")).unwrap();
    store.claim(&id("not kept"), fp("")).won().complete_not_kept().unwrap();
    store.claim(&id("held"), fp("")).won().hold().unwrap();
    clock.advance(DAY - MS);
    assert_eq!(store.sweep().reaped, 0);
    assert_eq!(store.stats().keys, 4);
    clock.advance(SECOND);
    assert_eq!(store.sweep().reaped, 4);
    let stats = store.stats();
    assert_eq!((stats.keys, stats.bytes, stats.expired), (0, 0, 4));
}

#[test]
fn r22_a_record_that_was_moved_together_ends_no_later_than_others() {
    // Of the old ones one in ten stays, and is moved behind the young ones.
    let (store, clock) = by_hand_with(|builder| builder.retention(HOUR));
    let fill = |names: &str, many: usize| {
        for n in 0..many {
            let key = format!("{names}{n}");
            store.claim(&id(&key), same()).won().complete(outcome(&key)).unwrap();
        }
    };
    fill("old", 10_000);
    clock.advance(HOUR / 2);
    fill("young", 10_000);
    for n in (0..10_000).filter(|n| n % 10 != 0) {
        assert!(store.forget(&id(&format!("old{n}"))).unwrap());
    }
    store.sweep();
    for round in 0..3 {
        fill(&format!("more{round}-"), 1_000);
        clock.advance(SECOND);
        store.sweep();
    }
    assert_eq!(store.stats().keys, 14_000);
    clock.advance(HOUR / 2 - 3 * SECOND - MS);
    assert_eq!(store.sweep().reaped, 0);
    clock.advance(MS);
    assert_eq!(store.sweep().reaped, 1_000, "the old ones keep their room");
    assert_eq!(store.stats().keys, 13_000);
    clock.advance(HOUR / 2 + 3 * SECOND);
    assert_eq!(store.sweep().reaped, 13_000);
    assert_eq!((store.stats().keys, store.stats().bytes), (0, 0));
}

#[test]
fn r22_a_lapsed_claim_is_kept_for_its_retention_and_no_longer() {
    for on_lapse in [Lapse::Hold, Lapse::TakeOver] {
        let (store, clock) = by_hand_with(|builder| builder.on_lapse(on_lapse));
        let permit = store.claim(&id("k"), fp("")).won();
        clock.advance(LEASE);
        store.sweep();
        clock.advance(DAY - MS);
        store.sweep();
        assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)), "{on_lapse:?}");
        clock.advance(MS + SECOND);
        store.sweep();
        let stats = store.stats();
        assert_eq!((stats.keys, stats.bytes, stats.in_flight), (0, 0, 0), "{on_lapse:?}");
        assert!(permit.complete(outcome("1")).is_err());
    }
}

/// A clock that may be set to anything.
#[derive(Clone, Default)]
struct Erratic(Arc<Mutex<Duration>>);

impl Erratic {
    fn set(&self, now: Duration) {
        *self.0.lock().unwrap() = now;
    }
}

impl Clock for Erratic {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }
}

fn on(clock: &Erratic) -> Store {
    Store::builder().clock(clock.clone()).sweep(Sweep::Manual).build().unwrap()
}

#[test]
fn r23_a_clock_that_steps_back_ends_nothing_early_and_keeps_nothing_for_ever() {
    let clock = Erratic::default();
    clock.set(9 * DAY);
    let store = on(&clock);
    store.claim(&id("ended"), fp("")).won().complete(outcome("0")).unwrap();
    clock.set(10 * DAY);
    assert!(store.look_up(&id("ended")).is_none());
    store.claim(&id("before"), fp("")).won().complete(outcome("1")).unwrap();
    let running = store.claim(&id("running"), fp("")).won();
    let mut task = Task::listed(store.claim(&id("running"), fp("")).pending());
    clock.set(10 * DAY + HOUR / 2);
    running.renew().unwrap();
    let entry = store.look_up(&id("before"));
    // Back beyond the store's own beginning: time stands still until the clock has caught up.
    clock.set(Duration::ZERO);
    assert_eq!(store.look_up(&id("before")), entry);
    assert!(store.look_up(&id("ended")).is_none());
    store.sweep();
    assert_eq!(task.wakes(), 0);
    store.claim(&id("before"), fp("")).replayed();
    // More than a step of the sweep deals with.
    for n in 0..10_000 {
        let key = n.to_string();
        store.claim(&id(&key), fp("")).won().complete(outcome("2")).unwrap();
    }
    store.claim(&id("after"), fp("")).won().complete(outcome("2")).unwrap();
    store.claim(&id("after"), fp("")).replayed();
    assert_eq!(store.look_up(&id("running")).unwrap().state, EntryState::InFlight);
    running.renew().unwrap();
    for _ in 0..3 {
        store.sweep();
    }
    clock.set(10 * DAY + HOUR / 2);
    store.sweep();
    running.complete(outcome("3")).unwrap();
    task.poll().completed();
    for key in ["before", "after", "running"] {
        store.claim(&id(key), fp("")).replayed();
    }
    clock.set(12 * DAY);
    store.sweep();
    let stats = store.stats();
    assert_eq!((stats.keys, stats.bytes, stats.in_flight, stats.sweep_panics), (0, 0, 0, 0));
}

#[test]
fn r23_no_reading_of_the_clock_panics() {
    let clock = Erratic::default();
    for origin in [Duration::ZERO, 10 * DAY, Duration::MAX] {
        clock.set(origin);
        let store = on(&clock);
        for (n, now) in
            [Duration::MAX, Duration::ZERO, 20 * DAY, Duration::MAX, origin].into_iter().enumerate()
        {
            clock.set(now);
            let key = n.to_string();
            if let Ok(Claim::Won(permit)) = store.claim(&id(&key), fp("")) {
                let _ = permit.renew();
                let _ = permit.attend();
                let _ = permit.complete(outcome("1"));
            }
            let _ = store.observe(&id("0"), fp(""));
            let _ = store.look_up(&id("0"));
            store.sweep();
        }
    }
}

#[test]
fn r23_a_suspend_ends_no_attended_claim() {
    let (store, clock) = by_hand();
    let attended = store.claim(&id("attended"), fp("")).won();
    attended.attend().unwrap();
    let alone = store.claim(&id("alone"), fp("")).won();
    clock.advance(10 * LEASE);
    store.sweep();
    assert!(matches!(store.claim(&id("attended"), fp("")), Ok(Claim::InFlight(_))));
    assert!(matches!(store.claim(&id("alone"), fp("")), Ok(Claim::Held)));
    attended.complete(outcome("1")).unwrap();
    alone.complete(outcome("1")).unwrap();
}

type Set = fn(StoreBuilder, Duration) -> StoreBuilder;
const DURATIONS: [(&str, Set); 4] = [
    ("retention", StoreBuilder::retention),
    ("lease", StoreBuilder::lease),
    ("max_run", StoreBuilder::max_run),
    ("tick", StoreBuilder::tick),
];

#[test]
fn r23_a_duration_of_zero_is_refused_by_its_name() {
    for (name, set) in DURATIONS {
        let error = set(Store::builder(), Duration::ZERO).build().unwrap_err();
        assert_eq!(error, ConfigError::ZeroDuration { setting: name });
        assert!(error.to_string().contains(name));
    }
}

#[test]
fn r23_a_duration_too_long_is_clamped_and_one_too_short_is_a_millisecond() {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    for (name, set) in DURATIONS {
        let (store, clock) = by_hand_with(|builder| set(builder, Duration::MAX));
        let permit = store.claim(&id("k"), fp("")).won();
        permit.attend().unwrap();
        store.sweep();
        permit.complete(outcome("1")).unwrap();
        store.claim(&id("k"), fp("")).replayed();
        clock.advance(CENTURY - MS);
        store.sweep();
        match name {
            "retention" => {
                assert_eq!(store.retention(), CENTURY);
                store.claim(&id("k"), fp("")).replayed();
            }
            "lease" => assert_eq!(store.lease(), CENTURY),
            _ => {}
        }
        clock.advance(CENTURY);
        store.sweep();
        assert_eq!(store.stats().keys, 0, "{name}");

        let (store, clock) = by_hand_with(|builder| set(builder, Duration::from_nanos(1)));
        let permit = store.claim(&id("k"), fp("")).won();
        permit.complete(outcome("1")).unwrap();
        store.claim(&id("k"), fp("")).replayed();
        clock.advance(MS);
        if name == "retention" {
            assert_eq!(store.retention(), MS);
            assert!(store.observe(&id("k"), fp("")).is_none());
        }
        clock.advance(2 * DAY);
        store.sweep();
        assert_eq!(store.stats().keys, 0, "{name}");
    }
}

#[test]
fn r23_three_years_change_nothing() {
    // Across every wrap of a timer that counts milliseconds in 32 or 36 bits.
    let (store, clock) = by_hand();
    let hours = 3 * 366 * 24;
    for hour in 0..hours {
        let key = hour.to_string();
        store.claim(&id(&key), fp("")).won().complete(outcome(&key)).unwrap();
        clock.advance(HOUR);
        store.sweep();
        let oldest = (hour + 1_u64).saturating_sub(24);
        assert_eq!(store.stats().keys as u64, (hour + 1).min(24) - u64::from(hour >= 23));
        if hour >= 23 {
            assert!(store.look_up(&id(&oldest.to_string())).is_none(), "hour {hour}");
        }
        let next = (oldest + 1).min(hour).to_string();
        assert_eq!(store.claim(&id(&next), fp("")).replayed(), outcome(&next), "hour {hour}");
    }
    clock.advance(DAY);
    store.sweep();
    let stats = store.stats();
    assert_eq!((stats.keys, stats.bytes, stats.expired), (0, 0, hours));
}

#[test]
fn r24_an_unfinished_claim_delays_nobody() {
    let (store, clock) = by_hand();
    let endless = store.claim(&id("endless"), fp("")).won();
    for n in 0..1_000 {
        let key = n.to_string();
        store.claim(&id(&key), fp("")).won().complete(outcome("1")).unwrap();
    }
    for _ in 0..(25 * 60 + 1) {
        clock.advance(LEASE - MS);
        store.sweep();
        endless.renew().unwrap();
    }
    let stats = store.stats();
    assert_eq!((stats.keys, stats.in_flight, stats.expired), (1, 1, 1_000));
    endless.complete(outcome("1")).unwrap();
}

#[test]
fn r24_a_million_records_that_end_at_once_do_not_stall_a_claim() {
    // Nobody sweeps. A claim that needs room does one step of the sweep and goes on: it must not
    // pay for all of them.
    const MANY: usize = if cfg!(debug_assertions) { 200_000 } else { 1_000_000 };
    let _watchdog = watchdog_of(Duration::from_secs(300));
    let (store, clock) =
        by_hand_with(|builder| builder.max_keys(MANY).max_bytes(8 << 30).outcome_reserve(0));
    for n in 0..MANY {
        let key = format!("{n:07}");
        store.claim(&id(&key), same()).won().complete_not_kept().unwrap();
    }
    assert!(matches!(store.claim(&id("new"), same()), Err(ClaimError::Full { .. })));
    clock.advance(2 * DAY);
    let mut before = store.stats().keys;
    assert_eq!(before, MANY);
    let mut steps = 0;
    for n in 0..2_000 {
        let key = format!("new-{n}");
        // A step may only move timers closer; then the claim is refused, and not for long.
        match store.claim(&id(&key), same()) {
            Ok(claim) => Ok(claim).won().complete_not_kept().unwrap(),
            Err(ClaimError::Full { retry_after }) => {
                assert_eq!(retry_after, SECOND);
                continue;
            }
            Err(other) => panic!("{other}"),
        };
        let after = store.stats().keys;
        let reaped = (before + 1) - after;
        assert!(reaped <= 10_000, "one claim has reaped {reaped}");
        steps += usize::from(reaped > 0);
        before = after;
    }
    assert!(steps >= 1);
    let left = store.sweep().reaped;
    assert_eq!(store.stats().keys, before - left);
    assert!(store.stats().keys <= 2_000);
}

#[test]
fn drain_takes_nothing_in_and_lets_the_rest_go_on() {
    let (store, clock) = by_hand_with(|builder| builder.on_lapse(Lapse::TakeOver));
    store.claim(&id("done"), fp("")).won().complete(outcome("1")).unwrap();
    let owner = store.claim(&id("k"), fp("")).won();
    let lapsed = store.claim(&id("lapsed"), fp("")).won();
    clock.advance(LEASE);
    owner.renew().unwrap();
    let [mut heir, mut next] =
        [0, 1].map(|_| Task::listed(store.claim(&id("k"), fp("")).pending()));
    let drain = store.drain();
    // New identities and takeovers are refused, and a refused takeover ends nothing.
    for key in ["new", "lapsed"] {
        assert!(matches!(store.claim(&id(key), fp("")), Err(ClaimError::Draining)), "{key}");
    }
    assert_eq!(store.stats().refused_draining, 2);
    assert!(matches!(store.claim(&id("k"), fp("y")), Ok(Claim::Mismatch)));
    store.claim(&id("done"), fp("")).replayed();
    lapsed.complete(outcome("2")).unwrap();
    owner.release().unwrap();
    let owner = heir.poll().yours();
    assert!(!drain.wait_timeout(Duration::ZERO));
    owner.complete(outcome("3")).unwrap();
    assert_eq!(next.poll().completed(), outcome("3"));
    assert!(store.drain().wait_timeout(Duration::ZERO));
    // Dropping the drain has not reopened the store.
    assert!(matches!(store.claim(&id("new"), fp("")), Err(ClaimError::Draining)));
    assert_eq!((store.stats().in_flight, store.stats().won), (0, 4));
}

#[test]
fn drain_is_told_when_the_last_claim_has_landed_however_it_lands() {
    let _watchdog = watchdog();
    type Land = fn(&Store, oncekey::Permit);
    let landings: [(&str, Land); 6] = [
        ("complete", |_, it| assert!(it.complete(outcome("1")).unwrap().kept)),
        ("not kept", |_, it| assert!(!it.complete_not_kept().unwrap().kept)),
        ("release", |_, it| it.release().unwrap()),
        ("hold", |_, it| it.hold().unwrap()),
        ("drop", |_, it| drop(it)),
        ("forget", |store, it| {
            assert!(store.forget_forced(&id("k")));
            assert!(it.release().is_err());
        }),
    ];
    for (landing, land) in landings {
        let (store, _) = by_hand();
        let other = store.claim(&id("other"), fp("")).won();
        let permit = store.claim(&id("k"), fp("")).won();
        let task = store.drain();
        let drain = store.drain();
        let thread = thread::spawn(move || drain.wait_timeout(LONG));
        other.release().unwrap();
        assert!(!store.drain().wait_timeout(MS), "{landing}");
        land(&store, permit);
        assert!(thread.join().unwrap(), "{landing}");
        block_on(task);
    }
}

#[test]
fn drain_is_woken_by_the_last_landing_and_by_none_before() {
    struct Rung(AtomicU64);
    impl Wake for Rung {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let (store, _) = by_hand();
    let [first, last] = ["a", "b"].map(|key| store.claim(&id(key), fp("")).won());
    let rung = Arc::new(Rung(AtomicU64::new(0)));
    let waker = Waker::from(Arc::clone(&rung));
    let mut drain = pin!(store.drain());
    assert!(drain.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    first.release().unwrap();
    assert_eq!(rung.0.load(Ordering::SeqCst), 0);
    last.release().unwrap();
    assert_eq!(rung.0.load(Ordering::SeqCst), 1);
    assert!(drain.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
}

#[test]
fn drain_waits_for_nobody_where_nothing_runs() {
    let _watchdog = watchdog();
    let (store, clock) = by_hand();
    let permit = store.claim(&id("k"), fp("")).won();
    clock.advance(LEASE);
    store.sweep();
    // Held, not in flight: the late completion is still taken.
    block_on(store.drain());
    permit.complete(outcome("late")).unwrap();
    block_on(store.drain());
}

#[test]
fn drain_refuses_a_waiter_that_would_have_to_claim_anew() {
    let (store, _) = by_hand();
    let _permit = store.claim(&id("k"), fp("")).won();
    let mut task = Task::listed(store.claim(&id("k"), fp("")).pending());
    let _drain = store.drain();
    assert!(store.forget_forced(&id("k")));
    assert!(matches!(task.poll(), Some(Settled::Refused(ClaimError::Draining))));
    assert_eq!((store.stats().waiters, store.stats().in_flight), (0, 0));
}
