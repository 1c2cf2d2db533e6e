//! The rules at work: what a claim meets, and how a record moves on.
//!
//! Ground rules: every decision is taken by one compare-and-swap of the record's state word, by
//! whoever comes first; the other thread sees what was decided and looks again. No lock is held
//! while another room's lock is taken, but for a record's `parts` (taken first) and a wheel's or
//! the index's shard inside it. Time is read once for each verb.
//!
//! This file claims; `settle.rs` ends claims; `operate.rs` serves operators and the sweep.

mod operate;
mod settle;

pub(crate) use settle::By;

use std::{hash::BuildHasher, task::Waker, time::Duration};

use crate::{
    capacity::{Refusal, Room},
    clock::{Clock, Millis},
    error::ClaimError,
    expire::Expiry,
    fingerprint::{Fingerprint, Scheme},
    identity::Identity,
    index::Index,
    outcome::Outcome,
    record::{
        Record,
        word::{Kind, View, Word},
    },
    stats::Counters,
    sync::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, Ordering},
    waiters::{Gift, Waiters},
};

/// What becomes of a permit that is dropped without a verb (R11).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Abandon {
    /// The identity is held: nobody knows whether the work was done. The safe default.
    #[default]
    Hold,
    /// The identity is released: right only where the work is known to leave nothing behind.
    Release,
}

/// What becomes of a claim whose lease has lapsed (R10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lapse {
    /// The identity is held until its retention ends or an operator resolves it. The default of a
    /// store in memory: the former owner may have done its work.
    #[default]
    Hold,
    /// The next caller takes the claim over and runs. Right where the work and its outcome are
    /// written in one transaction, so that the former owner cannot have done half of it.
    TakeOver,
}

/// The parsed settings of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) retention: Millis,
    pub(crate) lease: Millis,
    pub(crate) max_run: Millis,
    pub(crate) tick: Millis,
    pub(crate) reserve: usize,
    pub(crate) on_abandon: Abandon,
    pub(crate) on_lapse: Lapse,
}

/// The state that all handles of a store share.
pub(crate) struct Engine {
    pub(crate) settings: Settings,
    clock: Box<dyn Clock>,
    /// The clock's reading when the store was built.
    origin: Duration,
    index: Index,
    room: Room,
    expiry: Expiry,
    pub(crate) waiters: Waiters,
    pub(crate) counters: Counters,
    /// Random for each store: tokens of two processes never meet (R9).
    owner: u64,
    /// The next token's number. One sequence for all identities, so none repeats and each claim of
    /// an identity has a higher number than the one before.
    tokens: AtomicU64,
    /// Identities in flight. `SeqCst` with `draining`: either a claim sees the drain, or the drain
    /// sees the claim.
    in_flight: AtomicUsize,
    draining: AtomicBool,
    /// Who waits for the end of a drain.
    drained: Mutex<Vec<Waker>>,
}

/// What a claim has met.
pub(crate) enum Met {
    Won(Arc<Record>, u64),
    Replay(Answer),
    NotKept,
    InFlight(Arc<Record>),
    Mismatch,
    Held,
}

/// A stored outcome and its times.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) outcome: Outcome,
    pub(crate) age: Duration,
    pub(crate) remaining: Duration,
}

/// The fingerprint of an attempt, and how to make it by another scheme (R4).
pub(crate) struct Asked<'a> {
    own: Fingerprint,
    other: Option<Fingerprint>,
    translate: &'a mut dyn FnMut(Scheme) -> Option<Fingerprint>,
}

#[derive(PartialEq, Eq)]
enum Fit {
    Same,
    Different,
    UnknownScheme,
}

impl<'a> Asked<'a> {
    pub(crate) fn new(
        own: Fingerprint,
        translate: &'a mut dyn FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Self {
        Self { own, other: None, translate }
    }

    /// The fingerprint by another scheme, if a record asked for it.
    pub(crate) fn other(&self) -> Option<Fingerprint> {
        self.other
    }

    fn fit(&mut self, stored: &Fingerprint) -> Fit {
        let scheme = stored.scheme();
        let mut asked = Some(self.own).filter(|own| own.scheme() == scheme);
        if asked.is_none() {
            if self.other.is_none_or(|other| other.scheme() != scheme) {
                self.other = (self.translate)(scheme).filter(|made| made.scheme() == scheme);
            }
            asked = self.other;
        }
        match asked {
            Some(asked) if asked == *stored => Fit::Same,
            Some(_) => Fit::Different,
            None => Fit::UnknownScheme,
        }
    }
}

/// How an old record answers a claim.
enum Meeting {
    Answer(Met),
    /// The lease has lapsed and the claim may be taken over.
    Lapsed(Word),
    /// The record is over; a new one may take its place. The word is the one it ended with.
    Over(Word),
}

impl Engine {
    pub(crate) fn new(
        settings: Settings,
        clock: Box<dyn Clock>,
        room: Room,
        waiters: Waiters,
    ) -> Self {
        Self {
            settings,
            origin: clock.now(),
            clock,
            index: Index::new(),
            room,
            expiry: Expiry::new(settings.tick),
            waiters,
            counters: Counters::default(),
            owner: std::hash::RandomState::new().hash_one(std::process::id()),
            tokens: AtomicU64::new(1),
            in_flight: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            drained: Mutex::default(),
        }
    }

    pub(crate) fn now(&self) -> Millis {
        Millis::at(self.clock.now().saturating_sub(self.origin))
    }

    pub(crate) fn owner(&self) -> u64 {
        self.owner
    }

    /// Makes the caller the owner of the identity in `frame`, or tells what is there.
    pub(crate) fn claim(&self, frame: &[u8], asked: &mut Asked<'_>) -> Result<Met, ClaimError> {
        let now = self.now();
        let met = self.claim_at(frame, asked, now);
        match &met {
            Ok(Met::Won(..)) => self.counters.won.up(),
            Ok(met) => self.count(met),
            Err(ClaimError::Full { .. }) => self.counters.refused_full.up(),
            Err(ClaimError::AccountFull { .. }) => self.counters.refused_account.up(),
            Err(ClaimError::Draining) => self.counters.refused_draining.up(),
        }
        met
    }

    /// Tells what is there; `None` if a claim would win.
    pub(crate) fn observe(&self, frame: &[u8], asked: &mut Asked<'_>) -> Option<Met> {
        match self.meet(&self.index.find(frame)?, asked, self.now()) {
            Meeting::Answer(met) => {
                self.count(&met);
                Some(met)
            }
            Meeting::Lapsed(_) | Meeting::Over(_) => None,
        }
    }

    fn count(&self, met: &Met) {
        match met {
            Met::Won(..) => {}
            Met::Replay(_) => self.counters.replays.up(),
            Met::NotKept => self.counters.replays_not_kept.up(),
            Met::InFlight(_) => self.counters.met_in_flight.up(),
            Met::Mismatch => self.counters.mismatches.up(),
            Met::Held => self.counters.met_held.up(),
        }
    }

    fn claim_at(
        &self,
        frame: &[u8],
        asked: &mut Asked<'_>,
        now: Millis,
    ) -> Result<Met, ClaimError> {
        let mut fresh = None;
        let mut found = self.index.find(frame);
        loop {
            let Some(old) = found else {
                let new = self.fresh(&mut fresh, frame, asked.own, now)?;
                match self.index.insert(&new) {
                    Ok(()) => return Ok(self.won(new, now)),
                    Err(there) => found = Some(there),
                }
                continue;
            };
            match self.meet(&old, asked, now) {
                Meeting::Answer(met) => {
                    if let Some(unused) = fresh {
                        self.unuse(&unused);
                    }
                    return Ok(met);
                }
                Meeting::Lapsed(word) => {
                    // Room first: a claim that is refused must not have ended the old one.
                    self.fresh(&mut fresh, frame, asked.own, now)?;
                    self.take_over(&old, word, now);
                    found = Some(old);
                }
                Meeting::Over(word) => {
                    let new = self.fresh(&mut fresh, frame, asked.own, now)?;
                    if self.index.replace(&old, &new) {
                        self.count_end(word);
                        self.vacate(&old);
                        return Ok(self.won(new, now));
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
    ) -> Result<Arc<Record>, ClaimError> {
        if let Some(record) = fresh {
            return Ok(Arc::clone(record));
        }
        let bytes = Record::cost(frame.len()) + self.settings.reserve;
        let account = Identity::from_frame(frame).account();
        if let Err(refusal) = self.room.enter(account, bytes) {
            // What has ended already makes room, one bounded step of it.
            let due = self.expiry.next().is_some_and(|next| next <= now);
            if !due || self.sweep_step(now).reaped == 0 || self.room.enter(account, bytes).is_err()
            {
                return Err(self.refused(refusal, now));
            }
        }
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        let record = Arc::new(Record::new(
            frame.into(),
            self.index.hash(frame),
            fingerprint,
            self.next_token(),
            now,
            now.plus(self.settings.lease),
            bytes,
        ));
        if self.draining.load(Ordering::SeqCst) {
            self.unuse(&record);
            return Err(ClaimError::Draining);
        }
        *fresh = Some(Arc::clone(&record));
        Ok(record)
    }

    /// Gives back what [`Engine::fresh`] has taken for a record that was not put in.
    fn unuse(&self, record: &Arc<Record>) {
        self.room.leave(record.account(), std::mem::take(&mut record.parts().room));
        self.landed(Kind::InFlight);
    }

    fn won(&self, record: Arc<Record>, now: Millis) -> Met {
        let lease = now.plus(self.settings.lease);
        self.expiry.by_tick(&record, &mut record.parts(), lease);
        let token = record.token();
        Met::Won(record, token)
    }

    fn refused(&self, refusal: Refusal, now: Millis) -> ClaimError {
        let next = self.expiry.next().unwrap_or(now).since(now);
        let retry_after = next.clamp(Duration::from_secs(1), Duration::from_secs(60));
        match refusal {
            Refusal::Store => ClaimError::Full { retry_after },
            Refusal::Account => ClaimError::AccountFull { retry_after },
        }
    }

    fn next_token(&self) -> u64 {
        self.tokens.fetch_add(1, Ordering::Relaxed)
    }

    /// What `old` answers. The mismatch test comes before the state test (R5); only what is over
    /// is not asked.
    fn meet(&self, old: &Arc<Record>, asked: &mut Asked<'_>, now: Millis) -> Meeting {
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
            match asked.fit(old.fingerprint()) {
                Fit::Same => {}
                Fit::Different => return Meeting::Answer(Met::Mismatch),
                Fit::UnknownScheme => return Meeting::Answer(Met::Held),
            }
            return Meeting::Answer(match view {
                View::InFlight => Met::InFlight(Arc::clone(old)),
                View::Lapsed if self.lapse_holds(word) => {
                    self.hold_lapsed(old, word, now);
                    continue;
                }
                View::Lapsed => return Meeting::Lapsed(word),
                View::Held => Met::Held,
                View::Completed => match self.answer(old, word, now) {
                    Some(answer) => Met::Replay(answer),
                    None => Met::NotKept,
                },
                View::NotKept | View::Gone => Met::NotKept,
            });
        }
    }

    /// Whether a lapse of this claim holds it (R8, R10).
    fn lapse_holds(&self, word: Word) -> bool {
        word.is_attended() || self.settings.on_lapse == Lapse::Hold
    }

    /// Ends a lapsed claim, the very one that was seen (R10): a renewal or a completion in
    /// between wins, and the caller looks again.
    fn take_over(&self, record: &Arc<Record>, word: Word, now: Millis) {
        if record.swap(word, Word::new(Kind::Ended, now)).is_ok() {
            self.landed(Kind::InFlight);
            self.counters.lapsed.up();
            self.counters.taken_over.up();
            self.waiters.wake_all(record, || Gift::LookAgain);
        }
    }

    /// Sees to it that the waiters of `record` are woken when its lease lapses (R13).
    pub(crate) fn watch(&self, record: &Arc<Record>, deadline: Millis) {
        self.expiry.exactly(record, &mut record.parts(), deadline);
    }

    /// The outcome of a completed record, as seen in `word`.
    pub(crate) fn answer(&self, record: &Record, word: Word, now: Millis) -> Option<Answer> {
        let parts = record.parts();
        Some(Answer {
            outcome: parts.outcome.clone()?,
            age: now.since(parts.settled),
            remaining: word.at().since(now),
        })
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("settings", &self.settings)
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.expiry.alarm().shut();
    }
}
