//! The thread that drives the sweep, and where it sleeps (R22 to R24).
//!
//! Ground rules: what is due is the engine's business. While anything is in the store the sweep
//! wakes once a tick, or earlier when a waiter's owner lapses (R13); an empty store lets it sleep
//! until a claim draws room again. So a claim never has to wake anybody but after such a drawing.
//!
//! The sleeping sweep and an earlier date meet in `Alarm`: the sweep says until when it sleeps, an
//! earlier date wakes it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use crate::{
    clock::{Millis, Timer},
    sync::{Arc, AtomicBool, AtomicU64, Condvar, Mutex, Ordering},
};

/// Where the sweep sleeps.
#[derive(Debug, Default)]
pub(crate) struct Alarm {
    /// Until when the sweep sleeps, in milliseconds; zero while no thread does. `SeqCst` with the
    /// locks of what it looks at between: either the sweep sees the new date, or who has set it
    /// sees that the sweep is about to sleep too long.
    until: AtomicU64,
    state: Mutex<State>,
    bell: Condvar,
    dead: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    rung: bool,
    /// Memory is to be made ready.
    short: bool,
    shut: bool,
}

impl Alarm {
    /// Sees to it that the sweep looks again no later than at `at`.
    pub(crate) fn no_later_than(&self, at: Millis) {
        if at.0 < self.until.load(Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Wakes the sweep's thread to make memory ready, and for nothing else.
    pub(crate) fn ask_for_memory(&self) {
        self.state.lock().short = true;
        self.bell.notify_all();
    }

    #[cfg(test)]
    pub(crate) fn is_asked(&self) -> bool {
        self.state.lock().short
    }

    fn ring(&self) {
        self.state.lock().rung = true;
        self.bell.notify_all();
    }

    /// Wakes the sweep if it sleeps because nothing was there.
    pub(crate) fn ring_if_idle(&self) {
        if self.until.load(Ordering::SeqCst) == u64::MAX {
            self.ring();
        }
    }

    /// Ends the sweep's thread.
    pub(crate) fn shut(&self) {
        self.state.lock().shut = true;
        self.bell.notify_all();
    }

    /// Whether the sweep's thread has ended though it was not told to.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }
}
/// What the sweep's thread needs of a store, which it does not keep alive.
pub(crate) trait Sweeper: Send + 'static {
    /// Does what is due; `None` if the store is gone. Answers with how long to sleep at most
    /// (`None`: until a timer is set), asked after everything due was done.
    fn sweep(&self, about_to_sleep: impl Fn(Option<Millis>)) -> Option<Option<Duration>>;
    /// Makes memory ready for those who come next, a bounded step of it.
    fn prepare(&self);
    /// A panic came out of [`Sweeper::sweep`].
    fn panicked(&self);
}

/// Starts the thread of the sweep. It ends when `store` is gone or `alarm` is shut.
pub(crate) fn spawn(alarm: Arc<Alarm>, store: impl Sweeper) -> std::io::Result<()> {
    let run = move || {
        drive(&alarm, &store);
        let_go(store);
    };
    std::thread::Builder::new().name("oncekey-sweep".into()).spawn(run).map(drop)
}

fn drive(alarm: &Alarm, store: &impl Sweeper) {
    let _death = NoteDeath(alarm);
    loop {
        alarm.state.lock().rung = false;
        // From here on every timer rings the bell.
        alarm.until.store(u64::MAX, Ordering::SeqCst);
        let about_to_sleep = |next: Option<Millis>| {
            alarm.until.store(next.map_or(u64::MAX, |at| at.0), Ordering::SeqCst);
        };
        let nap = catch_unwind(AssertUnwindSafe(|| store.sweep(about_to_sleep)));
        let nap = match nap {
            Ok(Some(nap)) => nap,
            Ok(None) => return,
            Err(_) => {
                store.panicked();
                Some(Duration::from_millis(100))
            }
        };
        let timer = Timer::start();
        let mut state = alarm.state.lock();
        while !state.shut && !state.rung {
            if std::mem::take(&mut state.short) {
                drop(state);
                store.prepare();
                state = alarm.state.lock();
                continue;
            }
            match nap.map(|nap| nap.saturating_sub(timer.elapsed())) {
                Some(Duration::ZERO) => break,
                Some(left) => drop(alarm.bell.wait_for(&mut state, left)),
                None => alarm.bell.wait(&mut state),
            }
        }
        if state.shut {
            return;
        }
    }
}

/// Perhaps the last that refers to the store. A function of its own, because the thread sanitizer
/// does not understand how a count of references ends and has to be told by name (`.ci/tsan.supp`).
#[inline(never)]
fn let_go(store: impl Sweeper) {
    drop(store);
}

/// Notes that the thread has ended by a panic that nobody contained.
struct NoteDeath<'a>(&'a Alarm);

impl Drop for NoteDeath<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.dead.store(true, Ordering::Relaxed);
        }
    }
}
