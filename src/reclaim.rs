//! When memory that others may still look at is given back. The only file that names
//! crossbeam-epoch.
//!
//! Ground rules: a thread looks at shared memory only while it holds a [`Guard`]. Memory is first
//! made unreachable (no slot, table or directory leads to it), then handed to [`Guard::defer`],
//! which runs once every guard that was there is gone. What runs there must own what it touches: a
//! store may be gone by then.
//!
//! Under the model checker a stand-in keeps everything until the model ends: the real one makes
//! three threads too many to walk through. The real one is checked by the address sanitizer.

// Room 1 of 3 with unsafe code: it only passes on what its callers promise.
#![allow(unsafe_code)]

/// While it lives, nothing that is reachable now is freed.
pub(crate) struct Guard(imp::Guard);

/// Holds off reclamation. Cheap, and reentrant.
pub(crate) fn pin() -> Guard {
    Guard(imp::pin())
}

impl Guard {
    /// Runs `free` once all present guards are gone.
    ///
    /// # Safety
    ///
    /// What `free` frees can no longer be reached by a thread that pins from now on. `free` may run
    /// on any thread, at any later time.
    pub(crate) unsafe fn defer(&self, free: impl FnOnce() + 'static) {
        // SAFETY: as promised by the caller.
        unsafe { self.0.defer(free) }
    }

    /// Lets other threads free what this one has deferred: for what is large, or when a thread may
    /// not come back for long.
    pub(crate) fn flush(&self) {
        self.0.flush();
    }
}

#[cfg(not(oncekey_loom))]
mod imp {
    pub(super) struct Guard(crossbeam_epoch::Guard);

    pub(super) fn pin() -> Guard {
        Guard(crossbeam_epoch::pin())
    }

    impl Guard {
        /// # Safety
        ///
        /// As for the outer one.
        pub(super) unsafe fn defer(&self, free: impl FnOnce() + 'static) {
            // SAFETY: the caller promises that the memory is unreachable and that the closure may
            // run on any thread.
            unsafe { self.0.defer_unchecked(free) }
        }

        pub(super) fn flush(&self) {
            self.0.flush();
        }
    }
}

#[cfg(oncekey_loom)]
mod imp {
    use std::cell::RefCell;

    thread_local! {
        /// All threads of a model run on one thread of the system.
        static KEPT: RefCell<Vec<Box<dyn FnOnce()>>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) struct Guard;

    pub(super) fn pin() -> Guard {
        Guard
    }

    impl Guard {
        /// # Safety
        ///
        /// As for the outer one.
        pub(super) unsafe fn defer(&self, free: impl FnOnce() + 'static) {
            KEPT.with(|kept| kept.borrow_mut().push(Box::new(free)));
        }

        pub(super) fn flush(&self) {}
    }

    /// What a model calls at its end.
    #[cfg(test)]
    pub(super) fn free_all() {
        loop {
            let kept = KEPT.with(|kept| std::mem::take(&mut *kept.borrow_mut()));
            if kept.is_empty() {
                return;
            }
            kept.into_iter().for_each(|free| free());
        }
    }
}

/// Frees what the stand-in has kept: the last act of a model.
#[cfg(all(test, oncekey_loom))]
pub(crate) fn free_all() {
    imp::free_all();
}
