//! Counts and bytes, and refusal before anything runs (R25).
//!
//! Ground rules: room is taken before a record is put into the index and given back after it was
//! taken out, each exactly once. The limits are never passed; what is refused has left no trace.

use dashmap::{DashMap, Entry};

use crate::{
    index::Removed,
    record::PLACE,
    sync::{AtomicUsize, Ordering},
};

/// What stood in the way of a new record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The count or the byte limit of the store.
    Store,
    /// The account's share.
    Account,
}

/// The room of a store.
#[derive(Debug)]
pub(crate) struct Room {
    keys: AtomicUsize,
    bytes: AtomicUsize,
    max_keys: usize,
    max_bytes: usize,
    shares: Option<Shares>,
}

/// How many keys each account has. An account's place here is paid for under the lock of its
/// entry: when it is made and when it goes.
#[derive(Debug)]
struct Shares {
    max_keys: usize,
    keys: DashMap<Box<[u8]>, usize, ahash::RandomState>,
    removed: Removed,
}

/// Bytes that the place of an account with a name of `len` bytes takes: as large as one in the
/// index, and the name as the allocator rounds it up.
pub(crate) fn place(len: usize) -> usize {
    PLACE + len + 24
}

impl Room {
    pub(crate) fn new(max_keys: usize, max_bytes: usize, max_each: Option<usize>) -> Self {
        Self {
            keys: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            max_keys,
            max_bytes,
            shares: max_each.map(|max_keys| Shares {
                max_keys,
                keys: DashMap::with_hasher(ahash::RandomState::new()),
                removed: Removed::default(),
            }),
        }
    }

    /// Takes room for one record of `account` of `bytes` bytes.
    pub(crate) fn enter(&self, account: &[u8], bytes: usize) -> Result<(), Refusal> {
        if let Some(shares) = &self.shares {
            shares.enter(account, |place| self.grow(place))?;
        }
        if !take(&self.keys, 1, self.max_keys) {
            self.leave_share(account);
            return Err(Refusal::Store);
        }
        if !take(&self.bytes, bytes, self.max_bytes) {
            self.keys.fetch_sub(1, Ordering::Relaxed);
            self.leave_share(account);
            return Err(Refusal::Store);
        }
        Ok(())
    }

    /// Gives the room of one record back.
    pub(crate) fn leave(&self, account: &[u8], bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.keys.fetch_sub(1, Ordering::Relaxed);
        self.leave_share(account);
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

    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether 80 % of either limit is taken.
    pub(crate) fn nearly_full(&self) -> bool {
        let over = |taken: usize, limit: usize| taken as u128 * 5 >= limit as u128 * 4;
        over(self.keys(), self.max_keys) || over(self.bytes(), self.max_bytes)
    }

    fn leave_share(&self, account: &[u8]) {
        if let Some(shares) = &self.shares {
            shares.leave(account, |place| self.shrink(place));
        }
    }

    /// Gives memory back that a burst has left behind (R26).
    pub(crate) fn trim(&self) {
        if let Some(shares) = &self.shares {
            shares.removed.shrink_if_sparse(&shares.keys);
        }
    }
}

impl Shares {
    /// Takes one key of the account's share; `pay` takes the room of a new account.
    fn enter(&self, account: &[u8], pay: impl FnOnce(usize) -> bool) -> Result<(), Refusal> {
        let more = |keys: &mut usize| {
            if *keys < self.max_keys {
                *keys += 1;
                return Ok(());
            }
            Err(Refusal::Account)
        };
        // Looked up by reference first: a known account allocates nothing.
        if let Some(mut keys) = self.keys.get_mut(account) {
            return more(&mut keys);
        }
        match self.keys.entry(account.into()) {
            Entry::Occupied(mut known) => more(known.get_mut()),
            Entry::Vacant(new) if pay(place(account.len())) => {
                new.insert(1);
                Ok(())
            }
            Entry::Vacant(_) => Err(Refusal::Store),
        }
    }

    /// Gives one key back; `back` takes the room of an account that has no more.
    fn leave(&self, account: &[u8], back: impl FnOnce(usize)) {
        if let Some(mut keys) = self.keys.get_mut(account) {
            *keys = keys.saturating_sub(1);
        }
        let gone = self.keys.remove_if(account, |_, keys| *keys == 0);
        if gone.is_some() {
            self.removed.up();
            back(place(account.len()));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r25_a_refusal_leaves_no_trace() {
        let paid = 2 * place(1);
        let room = Room::new(2, paid + 100, Some(1));
        assert_eq!(room.enter(b"a", paid + 101), Err(Refusal::Store));
        assert_eq!(room.enter(b"a", usize::MAX), Err(Refusal::Store));
        assert_eq!((room.keys(), room.bytes()), (0, 0));
        assert_eq!(room.enter(b"a", 60), Ok(()));
        assert_eq!(room.enter(b"a", 1), Err(Refusal::Account));
        assert_eq!(room.enter(b"b", 41), Err(Refusal::Store));
        assert_eq!(room.enter(b"b", 40), Ok(()));
        assert!(!room.grow(1));
        assert_eq!(room.enter(b"c", 0), Err(Refusal::Store));
        room.leave(b"a", 60);
        assert_eq!(room.enter(b"a", 60), Ok(()));
        room.leave(b"a", 60);
        room.leave(b"b", 40);
        assert_eq!((room.keys(), room.bytes()), (0, 0));
        assert!(room.shares.as_ref().is_some_and(|shares| shares.keys.is_empty()));
    }

    #[test]
    fn r25_a_gauge_warns_at_80_percent_of_either_limit() {
        let room = Room::new(10, 1_000, None);
        room.enter(b"", 799).unwrap();
        assert!(!room.nearly_full());
        assert!(room.grow(1));
        assert!(room.nearly_full());
    }
}
