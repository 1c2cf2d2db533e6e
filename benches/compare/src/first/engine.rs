//! What a claim meets.
//!
//! Ground rules: every decision is taken by one compare-and-swap of the record's state word, by
//! whoever comes first; the other thread sees what was decided and looks again. No lock is held
//! while another room's lock is taken, but for a record's `parts` (taken first) and a wheel's or
//! the index's shard inside it. Time is read once for each verb.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use oncekey::{Clock, Fingerprint, Outcome};

use super::{
    capacity::Room,
    clock::Millis,
    expire::{Alarm, Expiry},
    index::Index,
    record::Record,
    waiters::Waiters,
    word::{Kind, View, Word},
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) retention: Millis,
    pub(crate) lease: Millis,
    pub(crate) tick: Millis,
    pub(crate) reserve: usize,
    pub(crate) max_keys: usize,
    pub(crate) max_bytes: usize,
}

/// The counters that the paths of the comparison touch: their cost belongs to the core.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) won: AtomicU64,
    pub(crate) replays: AtomicU64,
    pub(crate) replays_not_kept: AtomicU64,
    pub(crate) met_in_flight: AtomicU64,
    pub(crate) met_held: AtomicU64,
    pub(crate) mismatches: AtomicU64,
    pub(crate) completed: AtomicU64,
    pub(crate) released: AtomicU64,
    pub(crate) handed_over: AtomicU64,
    pub(crate) held: AtomicU64,
    pub(crate) lapsed: AtomicU64,
    pub(crate) expired: AtomicU64,
    pub(crate) not_kept: AtomicU64,
}

pub(crate) fn up(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The state that all handles of a store share.
pub(crate) struct Engine {
    pub(crate) limits: Limits,
    clock: Box<dyn Clock>,
    /// The clock's reading when the store was built.
    origin: Duration,
    pub(super) index: Index,
    pub(super) room: Room,
    pub(super) expiry: Expiry,
    pub(crate) waiters: Waiters,
    pub(crate) counters: Counters,
    /// The next token's number.
    tokens: AtomicU64,
    /// Identities in flight. `SeqCst` with `draining`: either a claim sees the drain, or the drain
    /// sees the claim.
    pub(super) in_flight: AtomicUsize,
    pub(super) draining: AtomicBool,
}

/// What a claim has met.
pub(crate) enum Met {
    Won(Arc<Record>, u64),
    Replay(Answer),
    NotKept,
    InFlight(Arc<Record>),
    Mismatch,
    Held,
    Full,
}

/// A stored outcome and its times.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) outcome: Outcome,
    /// For the caller to show; nobody does here.
    _age: Duration,
    _remaining: Duration,
}

/// How an old record answers a claim.
enum Meeting {
    Answer(Met),
    /// The record is over; a new one may take its place. The word is the one it ended with.
    Over(Word),
}

impl Engine {
    pub(crate) fn new(limits: Limits, clock: Box<dyn Clock>) -> Self {
        Self {
            limits,
            origin: clock.now(),
            clock,
            index: Index::new(),
            room: Room::new(limits.max_keys, limits.max_bytes),
            expiry: Expiry::new(limits.tick),
            waiters: Waiters::new(1_024, 16_384),
            counters: Counters::default(),
            tokens: AtomicU64::new(1),
            in_flight: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
        }
    }

    pub(crate) fn now(&self) -> Millis {
        Millis::of(self.clock.now().saturating_sub(self.origin))
    }

    pub(crate) fn keys(&self) -> usize {
        self.room.keys()
    }

    pub(crate) fn alarm(&self) -> &Arc<Alarm> {
        self.expiry.alarm()
    }

    /// Makes the caller the owner of the identity in `frame`, or tells what is there.
    pub(crate) fn claim(&self, frame: &[u8], asked: Fingerprint) -> Met {
        let met = self.claim_at(frame, asked, self.now());
        match &met {
            Met::Won(..) => up(&self.counters.won),
            Met::Replay(_) => up(&self.counters.replays),
            Met::NotKept => up(&self.counters.replays_not_kept),
            Met::InFlight(_) => up(&self.counters.met_in_flight),
            Met::Mismatch => up(&self.counters.mismatches),
            Met::Held => up(&self.counters.met_held),
            Met::Full => {}
        }
        met
    }

    fn claim_at(&self, frame: &[u8], asked: Fingerprint, now: Millis) -> Met {
        let mut fresh = None;
        let mut found = self.index.find(frame);
        loop {
            let Some(old) = found else {
                let Some(new) = self.fresh(&mut fresh, frame, asked, now) else { return Met::Full };
                match self.index.insert(&new) {
                    Ok(()) => return self.won(new, now),
                    Err(there) => found = Some(there),
                }
                continue;
            };
            match self.meet(&old, asked, now) {
                Meeting::Answer(met) => {
                    if let Some(unused) = fresh {
                        self.unuse(&unused);
                    }
                    return met;
                }
                Meeting::Over(word) => {
                    let Some(new) = self.fresh(&mut fresh, frame, asked, now) else {
                        return Met::Full;
                    };
                    if self.index.replace(&old, &new) {
                        self.count_end(word);
                        self.vacate(&old);
                        return self.won(new, now);
                    }
                    found = self.index.find(frame);
                }
            }
        }
    }

    /// Makes the record of a new claim, unless an earlier round has made it already.
    fn fresh(
        &self,
        fresh: &mut Option<Arc<Record>>,
        frame: &[u8],
        fingerprint: Fingerprint,
        now: Millis,
    ) -> Option<Arc<Record>> {
        if let Some(record) = fresh {
            return Some(Arc::clone(record));
        }
        let bytes = Record::cost(frame.len()) + self.limits.reserve;
        if !self.room.enter(bytes) {
            // What has ended already makes room, one bounded step of it.
            let due = self.expiry.next().is_some_and(|next| next <= now);
            if !due || self.sweep_step(now).reaped == 0 || !self.room.enter(bytes) {
                return None;
            }
        }
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        let record = Arc::new(Record::new(
            frame.into(),
            self.index.hash(frame),
            fingerprint,
            self.next_token(),
            now,
            now.plus(self.limits.lease),
            bytes,
        ));
        if self.draining.load(Ordering::SeqCst) {
            self.unuse(&record);
            return None;
        }
        *fresh = Some(Arc::clone(&record));
        Some(record)
    }

    /// Gives back what [`Engine::fresh`] has taken for a record that was not put in.
    fn unuse(&self, record: &Arc<Record>) {
        self.room.leave(std::mem::take(&mut record.parts().room));
        self.landed(Kind::InFlight);
    }

    fn won(&self, record: Arc<Record>, now: Millis) -> Met {
        let lease = now.plus(self.limits.lease);
        self.expiry.by_tick(&record, &mut record.parts(), lease);
        let token = record.token();
        Met::Won(record, token)
    }

    pub(super) fn next_token(&self) -> u64 {
        self.tokens.fetch_add(1, Ordering::Relaxed)
    }

    /// What `old` answers. The mismatch test comes before the state test; only what is over is not
    /// asked.
    fn meet(&self, old: &Arc<Record>, asked: Fingerprint, now: Millis) -> Meeting {
        loop {
            let word = old.word();
            let view = word.view(now);
            if view == View::Gone {
                // A held record may still be settled by its owner: only a CAS ends it.
                if word.kind() == Kind::Held && old.swap(word, word.ended()).is_err() {
                    continue;
                }
                return Meeting::Over(word);
            }
            if asked != *old.fingerprint() {
                return Meeting::Answer(Met::Mismatch);
            }
            return Meeting::Answer(match view {
                View::InFlight => Met::InFlight(Arc::clone(old)),
                View::Lapsed => {
                    self.hold_lapsed(old, word, now);
                    continue;
                }
                View::Held => Met::Held,
                View::Completed => match self.answer(old, word, now) {
                    Some(answer) => Met::Replay(answer),
                    None => Met::NotKept,
                },
                View::NotKept | View::Gone => Met::NotKept,
            });
        }
    }

    /// Sees to it that the waiters of `record` are woken when its lease lapses.
    pub(crate) fn watch(&self, record: &Arc<Record>, deadline: Millis) {
        self.expiry.exactly(record, &mut record.parts(), deadline);
    }

    /// The outcome of a completed record, as seen in `word`.
    pub(crate) fn answer(&self, record: &Record, word: Word, now: Millis) -> Option<Answer> {
        let parts = record.parts();
        Some(Answer {
            outcome: parts.outcome.clone()?,
            _age: now.since(parts.settled),
            _remaining: word.at().since(now),
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.expiry.alarm().shut();
    }
}
