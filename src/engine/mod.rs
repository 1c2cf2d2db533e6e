//! The rules at work: what a claim meets, and how it moves on.
//!
//! Ground rules: every decision is taken by one compare-and-swap, of a slot of the index or of a
//! cell's state word, by whoever comes first; the other thread sees what was decided and looks
//! again. A guard is held from the first look to the last touch. No lock is taken on the way of a
//! claim that nobody waits for. Time is read once for each verb.
//!
//! Invariants:
//!
//! 1. Room: who moves a cell to `Ended` from any other state gives the claim's room back. Who moves
//!    it to `Completed` gives back what the record does not need; the rest goes with the record.
//! 2. Who moves a cell away from `InFlight` takes it off the lane's count and wakes its waiters.
//! 3. A cell is retired once, by the thread that its word appoints, after the index lets go of it.
//! 4. A record that seems over may have been moved: its new place is in the index before the old one
//!    is dead. It is over for who finds the same again after he has seen it so.
//! 5. A takeover is one step: the word of the lapsed claim names the one that takes its place, as it
//!    names the record of a completed one. Whoever meets that word puts the successor into the slot
//!    before he looks at it, so no claim is taken over while a slot names it by another, and none is
//!    retired: its permit is given out when it stands in the slot.
//!
//! This file claims; `settle.rs` ends claims; `operate.rs` serves operators; `sweep.rs` reaps.

mod hold;
#[cfg(all(test, oncekey_loom))]
mod models;
mod operate;
mod settle;
mod sweep;

pub(crate) use hold::Hold;
pub(crate) use settle::{By, Finish};

use std::{
    collections::{BTreeMap, VecDeque},
    hash::BuildHasher,
    task::Waker,
    time::Duration,
};

use crate::{
    capacity::{Drew, Refusal, Room},
    clock::{Clock, Millis},
    error::ClaimError,
    expire::Alarm,
    fingerprint::{Fingerprint, Scheme},
    identity::{Frame, Identity},
    index::{For, Index, Seen, What},
    lane::{self, Lane},
    outcome::Outcome,
    reclaim::{Domain, Guard},
    record::{
        self, Cell, Killed, Owned, Pages, Place, Record, Slabs,
        word::{Kind, View, Word},
    },
    stats::Often,
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, Tally, between_seq_cst},
    waiters::{Gift, NoSeat, Ticket, Waiters, Woken},
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
    /// By how much retention, lease and `max_run` are longer than what was asked for, because the
    /// clock may be behind.
    pub(crate) lag: Millis,
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
    latest: Tally,
    /// First of those that others refer to: what it still has to free goes before them.
    domain: Domain,
    index: Index,
    slabs: Slabs,
    /// Where memory of index and slabs comes from.
    pub(crate) pages: Arc<Pages>,
    room: Room,
    lanes: Box<[Lane]>,
    pub(crate) waiters: Waiters,
    alarm: Arc<Alarm>,
    /// Random for each store: tokens of two processes never meet (R9).
    owner: u64,
    draining: AtomicBool,
    /// Whether completed records may leave before their end, because a tier has them (R25). Relaxed:
    /// it publishes nothing.
    evicts: AtomicBool,
    /// Who waits for the end of a drain.
    drained: Mutex<Drained>,
    /// Wakers that a sweep has still to call. A list of the store's own, so that a waker that panics
    /// keeps no other from being called by the next sweep.
    unwoken: Mutex<VecDeque<Waker>>,
    /// Held by the one thread that sweeps.
    sweeping: Mutex<sweep::Turn>,
    /// The slabs' number at which all tables were young (invariant 5 of the index).
    renewed: AtomicU64,
    /// Before this time nothing is due, as far as the last sweep knew; later claims end later.
    next_due: AtomicU64,
}

/// The wakers of those who wait for the end of a drain, by the number that each was given.
#[derive(Default)]
struct Drained {
    wakers: BTreeMap<u64, Waker>,
    last: u64,
}

/// What a claim has met.
pub(crate) enum Met {
    Won(Owned, u64),
    Replay(Answer),
    NotKept,
    /// An owner runs.
    InFlight(Running),
    /// An owner runs, and the caller has a seat.
    Seated(Ticket),
    /// An owner runs, and there is no seat left.
    Crowded,
    Mismatch,
    Held,
}

/// A claim that was seen in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    /// Names its cell and, with the token, the claim.
    cell: u64,
    token: u64,
    /// When its owner has won.
    pub(crate) claimed: Millis,
}

impl Running {
    fn of(cell: &Cell) -> Self {
        Self { cell: cell.bits(), token: cell.token(), claimed: cell.claimed() }
    }
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

/// How what is there answers a claim.
enum Meeting<'g> {
    Answer(Met),
    /// An owner runs.
    InFlight(&'g Cell),
    /// The lease has lapsed and the claim may be taken over.
    Lapsed(&'g Cell, Word),
    /// What was there is over; a new claim may take its place.
    Over(Option<(Place, &'g Record)>),
    /// It was moved on: look again.
    Again,
}

impl Engine {
    pub(crate) fn new(
        settings: Settings,
        clock: Box<dyn Clock>,
        max_keys: usize,
        room: Room,
        waiters: Waiters,
    ) -> Self {
        let alarm = Arc::default();
        let pages = Pages::new(&alarm);
        Self {
            settings,
            origin: clock.now(),
            latest: Tally::new(0),
            clock,
            domain: Domain::new(lane::lanes()),
            index: Index::new(max_keys, &pages),
            slabs: Slabs::new(lane::lanes(), settings.retention, settings.tick, Arc::clone(&pages)),
            room,
            lanes: (0..lane::lanes()).map(|number| Lane::new(number, &pages)).collect(),
            pages,
            waiters,
            alarm,
            owner: std::hash::RandomState::new().hash_one(std::process::id()),
            draining: AtomicBool::new(false),
            evicts: AtomicBool::new(false),
            drained: Mutex::default(),
            unwoken: Mutex::default(),
            sweeping: Mutex::default(),
            renewed: AtomicU64::new(0),
            next_due: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Millis {
        let read = Millis::at(self.clock.now().saturating_sub(self.origin));
        let latest = Millis(self.latest.load(Ordering::Relaxed));
        if read <= latest {
            return latest;
        }
        // Written at most once a millisecond by each thread.
        Millis(self.latest.fetch_max(read.0, Ordering::Relaxed)).max(read)
    }

    /// Lets completed records leave when room is needed, from now on.
    #[cfg(feature = "tier")]
    pub(crate) fn evict_when_full(&self) {
        self.evicts.store(true, Ordering::Relaxed);
    }

    pub(crate) fn owner(&self) -> u64 {
        self.owner
    }

    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    pub(crate) fn lane(&self, number: usize) -> &Lane {
        // A power of two of them.
        &self.lanes[number & (self.lanes.len() - 1)]
    }

    /// The lane of the present thread.
    pub(crate) fn own_lane(&self) -> &Lane {
        self.lane(lane::here())
    }

    /// Keeps what this thread looks at from being freed.
    pub(crate) fn pin(&self) -> Guard<'_> {
        self.domain.pin(lane::here())
    }

    #[inline]
    pub(crate) fn hash(&self, id: &Identity<'_>) -> u64 {
        self.index.hash(id)
    }

    /// As [`Engine::pin`], in a lane, and asks for the memory that a look-up of `hash` will read first:
    /// the earlier the better.
    #[inline]
    pub(crate) fn approach(&self, lane: usize, hash: u64) -> Guard<'_> {
        self.index.prefetch(hash);
        self.domain.pin(lane)
    }

    /// Asks for the memory that a look-up of `hash` will read first, and holds nothing off.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        self.index.prefetch(hash);
    }

    /// How many slots a look-up of what is there looks at.
    #[cfg(test)]
    pub(crate) fn probes(&self, frame: &Frame) -> usize {
        self.index.probes(self.hash(&Identity::from_frame(frame)), frame, &self.slabs, &self.pin())
    }

    /// Asks for the memory that a claim of `hash` will read next.
    pub(crate) fn prefetch_target(&self, hash: u64) {
        self.index.prefetch_target(hash, &self.slabs, &self.pin());
    }

    /// Makes the caller the owner of the identity in `frame`, or tells what is there. With
    /// `seated`, a caller that meets a running owner takes a seat among its waiters.
    #[inline]
    pub(crate) fn claim(
        &self,
        lane: &Lane,
        hash: u64,
        frame: &Frame,
        asked: &mut Asked<'_>,
        seated: bool,
        guard: &Guard<'_>,
    ) -> Result<Met, ClaimError> {
        let now = self.now();
        let met = self.claim_at(lane, hash, frame, asked, now, seated, guard);
        match &met {
            Ok(met) => Self::count(lane, met, guard),
            Err(ClaimError::Full { .. }) => lane.counters.refused_full.up(),
            Err(ClaimError::AccountFull { .. }) => lane.counters.refused_account.up(),
            Err(ClaimError::Draining) => lane.counters.refused_draining.up(),
        }
        met
    }

    /// Tells what is there; `None` if a claim would win.
    pub(crate) fn observe(
        &self,
        lane: &Lane,
        hash: u64,
        frame: &Frame,
        asked: &mut Asked<'_>,
        guard: &Guard<'_>,
    ) -> Option<Met> {
        let now = self.now();
        let mut before = What::Absent;
        let met = loop {
            let what = self.index.find(hash, frame, For::Reading, &self.slabs, guard).what;
            match self.meet(lane, what, asked, now, guard) {
                Meeting::Answer(met) => break met,
                Meeting::InFlight(cell) => break Met::InFlight(Running::of(cell)),
                // Invariant 4.
                Meeting::Over(_) if !what.is_same(&before) => before = what,
                Meeting::Lapsed(..) | Meeting::Over(_) => return None,
                Meeting::Again => {}
            }
        };
        Self::count(lane, &met, guard);
        Some(met)
    }

    #[inline]
    fn count(lane: &Lane, met: &Met, guard: &Guard<'_>) {
        match met {
            Met::Won(..) => guard.count(Often::Won),
            Met::Replay(_) => guard.count(Often::Replayed),
            Met::Seated(_) => {}
            Met::NotKept => lane.counters.replays_not_kept.up(),
            Met::InFlight(..) => guard.count(Often::MetInFlight),
            Met::Crowded => lane.counters.refused_waiters.up(),
            Met::Mismatch => lane.counters.mismatches.up(),
            Met::Held => lane.counters.met_held.up(),
        }
    }

    #[inline]
    #[expect(clippy::too_many_arguments, reason = "they are the parts of an attempt")]
    fn claim_at(
        &self,
        lane: &Lane,
        hash: u64,
        frame: &Frame,
        asked: &mut Asked<'_>,
        now: Millis,
        seated: bool,
        guard: &Guard<'_>,
    ) -> Result<Met, ClaimError> {
        let new = || Fresh {
            engine: self,
            lane,
            guard,
            frame,
            counted: false,
            is_let_in: false,
            has_room: false,
            owned: None,
            stands: false,
        };
        let mut fresh: Option<Fresh<'_>> = None;
        let mut before = What::Absent;
        loop {
            let seen = self.index.find(hash, frame, For::Claiming, &self.slabs, guard);
            match self.meet(lane, seen.what, asked, now, guard) {
                Meeting::Answer(met) => return Ok(met),
                Meeting::InFlight(cell) if !seated => {
                    return Ok(Met::InFlight(Running::of(cell)));
                }
                Meeting::InFlight(cell) => match self.take_seat(cell, now) {
                    Ok(ticket) => return Ok(Met::Seated(ticket)),
                    Err(NoSeat::TooMany) => return Ok(Met::Crowded),
                    Err(NoSeat::LookAgain) => {}
                },
                Meeting::Lapsed(cell, word) => {
                    let fresh = fresh.get_or_insert_with(new);
                    // First: a claim that is refused must not have ended the old one.
                    fresh.enter(now, true)?;
                    if let Some(won) = self.take_over(fresh, hash, asked.own, (cell, word), now) {
                        return Ok(won);
                    }
                }
                Meeting::Over(over) => {
                    let fresh = fresh.get_or_insert_with(new);
                    let entered = fresh.enter(now, over.is_some()).and_then(|()| match over {
                        Some((place, record)) => self.succeed(fresh, place, record, now),
                        None => Ok(()),
                    });
                    if let Err(refused) = entered {
                        // Invariant 4: what is there needs no room to be replayed.
                        if seen.what.is_same(&before) {
                            return Err(refused);
                        }
                        before = seen.what;
                        continue;
                    }
                    if let Some(won) = fresh.put(hash, asked.own, &seen, now) {
                        return Ok(won);
                    }
                }
                Meeting::Again => {}
            }
        }
    }

    /// Makes a record dead that is over. If no room was found for the claim that takes its place,
    /// that one gets the record's: it is no new identity that a full store or account could refuse
    /// (R10, R25).
    fn succeed(
        &self,
        fresh: &mut Fresh<'_>,
        place: Place,
        record: &Record,
        now: Millis,
    ) -> Result<(), ClaimError> {
        let lane = fresh.lane;
        match self.slabs.kill(place, record, fresh.guard) {
            Killed::Now => lane.counters.expired.up(),
            killed => {
                if killed == Killed::Copy {
                    lane.counters.expired.up();
                }
                // Somebody else gives its room back.
                return fresh.enter(now, false);
            }
        }
        if fresh.has_room {
            self.leave_record(lane, record);
            return Ok(());
        }
        let (taken, needed) = (record.cost(), self.room_of(fresh.frame));
        if !self.room.grow(lane.number, needed.saturating_sub(taken)) {
            self.leave_record(lane, record);
            return Err(self.refused(Refusal::Store, now));
        }
        self.room.shrink(lane.number, taken.saturating_sub(needed));
        fresh.has_room = true;
        Ok(())
    }

    fn take_seat(&self, cell: &Cell, now: Millis) -> Result<Ticket, NoSeat> {
        let mut deadline = now;
        let ticket = self.waiters.join(cell, || {
            loop {
                let word = cell.word();
                deadline = word.at();
                if word.view(now) != View::InFlight {
                    return false;
                }
                if word.has_waiters() || cell.swap(word, word.with_waiters()).is_ok() {
                    return true;
                }
            }
        })?;
        // A waiter is woken when the lease lapses (R13).
        self.alarm.no_later_than(deadline);
        Ok(ticket)
    }

    fn refused(&self, refusal: Refusal, now: Millis) -> ClaimError {
        let next = Millis(self.next_due.load(Ordering::Relaxed)).since(now);
        let retry_after = next.clamp(Duration::from_secs(1), Duration::from_secs(60));
        match refusal {
            Refusal::Store => ClaimError::Full { retry_after },
            Refusal::Account => ClaimError::AccountFull { retry_after },
        }
    }

    /// The bytes of room that a claim takes.
    fn room_of(&self, frame: &[u8]) -> usize {
        record::cost(frame.len()).saturating_add(self.settings.reserve)
    }

    /// What is there answers. The mismatch test comes before the state test (R5); only what is over
    /// is not asked.
    #[inline]
    fn meet<'g>(
        &'g self,
        lane: &Lane,
        what: What<'g>,
        asked: &mut Asked<'_>,
        now: Millis,
        guard: &'g Guard<'g>,
    ) -> Meeting<'g> {
        let cell = match what {
            What::Absent => return Meeting::Over(None),
            What::Record(place, record) => {
                return Self::meet_record(self, place, record, asked, now);
            }
            What::Cell(cell) => cell,
        };
        loop {
            let word = cell.word();
            let view = word.view(now);
            match view {
                View::Completed => {
                    return match self.slabs.at(word.place(), guard) {
                        Some(record) => self.meet_record(word.place(), record, asked, now),
                        None => Meeting::Over(None),
                    };
                }
                View::Gone if word.kind() == Kind::Ended => {
                    return if self.pass_on(cell, guard) {
                        Meeting::Again
                    } else {
                        Meeting::Over(None)
                    };
                }
                View::Gone => {
                    // A held claim may still be settled by its owner: only a CAS ends it.
                    if self.end(lane, cell, word, guard).is_some() {
                        lane.counters.expired.up();
                        return Meeting::Again;
                    }
                    continue;
                }
                _ => {}
            }
            match asked.fit(cell.fingerprint()) {
                Fit::Same => {}
                Fit::Different => return Meeting::Answer(Met::Mismatch),
                Fit::UnknownScheme => return Meeting::Answer(Met::Held),
            }
            return match view {
                View::InFlight => Meeting::InFlight(cell),
                View::Lapsed if self.lapse_holds(word) => {
                    drop(self.hold_lapsed(lane, cell, word, now));
                    continue;
                }
                View::Lapsed => Meeting::Lapsed(cell, word),
                View::Held => Meeting::Answer(Met::Held),
                View::NotKept | View::Completed | View::Gone => Meeting::Answer(Met::NotKept),
            };
        }
    }

    fn meet_record<'g>(
        &self,
        place: Place,
        record: &'g Record,
        asked: &mut Asked<'_>,
        now: Millis,
    ) -> Meeting<'g> {
        if record.is_over(now) {
            return Meeting::Over(Some((place, record)));
        }
        Meeting::Answer(match asked.fit(&record.fingerprint()) {
            Fit::Same => match record.outcome() {
                Some(outcome) => Met::Replay(self.answer(outcome, record.end(), now)),
                None => Met::NotKept,
            },
            Fit::Different => Met::Mismatch,
            Fit::UnknownScheme => Met::Held,
        })
    }

    /// What became of a claim that was seen in flight, if it was completed and that is still known:
    /// also if it was forgotten since.
    pub(crate) fn finished(&self, seen: &Running) -> Option<Met> {
        let guard = self.pin();
        let now = self.now();
        let word =
            self.lanes.iter().find_map(|lane| lane.cells.word_of(seen.cell, seen.token, &guard))?;
        if word.kind() != Kind::Completed {
            return None;
        }
        let record = self.slabs.at(word.place(), &guard)?;
        if record.token() != seen.token || now >= record.end() {
            return None;
        }
        if !record.is_kept() {
            return Some(Met::NotKept);
        }
        let outcome = record.remains()?;
        Some(Met::Replay(self.answer(outcome, record.end(), now)))
    }

    /// Whether a lapse of this claim holds it (R8, R10).
    fn lapse_holds(&self, word: Word) -> bool {
        word.is_attended() || self.settings.on_lapse == Lapse::Hold
    }

    /// Takes a lapsed claim over, the very one that was seen (R10): a renewal or a completion in
    /// between wins, and the caller looks again.
    fn take_over(
        &self,
        fresh: &mut Fresh<'_>,
        hash: u64,
        fingerprint: Fingerprint,
        (cell, word): (&Cell, Word),
        now: Millis,
    ) -> Option<Met> {
        let (lane, guard) = (fresh.lane, fresh.guard);
        let (next, token) = fresh.name(hash, fingerprint, now);
        // Invariant 5.
        cell.swap(word, Word::taken_over(next.bits()).with_out(word.is_out())).ok()?;
        self.index.pass_on(cell, next.bits(), &self.slabs, guard);
        fresh.stands = true;
        if fresh.has_room {
            self.leave(lane, cell);
        }
        // The identity is the same, and so is the room.
        fresh.has_room = true;
        let mut woken = self.landed(lane, Kind::InFlight);
        lane.counters.lapsed.up();
        lane.counters.taken_over.up();
        woken.join(self.wake(cell, word, || Gift::LookAgain));
        // A waker that panics gives the claim up.
        drop(woken);
        fresh.won(token)
    }

    /// Puts the successor of a claim that was taken over into its slot, which who took it over may
    /// not have done yet. False if the claim has none.
    fn pass_on(&self, cell: &Cell, guard: &Guard<'_>) -> bool {
        let Some(next) = cell.word().successor() else { return false };
        self.index.pass_on(cell, next, &self.slabs, guard);
        true
    }

    /// Wakes those who wait for a cell that the caller has moved on from `word`: when the answer is
    /// dropped.
    fn wake(&self, cell: &Cell, word: Word, gift: impl Fn() -> Gift) -> Woken {
        if word.has_waiters() { self.waiters.wake_all(cell, gift) } else { Woken::default() }
    }

    /// The outcome of a record that ends at `end`.
    pub(crate) fn answer(&self, outcome: Outcome, end: Millis, now: Millis) -> Answer {
        let remaining = end.since(now);
        let retention = Duration::from_millis(self.settings.retention.0);
        Answer { outcome, age: retention.saturating_sub(remaining), remaining }
    }
}

/// A claim that is not in the index yet. Dropped, it gives back what was taken for it.
struct Fresh<'a> {
    engine: &'a Engine,
    lane: &'a Lane,
    guard: &'a Guard<'a>,
    frame: &'a Frame,
    /// Whether it is counted as in flight.
    counted: bool,
    /// Whether it came before any drain.
    is_let_in: bool,
    /// Whether room was taken for it.
    has_room: bool,
    /// Its cell, which is counted: the sweep may meet it and end it.
    owned: Option<Owned>,
    /// Whether its cell is in the index.
    stands: bool,
}

impl Fresh<'_> {
    /// Counts the claim and takes room for it, unless that was done. If it is to take the place of
    /// another one (`succeeds`), it may go on without room of its own.
    #[inline]
    fn enter(&mut self, now: Millis, succeeds: bool) -> Result<(), ClaimError> {
        let engine = self.engine;
        if !self.counted {
            self.lane.in_flight.fetch_add(1, Ordering::SeqCst);
            self.counted = true;
            between_seq_cst();
        }
        // Once: a drain that begins later waits for this claim, which may have ended a lapsed one by
        // then and must not be refused any more (R10).
        if !self.is_let_in {
            if engine.draining.load(Ordering::SeqCst) {
                return Err(ClaimError::Draining);
            }
            self.is_let_in = true;
        }
        if !self.has_room {
            match engine.enter(self.lane, self.frame, now) {
                Ok(()) => self.has_room = true,
                Err(_) if succeeds => {}
                Err(refused) => return Err(refused),
            }
        }
        Ok(())
    }

    /// The claim's cell, with a token that is newer than that of whoever was there.
    #[inline]
    fn name(&mut self, hash: u64, fingerprint: Fingerprint, now: Millis) -> (&Cell, u64) {
        let engine = self.engine;
        let owned = self.owned.get_or_insert_with(|| {
            let deadline = now.plus(engine.settings.lease);
            let due = engine.none_before(now);
            let (cells, frame) = (&self.lane.cells, self.frame);
            cells.make(hash, frame, fingerprint, now, deadline, due, self.guard)
        });
        let token = engine.index.next_token();
        owned.cell().name_owner(token, now);
        (owned.cell(), token)
    }

    /// Puts the claim where `seen` was.
    #[inline]
    fn put(
        &mut self,
        hash: u64,
        fingerprint: Fingerprint,
        seen: &Seen<'_>,
        now: Millis,
    ) -> Option<Met> {
        let (engine, guard) = (self.engine, self.guard);
        let (cell, token) = self.name(hash, fingerprint, now);
        if !engine.index.put(seen, cell, &engine.slabs, guard) {
            return None;
        }
        if let What::Cell(old) = seen.what
            && old.word().is_ghost()
        {
            record::Cells::retire(old, guard);
        }
        self.won(token)
    }

    /// The claim stands in the index: what was taken for it goes with its permit.
    #[inline]
    fn won(&mut self, token: u64) -> Option<Met> {
        self.counted = false;
        self.has_room = false;
        self.stands = false;
        self.owned.take().map(|owned| Met::Won(owned, token))
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        if let Some(owned) = &self.owned
            && self.stands
        {
            // Nothing has run: the next caller may.
            let _ = self.engine.release(self.lane, owned, None);
            return;
        }
        if let Some(owned) = &self.owned {
            let cell = owned.cell();
            let mut word = cell.word();
            while let Err(moved) = cell.swap(word, word.ended()) {
                word = moved;
            }
            // The sweep may have judged it, if this thread slept for a lease.
            self.counted &= word.kind() == Kind::InFlight;
            if word.kind() == Kind::Ended && !self.has_room {
                // It has given back room that this claim did not have yet.
                let account = Identity::from_frame(self.frame).account();
                let bytes = self.engine.room_of(self.frame);
                let _ = self.engine.room.enter(self.lane.number, account, bytes);
            }
            self.has_room &= word.kind() != Kind::Ended;
            // No slot has ever named it.
            record::Cells::retire(cell, self.guard);
        }
        if self.has_room {
            self.engine.leave_frame(self.lane, self.frame);
        }
        if self.counted {
            drop(self.engine.landed(self.lane, Kind::InFlight));
        }
    }
}

impl Engine {
    /// Takes room for a claim; what has ended already makes some, one bounded step of it.
    #[inline]
    fn enter(&self, lane: &Lane, frame: &Frame, now: Millis) -> Result<(), ClaimError> {
        let bytes = self.room_of(frame);
        let account = Identity::from_frame(frame).account();
        // Acquire, partner of the Release in the sweep: what was due before has given its room back.
        let due = || self.next_due.load(Ordering::Acquire) <= now.0;
        // Asked first, and tried again whoever has swept: another thread may have reaped between.
        let was_due = due();
        let entered = self.room.enter(lane.number, account, bytes).or_else(|refusal| {
            if !was_due {
                return Err(refusal);
            }
            if due() {
                self.sweep_step();
            }
            self.room.enter(lane.number, account, bytes)
        });
        let entered = entered.or_else(|refusal| self.enter_evicting(lane, account, bytes, refusal));
        match entered {
            Ok(Drew(true)) => {
                self.alarm.ring_if_idle();
                Ok(())
            }
            Ok(Drew(false)) => Ok(()),
            Err(refusal) => Err(self.refused(refusal, now)),
        }
    }

    /// Takes room for a claim that found none, by evicting what a tier still has. An account's share
    /// is not helped by what others lose.
    #[cold]
    fn enter_evicting(
        &self,
        lane: &Lane,
        account: &[u8],
        bytes: usize,
        refusal: Refusal,
    ) -> Result<Drew, Refusal> {
        if refusal == Refusal::Account {
            return Err(refusal);
        }
        let entered = std::cell::Cell::new(Err(refusal));
        let enter = || {
            entered.set(self.room.enter(lane.number, account, bytes));
            entered.get().is_ok()
        };
        self.evict_until(enter, &self.pin());
        entered.get()
    }

    /// Gives the room of a claim back that is not done.
    fn leave(&self, lane: &Lane, cell: &Cell) {
        self.leave_frame(lane, cell.frame());
    }

    fn leave_frame(&self, lane: &Lane, frame: &Frame) {
        let account = Identity::from_frame(frame).account();
        self.room.leave(lane.number, account, self.room_of(frame));
    }

    /// Before this time nothing that begins now is due.
    fn none_before(&self, now: Millis) -> Millis {
        let Settings { lease, max_run, retention, .. } = self.settings;
        now.plus(lease.min(max_run).min(retention))
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
        self.alarm.shut();
    }
}
