//! Finds the record of an identity, or makes it: the one place where two claims of one identity
//! meet.
//!
//! Ground rules: the index knows identities as framed bytes and compares them exactly (R1). Its
//! hash is keyed for each store (R27). It holds at most one record for an identity; a record is
//! replaced or removed only by who names the very record it means. No lock is held when a method
//! returns.

use std::hash::Hash;

use dashmap::{DashMap, Entry};

use crate::{
    record::Record,
    sync::{Arc, AtomicUsize, Ordering},
};

/// Identity -> record.
pub(crate) struct Index {
    map: DashMap<Arc<[u8]>, Arc<Record>, ahash::RandomState>,
    removed: Removed,
}

/// Removals since a table was last looked at for shrinking.
#[derive(Debug, Default)]
pub(crate) struct Removed(AtomicUsize);

impl Removed {
    pub(crate) fn up(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives memory of `map` back when less than a third of it is used (R26). A table is at least
    /// half full after it has grown or shrunk, so a removal pays for three places at most.
    pub(crate) fn shrink_if_sparse<K: Eq + Hash, V>(
        &self,
        map: &DashMap<K, V, ahash::RandomState>,
    ) {
        // A few places are not worth the look, which takes every lock.
        if self.0.load(Ordering::Relaxed) < 512 {
            return;
        }
        self.0.store(0, Ordering::Relaxed);
        if map.len() * 3 < map.capacity() {
            map.shrink_to_fit();
        }
    }
}

impl Index {
    pub(crate) fn new() -> Self {
        Self { map: DashMap::with_hasher(ahash::RandomState::new()), removed: Removed::default() }
    }

    pub(crate) fn hash(&self, frame: &[u8]) -> u64 {
        self.map.hasher().hash_one(frame)
    }

    pub(crate) fn find(&self, frame: &[u8]) -> Option<Arc<Record>> {
        self.map.get(frame).map(|found| Arc::clone(&found))
    }

    /// Puts `record` in if its identity is absent, else answers with what is there. `enter` runs
    /// when it is sure to be put in, after every record of the identity before it has left and
    /// before anybody sees this one.
    pub(crate) fn insert(
        &self,
        record: &Arc<Record>,
        enter: impl FnOnce(),
    ) -> Result<(), Arc<Record>> {
        match self.map.entry(Arc::clone(record.frame())) {
            Entry::Vacant(place) => {
                enter();
                place.insert(Arc::clone(record));
                Ok(())
            }
            Entry::Occupied(there) => Err(Arc::clone(there.get())),
        }
    }

    /// Puts `new` where `old` is. False if `old` is no longer there. `enter` as in
    /// [`Index::insert`].
    pub(crate) fn replace(
        &self,
        old: &Arc<Record>,
        new: &Arc<Record>,
        enter: impl FnOnce(),
    ) -> bool {
        match self.map.get_mut(&**old.frame()) {
            Some(mut there) if Arc::ptr_eq(&there, old) => {
                enter();
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
            self.removed.up();
        }
        removed
    }

    /// All records that `wanted` picks. Takes one shard's lock at a time.
    pub(crate) fn pick(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Arc<Record>> {
        self.map
            .iter()
            .filter(|entry| wanted(entry.value()))
            .map(|entry| Arc::clone(entry.value()))
            .collect()
    }

    /// Gives memory of the table back when little of it is used (R26).
    pub(crate) fn shrink_if_sparse(&self) {
        self.removed.shrink_if_sparse(&self.map);
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Index").field("len", &self.map.len()).finish()
    }
}
