//! Finds the record of an identity, or makes it: the one place where two claims of one identity
//! meet.
//!
//! Ground rules: the index knows identities as framed bytes and compares them exactly. Its
//! hash is keyed for each store. It holds at most one record for an identity; a record is
//! replaced or removed only by who names the very record it means. No lock is held when a method
//! returns.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use dashmap::{DashMap, Entry};

use super::record::Record;

/// Identity -> record.
pub(crate) struct Index {
    map: DashMap<Arc<[u8]>, Arc<Record>, ahash::RandomState>,
    /// Removals since the table was last looked at for shrinking.
    removed: AtomicUsize,
}

impl Index {
    pub(crate) fn new() -> Self {
        Self { map: DashMap::with_hasher(ahash::RandomState::new()), removed: AtomicUsize::new(0) }
    }

    pub(crate) fn hash(&self, frame: &[u8]) -> u64 {
        self.map.hasher().hash_one(frame)
    }

    pub(crate) fn find(&self, frame: &[u8]) -> Option<Arc<Record>> {
        self.map.get(frame).map(|found| Arc::clone(&found))
    }

    /// Puts `record` in if its identity is absent, else answers with what is there.
    pub(crate) fn insert(&self, record: &Arc<Record>) -> Result<(), Arc<Record>> {
        match self.map.entry(Arc::clone(record.frame())) {
            Entry::Vacant(place) => {
                place.insert(Arc::clone(record));
                Ok(())
            }
            Entry::Occupied(there) => Err(Arc::clone(there.get())),
        }
    }

    /// Puts `new` where `old` is. False if `old` is no longer there.
    pub(crate) fn replace(&self, old: &Arc<Record>, new: &Arc<Record>) -> bool {
        match self.map.get_mut(&**old.frame()) {
            Some(mut there) if Arc::ptr_eq(&there, old) => {
                *there = Arc::clone(new);
                true
            }
            _ => false,
        }
    }

    /// Takes `record` out. False if it is no longer there.
    pub(crate) fn remove(&self, record: &Arc<Record>) -> bool {
        let removed =
            self.map.remove_if(&**record.frame(), |_, there| Arc::ptr_eq(there, record)).is_some();
        if removed {
            self.removed.fetch_add(1, Ordering::Relaxed);
        }
        removed
    }

    /// Gives memory of the table back when little of it is used.
    pub(crate) fn shrink_if_sparse(&self) {
        if self.removed.load(Ordering::Relaxed) < 4_096 {
            return;
        }
        self.removed.store(0, Ordering::Relaxed);
        if self.map.len() * 8 < self.map.capacity() {
            self.map.shrink_to_fit();
        }
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index").field("len", &self.map.len()).finish()
    }
}
