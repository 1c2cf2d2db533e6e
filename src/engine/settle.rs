//! How a claim ends: complete, release, hold, renew, and what a lapse does (R8 to R12).

use crate::{
    clock::Millis,
    error::{Lost, LostCause},
    outcome::Outcome,
    record::{
        Record,
        word::{Kind, View, Word},
    },
    sync::{Arc, Ordering},
    waiters::{Gift, call_all},
};

use super::Engine;

/// How a completion went.
#[derive(Debug)]
pub(crate) enum Finish {
    /// The answer is kept.
    Kept,
    /// There was no answer to keep, or no room for it.
    NotKept,
    /// There was no room for what an operator brought: nothing changed.
    NoRoom(Outcome),
}

/// Who settles a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The owner with this token: from in flight, and from held, because a lapsed lease alone does
    /// not make a token stale (R9).
    Owner(u64),
    /// An operator: from held only.
    Operator,
}

impl By {
    /// Why `record` in state `word` cannot be settled, if so.
    fn stale(self, record: &Record, word: Word) -> Option<LostCause> {
        match word.kind() {
            Kind::Completed | Kind::NotKept => Some(LostCause::Completed),
            Kind::Ended => Some(LostCause::Ended),
            Kind::InFlight | Kind::Held => match self {
                Self::Owner(token) => (token != record.token()).then_some(LostCause::Ended),
                Self::Operator => (word.kind() != Kind::Held).then_some(LostCause::Held),
            },
        }
    }
}

impl Engine {
    /// Finishes a claim with an answer, or without one kept. An owner's answer that finds no room
    /// is not kept, because the work is done (R25); an operator can come back.
    pub(crate) fn complete(
        &self,
        record: &Arc<Record>,
        by: By,
        answer: Option<Outcome>,
    ) -> Result<Finish, Lost> {
        let now = self.now();
        let end = now.plus(self.settings.retention);
        let own = Record::cost(record.frame().len());
        // Held from before the state moves until the outcome is in place (record invariant 2).
        let mut parts = record.parts();
        let mut word = record.word();
        if let Some(cause) = by.stale(record, word) {
            drop(parts);
            return Err(self.lost(cause, answer));
        }
        let wanted = own + answer.as_ref().map_or(0, Outcome::size);
        let more = wanted.saturating_sub(parts.room);
        let fits = more == 0 || self.room.grow(more);
        let answer = match answer {
            Some(answer) if !fits && by == By::Operator => return Ok(Finish::NoRoom(answer)),
            answer => answer,
        };
        let kept = answer.is_some() && fits;
        let kind = if kept { Kind::Completed } else { Kind::NotKept };
        while let Err(moved) = record.swap(word, Word::new(kind, end)) {
            word = moved;
            if let Some(cause) = by.stale(record, word) {
                drop(parts);
                if fits {
                    self.room.shrink(more);
                }
                return Err(self.lost(cause, answer));
            }
        }
        let taken = parts.room + if fits { more } else { 0 };
        parts.room = if kept { wanted } else { own };
        self.room.shrink(taken.saturating_sub(parts.room));
        if !kept && answer.is_some() {
            self.counters.not_kept_no_room.up();
        }
        parts.settled = now;
        if kept {
            parts.outcome = answer;
        }
        self.expiry.by_tick(record, &mut parts, end);
        drop(parts);
        if kept { &self.counters.completed } else { &self.counters.not_kept }.up();
        self.landed(word.kind());
        if word.has_waiters() {
            self.waiters.wake_all(record, || Gift::LookAgain);
        }
        Ok(if kept { Finish::Kept } else { Finish::NotKept })
    }

    /// Gives an identity up. With an answer, the waiters present get it; else the oldest of them
    /// becomes the owner (R14).
    pub(crate) fn release(
        &self,
        record: &Arc<Record>,
        by: By,
        answer: Option<Outcome>,
    ) -> Result<(), Lost> {
        loop {
            let word = record.word();
            if let Some(cause) = by.stale(record, word) {
                return Err(self.lost(cause, answer));
            }
            let heirs = word.kind() == Kind::InFlight && word.has_waiters() && answer.is_none();
            if heirs && self.hand_over(record, word) {
                self.counters.released.up();
                return Ok(());
            }
            // No heir: either nobody is listed any more, or the state has moved. A registration
            // that slips in between sets no new bit, but its waiter is woken below.
            if record.swap(word, word.ended()).is_ok() {
                self.counters.released.up();
                self.unlink(record);
                self.landed(word.kind());
                if word.has_waiters() {
                    self.waiters.wake_all(record, || match &answer {
                        Some(answer) => Gift::Answer(answer.clone()),
                        None => Gift::LookAgain,
                    });
                }
                return Ok(());
            }
        }
    }

    /// Makes the oldest waiter the owner; false if there was none or the state has moved.
    fn hand_over(&self, record: &Arc<Record>, word: Word) -> bool {
        let now = self.now();
        let deadline = now.plus(self.settings.lease);
        let heir = self.waiters.wake_heir(record, || {
            let before = record.token();
            let token = self.next_token();
            record.name_owner(token, now);
            let next = Word::new(Kind::InFlight, deadline).with_waiters();
            if record.swap(word, next).is_err() {
                record.name_owner(before, now);
                return None;
            }
            Some(token)
        });
        if heir {
            self.expiry.exactly(record, &mut record.parts(), deadline);
            self.counters.handed_over.up();
            self.counters.won.up();
        }
        heir
    }

    /// Whether this token can still settle the record.
    pub(crate) fn owns(&self, record: &Record, token: u64) -> bool {
        By::Owner(token).stale(record, record.word()).is_none()
    }

    /// Shuts an identity because nobody knows whether the work was done.
    pub(crate) fn hold(&self, record: &Arc<Record>, token: u64) -> Result<(), Lost> {
        let now = self.now();
        loop {
            let word = record.word();
            if let Some(cause) = By::Owner(token).stale(record, word) {
                return Err(self.lost(cause, None));
            }
            if word.kind() == Kind::Held || self.hold_from(record, word, now, false) {
                return Ok(());
            }
        }
    }

    /// Holds a claim whose lease has lapsed. A renewal or completion in between wins.
    pub(super) fn hold_lapsed(&self, record: &Arc<Record>, word: Word, now: Millis) {
        self.hold_from(record, word, now, true);
    }

    fn hold_from(&self, record: &Arc<Record>, word: Word, now: Millis, lapsed: bool) -> bool {
        let end = now.plus(self.settings.retention);
        if record.swap(word, Word::new(Kind::Held, end)).is_err() {
            return false;
        }
        let mut parts = record.parts();
        parts.settled = now;
        self.expiry.by_tick(record, &mut parts, end);
        drop(parts);
        // Counted before anybody is woken, who may ask.
        self.counters.held.up();
        if lapsed {
            self.counters.lapsed.up();
        }
        self.landed(Kind::InFlight);
        if word.has_waiters() {
            self.waiters.wake_all(record, || Gift::LookAgain);
        }
        true
    }

    /// Moves the deadline of a lease to a lease from now, never backwards. An attended claim is
    /// renewed as it is.
    pub(crate) fn renew(&self, record: &Arc<Record>, token: u64) -> Result<(), Lost> {
        let now = self.now();
        let deadline = now.plus(self.settings.lease);
        self.redate(record, token, now, |word| word.with_at(word.at().max(deadline)))
    }

    /// Takes the claim as renewed from now on, until `max_run` from now (R8).
    pub(crate) fn attend(&self, record: &Arc<Record>, token: u64) -> Result<(), Lost> {
        let now = self.now();
        let deadline = now.plus(self.settings.max_run);
        self.redate(record, token, now, |word| word.with_at(deadline).attended())
    }

    fn redate(
        &self,
        record: &Arc<Record>,
        token: u64,
        now: Millis,
        next: impl Fn(Word) -> Word,
    ) -> Result<(), Lost> {
        loop {
            let word = record.word();
            let stale = By::Owner(token).stale(record, word);
            let held = (word.kind() == Kind::Held).then_some(LostCause::Held);
            if let Some(cause) = stale.or(held) {
                return Err(self.lost(cause, None));
            }
            if word.is_attended() {
                // Nothing gives it more time than `max_run`.
                if word.view(now) == View::InFlight {
                    return Ok(());
                }
                self.hold_lapsed(record, word, now);
                continue;
            }
            let next = next(word);
            if record.swap(word, next).is_ok() {
                // A lease cut short (attended for less than a lease) must still be seen in time,
                // by those who wait to the millisecond. Who registers after the swap sees to it.
                let mut parts = record.parts();
                if next.has_waiters() {
                    self.expiry.exactly(record, &mut parts, next.at());
                } else {
                    self.expiry.by_tick(record, &mut parts, next.at());
                }
                return Ok(());
            }
        }
    }

    fn lost(&self, cause: LostCause, outcome: Option<Outcome>) -> Lost {
        self.counters.lost.up();
        Lost { cause, outcome }
    }

    /// Called by whoever moved a record out of `from`.
    pub(super) fn landed(&self, from: Kind) {
        if from != Kind::InFlight {
            return;
        }
        let before = self.in_flight.fetch_sub(1, Ordering::SeqCst);
        if before == 1 && self.draining.load(Ordering::SeqCst) {
            // Unlocked before they are called: a waker may ask whether the store is drained.
            let wakers = std::mem::take(&mut self.drained.lock().wakers);
            call_all(wakers.into_values());
        }
    }

    /// Takes a record out of the index, if it is there.
    pub(super) fn unlink(&self, record: &Arc<Record>) -> bool {
        let was_there = self.index.remove(record);
        if was_there {
            self.vacate(record);
        }
        was_there
    }

    /// Gives back what a record has taken that was in the index (record invariant 3).
    pub(super) fn vacate(&self, record: &Arc<Record>) {
        self.room.leave(record.account(), self.unlinked(record));
    }

    /// Notes that a record has left the index, and hands out the bytes that were taken for it.
    pub(super) fn unlinked(&self, record: &Arc<Record>) -> usize {
        let mut parts = record.parts();
        parts.linked = false;
        self.expiry.cancel(record, &mut parts);
        std::mem::take(&mut parts.room)
    }
}
