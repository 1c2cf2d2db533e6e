//! Counts and bytes, and refusal before anything runs.
//!
//! Ground rules: room is taken before a record is put into the index and given back after it was
//! taken out, each exactly once. The limits are never passed; what is refused has left no trace.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The room of a store.
#[derive(Debug)]
pub(crate) struct Room {
    keys: AtomicUsize,
    bytes: AtomicUsize,
    max_keys: usize,
    max_bytes: usize,
}

impl Room {
    pub(crate) fn new(max_keys: usize, max_bytes: usize) -> Self {
        Self { keys: AtomicUsize::new(0), bytes: AtomicUsize::new(0), max_keys, max_bytes }
    }

    /// Takes room for one record of `bytes` bytes; false if there is none.
    pub(crate) fn enter(&self, bytes: usize) -> bool {
        if !take(&self.keys, 1, self.max_keys) {
            return false;
        }
        if !take(&self.bytes, bytes, self.max_bytes) {
            self.keys.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// Gives the room of one record back.
    pub(crate) fn leave(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.keys.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes `bytes` more for a record that is there.
    pub(crate) fn grow(&self, bytes: usize) -> bool {
        take(&self.bytes, bytes, self.max_bytes)
    }

    /// Gives `bytes` of a record that stays back.
    pub(crate) fn shrink(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }
}

/// Adds `more` unless that passes `limit`.
fn take(taken: &AtomicUsize, more: usize, limit: usize) -> bool {
    taken
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
            taken.checked_add(more).filter(|sum| *sum <= limit)
        })
        .is_ok()
}
