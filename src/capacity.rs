//! Counts and bytes, and refusal before anything runs (R25).
//!
//! Ground rules: room is taken before a claim is put into the index and given back by the one
//! thread that ended it, each exactly once. The limits are never passed; what is refused has left
//! no trace.
//!
//! A lane draws room for several claims at a time and takes from that; so claims rarely write to
//! what all share. Before a refusal all that was drawn is called back, under the lock under which
//! it is drawn: a refusal means that the room is in use, but for what threads took in that moment.
//!
//! ```text
//! credit of a lane   | keys 20 | bytes 44 |      taken by compare-and-swap, both or nothing
//! ```

use std::collections::HashMap;

use crate::sync::{Mutex, Ordering, Tally};

/// What stood in the way of a new record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The count or the byte limit of the store.
    Store,
    /// The account's share.
    Account,
}

/// So many claims a lane draws room for at a time.
const DRAW: u64 = 64;

const BYTES: u32 = 44;
const KEY: u64 = 1 << BYTES;

/// More than this in a lane goes back.
const MOST_KEYS: u64 = 4 * DRAW;
const MOST_BYTES: u64 = 1 << 21;

/// The room of a store.
#[derive(Debug)]
pub(crate) struct Room {
    /// What lanes have drawn and not used.
    credits: Box<[Credit]>,
    drawn: Mutex<Drawn>,
    max_keys: u64,
    max_bytes: u64,
    shares: Option<Shares>,
}

/// No ordering anywhere: each is a number that is right by itself.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Credit(Tally);

/// What is in use or in the lanes.
#[derive(Debug, Default)]
struct Drawn {
    keys: u64,
    bytes: u64,
}

/// How many keys each account has. An account's place here is paid for under its lock: when it is
/// made and when it goes.
#[derive(Debug)]
struct Shares {
    max_keys: usize,
    hasher: ahash::RandomState,
    shards: Box<[Mutex<Share>]>,
}

type Share = HashMap<Box<[u8]>, usize, ahash::RandomState>;

/// Bytes that the place of an account with a name of `len` bytes takes: 25 bytes, of which a table
/// has up to three for each account and the old one beside it while it grows, and the name as the
/// allocator rounds it up.
pub(crate) fn place(len: usize) -> usize {
    96 + len + 24
}

impl Room {
    pub(crate) fn new(
        lanes: usize,
        max_keys: usize,
        max_bytes: usize,
        max_each: Option<usize>,
    ) -> Self {
        Self {
            credits: (0..lanes).map(|_| Credit::default()).collect(),
            drawn: Mutex::default(),
            max_keys: max_keys as u64,
            max_bytes: max_bytes as u64,
            shares: max_each.map(|max_keys| Shares {
                max_keys,
                hasher: ahash::RandomState::new(),
                shards: (0..64).map(|_| Mutex::default()).collect(),
            }),
        }
    }

    /// Takes room for one record of `account` of `bytes` bytes. True in the answer if the lane had
    /// to draw.
    pub(crate) fn enter(&self, lane: usize, account: &[u8], bytes: usize) -> Result<Drew, Refusal> {
        if let Some(shares) = &self.shares {
            shares.enter(account, |place| self.grow(lane, place))?;
        }
        self.take(lane, 1, bytes).ok_or_else(|| {
            self.leave_share(lane, account);
            Refusal::Store
        })
    }

    /// Gives the room of one record back.
    pub(crate) fn leave(&self, lane: usize, account: &[u8], bytes: usize) {
        self.give(lane, 1, bytes as u64);
        self.leave_share(lane, account);
    }

    /// Takes `bytes` more for a record that is there.
    pub(crate) fn grow(&self, lane: usize, bytes: usize) -> bool {
        bytes == 0 || self.take(lane, 0, bytes).is_some()
    }

    /// Gives `bytes` of a record that stays back.
    pub(crate) fn shrink(&self, lane: usize, bytes: usize) {
        if bytes != 0 {
            self.give(lane, 0, bytes as u64);
        }
    }

    /// Gives the room of many records back, but for their accounts' shares.
    pub(crate) fn leave_many(&self, keys: u64, bytes: u64) {
        let mut drawn = self.drawn.lock();
        drawn.keys = drawn.keys.saturating_sub(keys);
        drawn.bytes = drawn.bytes.saturating_sub(bytes);
    }

    /// Whether accounts have shares that their records count against.
    pub(crate) fn has_shares(&self) -> bool {
        self.shares.is_some()
    }

    pub(crate) fn leave_share(&self, lane: usize, account: &[u8]) {
        if let Some(shares) = &self.shares {
            shares.leave(account, |place| self.shrink(lane, place));
        }
    }

    /// Keys and bytes in use.
    pub(crate) fn used(&self) -> (usize, usize) {
        let drawn = self.drawn.lock();
        let (mut keys, mut bytes) = (drawn.keys, drawn.bytes);
        for Credit(credit) in &self.credits {
            let credit = credit.load(Ordering::Relaxed);
            keys = keys.saturating_sub(credit >> BYTES);
            bytes = bytes.saturating_sub(credit & (KEY - 1));
        }
        (keys as usize, bytes as usize)
    }

    /// Whether 80 % of either limit is taken.
    pub(crate) fn nearly_full(&self) -> bool {
        let (keys, bytes) = self.used();
        let over = |taken: usize, limit: u64| taken as u128 * 5 >= u128::from(limit) * 4;
        over(keys, self.max_keys) || over(bytes, self.max_bytes)
    }

    /// Calls back what the lanes have drawn. True if nothing is in use: then the next claim draws.
    pub(crate) fn call_back(&self) -> bool {
        let mut drawn = self.drawn.lock();
        self.recall(&mut drawn);
        drawn.keys == 0
    }

    fn take(&self, lane: usize, keys: u64, bytes: usize) -> Option<Drew> {
        // A lane's bytes are below MOST_BYTES and its keys below MOST_KEYS, give or take one
        // return a thread, so the parts do not run into each other.
        let wanted = bytes as u64;
        let Credit(credit) = self.credits.get(lane)?;
        let spent = credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |credit| {
            let (has_keys, has_bytes) = (credit >> BYTES, credit & (KEY - 1));
            (has_keys >= keys && has_bytes >= wanted)
                .then(|| (has_keys - keys) << BYTES | (has_bytes - wanted))
        });
        if spent.is_ok() {
            return Some(Drew(false));
        }
        let mut drawn = self.drawn.lock();
        let own = credit.swap(0, Ordering::Relaxed);
        drawn.keys -= own >> BYTES;
        drawn.bytes -= own & (KEY - 1);
        let fits = |drawn: &Drawn| {
            keys <= self.max_keys - drawn.keys && wanted <= self.max_bytes - drawn.bytes
        };
        if !fits(&drawn) {
            self.recall(&mut drawn);
            if !fits(&drawn) {
                return None;
            }
        }
        drawn.keys += keys;
        drawn.bytes += wanted;
        // Not more than a share of what is left, so that lanes do not call back all the time.
        let sharers = 4 * self.credits.len() as u64;
        let more_keys = (DRAW * keys).min((self.max_keys - drawn.keys) / sharers);
        let more_bytes = (DRAW * wanted.min(MOST_BYTES / DRAW / 2))
            .min((self.max_bytes - drawn.bytes) / sharers);
        drawn.keys += more_keys;
        drawn.bytes += more_bytes;
        credit.fetch_add(more_keys << BYTES | more_bytes, Ordering::Relaxed);
        Some(Drew(true))
    }

    fn give(&self, lane: usize, keys: u64, bytes: u64) {
        let Some(Credit(credit)) = self.credits.get(lane) else { return };
        if bytes >= MOST_BYTES {
            self.leave_many(keys, bytes);
            return;
        }
        let before = credit.fetch_add(keys << BYTES | bytes, Ordering::Relaxed);
        if before >> BYTES >= MOST_KEYS || before & (KEY - 1) >= MOST_BYTES {
            let mut drawn = self.drawn.lock();
            let own = credit.swap(0, Ordering::Relaxed);
            drawn.keys -= own >> BYTES;
            drawn.bytes -= own & (KEY - 1);
        }
    }

    fn recall(&self, drawn: &mut Drawn) {
        for Credit(credit) in &self.credits {
            let credit = credit.swap(0, Ordering::Relaxed);
            drawn.keys -= credit >> BYTES;
            drawn.bytes -= credit & (KEY - 1);
        }
    }
}

/// Whether a lane has drawn room: from time to time, and whenever nothing was in use before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drew(pub(crate) bool);

impl Shares {
    fn shard(&self, account: &[u8]) -> &Mutex<Share> {
        &self.shards[self.hasher.hash_one(account) as usize % self.shards.len()]
    }

    /// Takes one key of the account's share; `pay` takes the room of a new account.
    fn enter(&self, account: &[u8], pay: impl FnOnce(usize) -> bool) -> Result<(), Refusal> {
        let mut share = self.shard(account).lock();
        // Looked up by reference first: a known account allocates nothing.
        match share.get_mut(account) {
            Some(keys) if *keys < self.max_keys => *keys += 1,
            Some(_) => return Err(Refusal::Account),
            None if pay(place(account.len())) => {
                share.insert(account.into(), 1);
            }
            None => return Err(Refusal::Store),
        }
        Ok(())
    }

    /// Gives one key back; `back` takes the room of an account that has no more.
    fn leave(&self, account: &[u8], back: impl FnOnce(usize)) {
        let mut share = self.shard(account).lock();
        let Some(keys) = share.get_mut(account) else { return };
        *keys -= 1;
        if *keys == 0 {
            share.remove(account);
            if share.is_empty() {
                *share = Share::default();
            } else if share.len() * 3 < share.capacity() && share.capacity() > 16 {
                share.shrink_to_fit();
            }
            drop(share);
            back(place(account.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(room: &Room, account: &[u8], bytes: usize) -> Result<(), Refusal> {
        room.enter(0, account, bytes).map(drop)
    }

    #[test]
    fn r25_a_refusal_leaves_no_trace() {
        let paid = 2 * place(1);
        let room = Room::new(2, 2, paid + 100, Some(1));
        assert_eq!(enter(&room, b"a", paid + 101), Err(Refusal::Store));
        assert_eq!(enter(&room, b"a", usize::MAX), Err(Refusal::Store));
        assert_eq!(room.used(), (0, 0));
        assert_eq!(enter(&room, b"a", 60), Ok(()));
        assert_eq!(enter(&room, b"a", 1), Err(Refusal::Account));
        assert_eq!(enter(&room, b"b", 41), Err(Refusal::Store));
        assert_eq!(enter(&room, b"b", 40), Ok(()));
        assert!(!room.grow(0, 1));
        assert_eq!(enter(&room, b"c", 0), Err(Refusal::Store));
        room.leave(0, b"a", 60);
        assert_eq!(enter(&room, b"a", 60), Ok(()));
        room.leave(0, b"a", 60);
        room.leave(1, b"b", 40);
        assert_eq!(room.used(), (0, 0));
        assert!(room.call_back());
        let shares = room.shares.as_ref().unwrap();
        assert!(shares.shards.iter().all(|share| share.lock().is_empty()));
    }

    #[test]
    fn r25_what_one_lane_has_drawn_another_can_use() {
        let room = Room::new(4, 1_000, 100_000, None);
        for n in 0..1_000 {
            assert_eq!(room.enter(n % 4, b"", 100).map(drop), Ok(()), "{n}");
            assert_eq!(room.used(), (n + 1, 100 * (n + 1)));
        }
        assert_eq!(enter(&room, b"", 0), Err(Refusal::Store));
        // All given back in one lane.
        (0..1_000).for_each(|_| room.leave(3, b"", 100));
        assert_eq!(room.used(), (0, 0));
        assert_eq!(enter(&room, b"", 100_000), Ok(()));
    }

    #[test]
    fn r25_a_gauge_warns_at_80_percent_of_either_limit() {
        let room = Room::new(1, 10, 1_000, None);
        enter(&room, b"", 799).unwrap();
        assert!(!room.nearly_full());
        assert!(room.grow(0, 1));
        assert!(room.nearly_full());
    }
}
