//! The timers of all records, and the thread that drives the sweep.
//!
//! Ground rules: each record in the index has one timer, which may fire early but never late; what
//! to do with a fired record is the engine's business. The wheels stand in shards by the record's
//! hash. Timers are rounded up to the store's tick, so that the sweep wakes at most once a tick;
//! the timer of a record with waiters is exact, because a waiter never sleeps past a lapsed lease.
//!
//! The sleeping sweep and a new timer meet in `Alarm`: the sweep says until when it sleeps, an
//! earlier timer wakes it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::{Condvar, Mutex};

use super::{
    clock::Millis,
    record::{Parts, Record},
    wheel::Wheel,
};

const SHARDS: u64 = 16;

/// How many fired timers are taken from a wheel while its lock is held.
pub(crate) const STEP: usize = 256;

/// The timers of a store.
pub(crate) struct Expiry {
    shards: Box<[Mutex<Wheel<Arc<Record>>>]>,
    tick: Millis,
    alarm: Arc<Alarm>,
}

impl Expiry {
    pub(crate) fn new(tick: Millis) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(Wheel::new(0))).collect(),
            tick,
            alarm: Arc::default(),
        }
    }

    pub(crate) fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }

    /// Sees to it that `record` is looked at soon after `at`: within a tick.
    pub(crate) fn by_tick(&self, record: &Arc<Record>, parts: &mut Parts, at: Millis) {
        let tick = self.tick.0;
        self.exactly(record, parts, Millis(at.0.div_ceil(tick).saturating_mul(tick)));
    }

    /// Sees to it that `record` is looked at no later than at `at`. A timer that fires earlier
    /// stays: whoever looks at the record then sets the next one.
    pub(crate) fn exactly(&self, record: &Arc<Record>, parts: &mut Parts, at: Millis) {
        if !parts.linked {
            return;
        }
        let mut wheel = self.shard(record).lock();
        if let Some((timer, set)) = parts.timer {
            if set <= at {
                return;
            }
            wheel.remove(timer);
        }
        parts.timer = Some((wheel.insert(at.0, Arc::clone(record)), at));
        drop(wheel);
        self.alarm.no_later_than(at);
    }

    /// Takes the timer of a record away that has left the index.
    pub(crate) fn cancel(&self, record: &Arc<Record>, parts: &mut Parts) {
        if let Some((timer, _)) = parts.timer.take() {
            // Bound to a name so that the record is dropped after the lock.
            let _record = self.shard(record).lock().remove(timer);
        }
    }

    /// Appends at most [`STEP`] records of each shard whose timer has fired by `now`. True if more
    /// are due.
    pub(crate) fn fired(&self, now: Millis, fired: &mut Vec<Arc<Record>>) -> bool {
        let mut more = false;
        for wheel in &self.shards {
            more |= wheel.lock().advance(now.0, STEP, fired);
        }
        more
    }

    /// A time before which no timer fires.
    pub(crate) fn next(&self) -> Option<Millis> {
        self.shards.iter().filter_map(|wheel| wheel.lock().next_deadline()).min().map(Millis)
    }

    fn shard(&self, record: &Record) -> &Mutex<Wheel<Arc<Record>>> {
        &self.shards[(record.hash() % SHARDS) as usize]
    }
}

/// Where the sweep sleeps.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    /// Until when the sweep sleeps, in milliseconds; zero while no thread does. `SeqCst` with the
    /// wheels' locks between: either the sweep sees the new timer, or the timer sees that the
    /// sweep is about to sleep too long.
    until: AtomicU64,
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct State {
    rung: bool,
    shut: bool,
}

impl Alarm {
    fn no_later_than(&self, at: Millis) {
        if at.0 < self.until.load(Ordering::SeqCst) {
            self.state.lock().rung = true;
            self.bell.notify_all();
        }
    }

    /// Ends the sweep's thread.
    pub(crate) fn shut(&self) {
        self.state.lock().shut = true;
        self.bell.notify_all();
    }
}

/// What the sweep's thread needs of a store, which it does not keep alive.
pub(crate) trait Sweeper: Send + 'static {
    /// Does what is due; `None` if the store is gone. Answers with how long to sleep at most
    /// (`None`: until a timer is set), asked after everything due was done.
    fn sweep(&self, about_to_sleep: impl Fn(Option<Millis>)) -> Option<Option<Duration>>;
}

/// Starts the thread of the sweep. It ends when `store` is gone or `alarm` is shut.
pub(crate) fn spawn(alarm: Arc<Alarm>, store: impl Sweeper) -> std::io::Result<()> {
    let run = move || {
        loop {
            alarm.state.lock().rung = false;
            // From here on every timer rings the bell.
            alarm.until.store(u64::MAX, Ordering::SeqCst);
            let about_to_sleep = |next: Option<Millis>| {
                alarm.until.store(next.map_or(u64::MAX, |at| at.0), Ordering::SeqCst);
            };
            let Some(nap) = store.sweep(about_to_sleep) else { return };
            let mut state = alarm.state.lock();
            if state.shut {
                return;
            }
            if !state.rung {
                match nap {
                    Some(nap) => drop(alarm.bell.wait_for(&mut state, nap)),
                    None => alarm.bell.wait(&mut state),
                }
            }
            if state.shut {
                return;
            }
        }
    };
    std::thread::Builder::new().name("first-sweep".into()).spawn(run).map(drop)
}
