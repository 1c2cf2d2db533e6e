//! One claim and what became of it.
//!
//! Ground rules: a record belongs to one claim of one identity. A takeover or a claim after the
//! end makes a new record, which takes the old one's place in the index; only a hand-over to a
//! waiter keeps the record and gives it a new token. Identity and fingerprint never change (R12).
//!
//! Invariants:
//!
//! 1. `state` changes by compare-and-swap only; `Completed`, `NotKept` and `Ended` are final.
//! 2. `parts.outcome` is written by the thread that moved `state` to `Completed`, before it gives
//!    the lock of `parts` back; who reads it has seen `Completed` and takes that lock. So an
//!    outcome is whole or absent (R16).
//! 3. `parts.linked` turns false once, by the thread that took the record out of the index; that
//!    thread gives timer and room back.

pub(crate) mod word;

use crate::{
    clock::Millis,
    fingerprint::Fingerprint,
    identity::Identity,
    outcome::Outcome,
    sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering},
    wheel::TimerId,
};

use word::{Kind, Word};

/// Bytes a record costs beside its identity and outcome. `tests/core_memory.rs` holds it against a
/// counting allocator.
///
/// - The record itself with its two counts.
/// - Its place in the index: 25 bytes, of which a table has 8/7 for each record when it is full,
///   twice that after it has grown, three times before it is shrunk; and the old table of one shard
///   beside it while it grows.
/// - Its timer: 32 bytes, 24 for each 32 of them, and half of that again.
/// - What the allocator puts before record and identity and rounds up.
const OVERHEAD: usize = size_of::<Record>() + 16 + PLACE + 48 + 48;

/// See `OVERHEAD`.
pub(crate) const PLACE: usize = 96;

/// One claim of one identity.
#[derive(Debug)]
pub(crate) struct Record {
    /// A [`Word`]. Compare-and-swap only, AcqRel: it publishes what was written before it to
    /// whoever loads it with Acquire.
    state: AtomicU64,
    /// The number of the claim's token; zero before the record is in the index. Written under the
    /// lock of its place there, when it is put in, so that a later claim of the identity has a
    /// higher one (R9); and at a hand-over by the owner that gives the record up, while it holds
    /// the lock of the waiters' list.
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
    /// Bytes taken from the store's room for this record. Changes while the record is in flight or
    /// held, and when it leaves the index.
    pub(crate) room: usize,
    /// See invariant 3.
    pub(crate) linked: bool,
}

impl Record {
    /// A record in flight, whose lease ends at `deadline`. `room` bytes are taken for it. It has no
    /// token yet.
    pub(crate) fn new(
        identity: Arc<[u8]>,
        hash: u64,
        fingerprint: Fingerprint,
        now: Millis,
        deadline: Millis,
        room: usize,
    ) -> Self {
        Self {
            state: AtomicU64::new(Word::new(Kind::InFlight, deadline).bits()),
            token: AtomicU64::new(0),
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
        // Acquire, partner of the Release in `name_owner`.
        self.token.load(Ordering::Acquire)
    }

    /// Names the owner, see `token`. At a hand-over before the state moves.
    pub(crate) fn name_owner(&self, token: u64, now: Millis) {
        self.claimed.store(now.0, Ordering::Relaxed);
        self.token.store(token, Ordering::Release);
    }

    pub(crate) fn claimed(&self) -> Millis {
        Millis(self.claimed.load(Ordering::Relaxed))
    }

    pub(crate) fn frame(&self) -> &Arc<[u8]> {
        &self.identity
    }

    pub(crate) fn account(&self) -> &[u8] {
        Identity::from_frame(&self.identity).account()
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
