//! The one place that names atomics, cells and locks, so that a model checker can take their place.
//!
//! Under `--cfg oncekey_loom` everything that carries an ordering is loom's. What is left to `std`
//! there carries none: `Arc` keeps things alive, and a [`Tally`] is a number that nobody concludes
//! anything from but its own value. A checker would only walk more ways to the same end.

pub(crate) use std::sync::{Arc, Weak, atomic::AtomicU64 as Tally};

/// A full fence, after a sequentially consistent change (an addition, a swap). Where such a change is
/// a full fence of the processor already, only the compiler is told.
pub(crate) fn fence_after_seq_cst_change() {
    if cfg!(all(target_arch = "x86_64", not(oncekey_loom))) {
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

#[cfg(oncekey_loom)]
pub(crate) use self::model::*;
#[cfg(not(oncekey_loom))]
pub(crate) use self::real::*;

#[cfg(not(oncekey_loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

    pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

    /// Sequentially consistent operations before it are ordered before those after it.
    pub(crate) fn between_seq_cst() {}

    /// Plain memory that threads hand to each other by an atomic.
    #[derive(Debug)]
    #[repr(transparent)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// To read through.
        pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        /// To write through.
        pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}

#[cfg(oncekey_loom)]
mod model {
    use std::time::Duration;

    /// A lock of the stand-ins: no model is to look into it.
    #[cfg(not(oncekey_reclaim))]
    pub(crate) use std::sync::Mutex as Quiet;

    pub(crate) use loom::{
        cell::UnsafeCell,
        sync::{
            MutexGuard,
            atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
        },
    };

    /// loom takes SeqCst operations as AcqRel; the language does not.
    pub(crate) fn between_seq_cst() {
        fence(Ordering::SeqCst);
    }

    /// Walks through all interleavings of `run` with at most `bound` preemptions, and says how many
    /// they were. loom's environment variables, by which a model ends early and as if it had
    /// passed, are not heard.
    #[cfg(test)]
    pub(crate) fn explore(bound: usize, run: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(bound);
        builder.max_branches = 100_000;
        builder.max_permutations = None;
        builder.max_duration = None;
        builder.checkpoint_file = None;
        let executions = std::sync::Arc::new(crate::sync::Tally::new(0));
        let counted = std::sync::Arc::clone(&executions);
        builder.check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            run();
        });
        println!("{} executions at {bound} preemptions", executions.load(Ordering::Relaxed));
    }

    /// loom's lock with parking_lot's face: a model does not outlive a panic.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// No model waits here: time does not pass in one.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar;

    impl Condvar {
        pub(crate) fn notify_all(&self) {}

        pub(crate) fn wait<T>(&self, _: &mut MutexGuard<'_, T>) {}

        pub(crate) fn wait_for<T>(&self, _: &mut MutexGuard<'_, T>, _: Duration) {}
    }
}
