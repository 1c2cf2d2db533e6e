//! One claim and what became of it.
//!
//! Ground rules: a record belongs to one claim of one identity. A claim after the end makes a
//! new record, which takes the old one's place in the index; only a hand-over to a waiter keeps the
//! record and gives it a new token. Identity and fingerprint never change.
//!
//! Invariants:
//!
//! 1. `state` changes by compare-and-swap only; `Completed`, `NotKept` and `Ended` are final.
//! 2. `parts.outcome` is written by the thread that moved `state` to `Completed`, before it gives
//!    the lock of `parts` back; who reads it has seen `Completed` and takes that lock. So an
//!    outcome is whole or absent.
//! 3. `parts.linked` turns false once, by the thread that took the record out of the index; that
//!    thread gives timer and room back.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use oncekey::{Fingerprint, Outcome};
use parking_lot::{Mutex, MutexGuard};

use super::{
    clock::Millis,
    wheel::TimerId,
    word::{Kind, Word},
};

/// Bytes a record costs beside its identity and outcome: the record itself with its counts, its
/// place in the index (two words of key, one of value, at the worst load and beside the old table
/// while the index grows), its timer, and what the allocator rounds up.
const OVERHEAD: usize = size_of::<Record>() + 16 + 112 + 64 + 48;

/// One claim of one identity.
#[derive(Debug)]
pub(crate) struct Record {
    /// A [`Word`]. Compare-and-swap only, AcqRel: it publishes what was written before it to
    /// whoever loads it with Acquire.
    state: AtomicU64,
    /// The number of the claim's token. Written at the making, and at a hand-over by the owner
    /// that gives the record up, while it holds the lock of the waiters' list.
    token: AtomicU64,
    /// When the present owner won, in milliseconds. For the age shown to operators.
    claimed: AtomicU64,
    /// The framed identity.
    identity: Arc<[u8]>,
    /// The index's hash of `identity`.
    hash: u64,
    fingerprint: Fingerprint,
    parts: Mutex<Parts>,
}

/// What changes under the record's lock.
#[derive(Debug)]
pub(crate) struct Parts {
    /// See invariant 2.
    pub(crate) outcome: Option<Outcome>,
    /// When the record was completed or held.
    pub(crate) settled: Millis,
    /// The record's one timer and when it fires; it may fire early, never late.
    pub(crate) timer: Option<(TimerId, Millis)>,
    /// Bytes taken from the store's room for this record.
    pub(crate) room: usize,
    /// See invariant 3.
    pub(crate) linked: bool,
}

impl Record {
    /// A record in flight, whose lease ends at `deadline`. `room` bytes are taken for it.
    pub(crate) fn new(
        identity: Arc<[u8]>,
        hash: u64,
        fingerprint: Fingerprint,
        token: u64,
        now: Millis,
        deadline: Millis,
        room: usize,
    ) -> Self {
        Self {
            state: AtomicU64::new(Word::new(Kind::InFlight, deadline).bits()),
            token: AtomicU64::new(token),
            claimed: AtomicU64::new(now.0),
            identity,
            hash,
            fingerprint,
            parts: Mutex::new(Parts {
                outcome: None,
                settled: now,
                timer: None,
                room,
                linked: true,
            }),
        }
    }

    /// Bytes a record of an identity of `frame` bytes costs without an outcome.
    pub(crate) fn cost(frame: usize) -> usize {
        OVERHEAD + 16 + frame
    }

    /// The state. Acquire, partner of the CAS in [`Record::swap`]: who sees a state sees what led
    /// to it.
    pub(crate) fn word(&self) -> Word {
        Word::from_bits(self.state.load(Ordering::Acquire))
    }

    /// Moves the state from `old` to `new`; another thread's move in between is an error that
    /// tells the state it left.
    pub(crate) fn swap(&self, old: Word, new: Word) -> Result<(), Word> {
        self.state
            .compare_exchange(old.bits(), new.bits(), Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(Word::from_bits)
    }

    pub(crate) fn token(&self) -> u64 {
        // Acquire, partner of the Release in `hand_over`.
        self.token.load(Ordering::Acquire)
    }

    /// Names the next owner. Called under the lock of the waiters' list, before the state moves.
    pub(crate) fn hand_over(&self, token: u64, now: Millis) {
        self.claimed.store(now.0, Ordering::Relaxed);
        self.token.store(token, Ordering::Release);
    }

    pub(crate) fn frame(&self) -> &Arc<[u8]> {
        &self.identity
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    pub(crate) fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock()
    }
}
