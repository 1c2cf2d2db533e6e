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

pub(crate) use settle::{By, Finish};

use std::{collections::BTreeMap, hash::BuildHasher, task::Waker, time::Duration};

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
    /// The latest time ever read, in milliseconds: a clock that steps back stops time (R23).
    /// Relaxed, because it publishes nothing and only grows.
    latest: AtomicU64,
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
    drained: Mutex<Drained>,
}

/// The wakers of those who wait for the end of a drain, by the number that each was given.
#[derive(Default)]
struct Drained {
    wakers: BTreeMap<u64, Waker>,
    last: u64,
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

/// The record of a claim that has not won yet. If it does not win, what was taken for it is given
/// back.
struct Fresh<'a> {
    engine: &'a Engine,
    record: Option<Arc<Record>>,
}

impl Fresh<'_> {
    /// Makes the record, unless an earlier round has made it already. If it is to take the place
    /// of another one (`succeeds`), it may do so without room of its own.
    fn make(
        &mut self,
        frame: &[u8],
        fingerprint: Fingerprint,
        now: Millis,
        succeeds: bool,
    ) -> Result<Arc<Record>, ClaimError> {
        let engine = self.engine;
        if let Some(record) = &self.record {
            let mut parts = record.parts();
            if parts.room == 0 && !succeeds {
                parts.room = engine.enter(frame, now).map_err(|it| engine.refused(it, now))?;
            }
            return Ok(Arc::clone(record));
        }
        // Also here, so that those who are refused keep a drain from nothing.
        if engine.draining.load(Ordering::SeqCst) {
            return Err(ClaimError::Draining);
        }
        let room = match engine.enter(frame, now) {
            Ok(room) => room,
            Err(_) if succeeds => 0,
            Err(refusal) => return Err(engine.refused(refusal, now)),
        };
        engine.in_flight.fetch_add(1, Ordering::SeqCst);
        let record = Arc::new(Record::new(
            frame.into(),
            engine.index.hash(frame),
            fingerprint,
            now,
            now.plus(engine.settings.lease),
            room,
        ));
        self.record = Some(Arc::clone(&record));
        if engine.draining.load(Ordering::SeqCst) {
            return Err(ClaimError::Draining);
        }
        Ok(record)
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        let Some(record) = &self.record else { return };
        let room = std::mem::take(&mut record.parts().room);
        if room > 0 {
            self.engine.room.leave(record.account(), room);
        }
        self.engine.landed(Kind::InFlight);
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
            latest: AtomicU64::new(0),
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
        let read = Millis::at(self.clock.now().saturating_sub(self.origin));
        let latest = Millis(self.latest.load(Ordering::Relaxed));
        if read <= latest {
            return latest;
        }
        // Written at most once a millisecond by each thread.
        Millis(self.latest.fetch_max(read.0, Ordering::Relaxed)).max(read)
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
        let mut fresh = Fresh { engine: self, record: None };
        let mut found = self.index.find(frame);
        loop {
            let Some(old) = found else {
                let new = fresh.make(frame, asked.own, now, false)?;
                match self.index.insert(&new, || new.name_owner(self.next_token(), now)) {
                    Ok(()) => {
                        fresh.record = None;
                        return Ok(self.won(new, now));
                    }
                    Err(there) => found = Some(there),
                }
                continue;
            };
            match self.meet(&old, asked, now) {
                Meeting::Answer(met) => return Ok(met),
                Meeting::Lapsed(word) => {
                    // First: a claim that is refused must not have ended the old one.
                    fresh.make(frame, asked.own, now, true)?;
                    self.take_over(&old, word, now);
                    found = Some(old);
                }
                Meeting::Over(word) => {
                    let new = fresh.make(frame, asked.own, now, true)?;
                    let replaced = self
                        .succeed(&old, &new, now)
                        .map_err(|refusal| self.refused(refusal, now))?;
                    if replaced {
                        fresh.record = None;
                        self.count_end(word);
                        return Ok(self.won(new, now));
                    }
                    found = self.index.find(frame);
                }
            }
        }
    }

    /// Takes room for a new record, and bytes it needs.
    fn enter(&self, frame: &[u8], now: Millis) -> Result<usize, Refusal> {
        let bytes = self.needed(frame);
        let account = Identity::from_frame(frame).account();
        self.room.enter(account, bytes).or_else(|refusal| {
            // What has ended already makes room, one bounded step of it.
            let due = self.expiry.next().is_some_and(|next| next <= now);
            if due && self.sweep_step().reaped > 0 {
                return self.room.enter(account, bytes);
            }
            Err(refusal)
        })?;
        Ok(bytes)
    }

    /// Bytes that a record in flight takes.
    fn needed(&self, frame: &[u8]) -> usize {
        Record::cost(frame.len()).saturating_add(self.settings.reserve)
    }

    /// Puts `new` where `old`, which is over, stands; false if it no longer does. If no room was
    /// found for `new`, it takes that of `old`: it is no new identity that a full store or account
    /// could refuse (R10, R25).
    fn succeed(&self, old: &Arc<Record>, new: &Arc<Record>, now: Millis) -> Result<bool, Refusal> {
        let enter = || new.name_owner(self.next_token(), now);
        if new.parts().room > 0 {
            let replaced = self.index.replace(old, new, enter);
            if replaced {
                self.vacate(old);
            }
            return Ok(replaced);
        }
        // What a record that is over has taken changes no more until it leaves the index.
        let (linked, taken) = {
            let parts = old.parts();
            (parts.linked, parts.room)
        };
        let needed = self.needed(old.frame());
        let more = needed.saturating_sub(taken);
        if !linked {
            return Ok(false);
        }
        if !self.room.grow(more) {
            return Err(Refusal::Store);
        }
        // Before anybody sees it: whoever ends it gives this back.
        new.parts().room = needed;
        if self.index.replace(old, new, enter) {
            self.room.shrink(self.unlinked(old).saturating_add(more) - needed);
            return Ok(true);
        }
        new.parts().room = 0;
        self.room.shrink(more);
        Ok(false)
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
