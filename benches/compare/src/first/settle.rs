//! How a claim ends: complete, release, hold, and what a lapse does.

use std::sync::{Arc, atomic::Ordering};

use oncekey::Outcome;

use super::{
    clock::Millis,
    engine::{Engine, up},
    record::Record,
    waiters::Gift,
    word::{Kind, Word},
};

/// The token was stale; nothing changed.
#[derive(Debug)]
pub(crate) struct Lost;

/// Whether the claim of `record` is no longer that of the owner with this token. A lapsed lease
/// alone does not make a token stale.
fn stale(record: &Record, word: Word, token: u64) -> bool {
    match word.kind() {
        Kind::Completed | Kind::NotKept | Kind::Ended => true,
        Kind::InFlight | Kind::Held => token != record.token(),
    }
}

impl Engine {
    /// Finishes a claim with an answer. False if there was no room to keep it.
    pub(crate) fn complete(
        &self,
        record: &Arc<Record>,
        token: u64,
        answer: Outcome,
    ) -> Result<bool, Lost> {
        let now = self.now();
        let end = now.plus(self.limits.retention);
        let own = Record::cost(record.frame().len());
        // Held from before the state moves until the outcome is in place (record invariant 2).
        let mut parts = record.parts();
        let mut word = record.word();
        if stale(record, word, token) {
            return Err(Lost);
        }
        let wanted = own + answer.size();
        let more = wanted.saturating_sub(parts.room);
        let kept = more == 0 || self.room.grow(more);
        let kind = if kept { Kind::Completed } else { Kind::NotKept };
        while let Err(moved) = record.swap(word, Word::new(kind, end)) {
            word = moved;
            if stale(record, word, token) {
                if kept {
                    self.room.shrink(more);
                }
                return Err(Lost);
            }
        }
        let taken = parts.room + if kept { more } else { 0 };
        parts.room = if kept { wanted } else { own };
        self.room.shrink(taken.saturating_sub(parts.room));
        parts.settled = now;
        if kept {
            parts.outcome = Some(answer);
        }
        self.expiry.by_tick(record, &mut parts, end);
        drop(parts);
        up(if kept { &self.counters.completed } else { &self.counters.not_kept });
        self.landed(word.kind());
        if word.has_waiters() {
            self.waiters.wake_all(record, || Gift::LookAgain);
        }
        Ok(kept)
    }

    /// Gives an identity up; the oldest waiter becomes the owner.
    pub(crate) fn release(&self, record: &Arc<Record>, token: u64) -> Result<(), Lost> {
        loop {
            let word = record.word();
            if stale(record, word, token) {
                return Err(Lost);
            }
            let heirs = word.kind() == Kind::InFlight && word.has_waiters();
            if heirs && self.hand_over(record, word) {
                up(&self.counters.released);
                return Ok(());
            }
            // No heir: either nobody is listed any more, or the state has moved. A registration
            // that slips in between sets no new bit, but its waiter is woken below.
            if record.swap(word, word.ended()).is_ok() {
                up(&self.counters.released);
                self.unlink(record);
                self.landed(word.kind());
                if word.has_waiters() {
                    self.waiters.wake_all(record, || Gift::LookAgain);
                }
                return Ok(());
            }
        }
    }

    /// Makes the oldest waiter the owner; false if there was none or the state has moved.
    fn hand_over(&self, record: &Arc<Record>, word: Word) -> bool {
        let now = self.now();
        let deadline = now.plus(self.limits.lease);
        let heir = self.waiters.wake_heir(record, || {
            let before = record.token();
            let token = self.next_token();
            record.hand_over(token, now);
            let next = Word::new(Kind::InFlight, deadline).with_waiters();
            if record.swap(word, next).is_err() {
                record.hand_over(before, now);
                return None;
            }
            Some(token)
        });
        if heir {
            self.expiry.exactly(record, &mut record.parts(), deadline);
            up(&self.counters.handed_over);
            up(&self.counters.won);
        }
        heir
    }

    /// Shuts an identity because nobody knows whether the work was done.
    pub(crate) fn hold(&self, record: &Arc<Record>, token: u64) -> Result<(), Lost> {
        let now = self.now();
        loop {
            let word = record.word();
            if stale(record, word, token) {
                return Err(Lost);
            }
            if word.kind() == Kind::Held || self.hold_from(record, word, now) {
                return Ok(());
            }
        }
    }

    /// Holds a claim whose lease has lapsed. A completion in between wins.
    pub(super) fn hold_lapsed(&self, record: &Arc<Record>, word: Word, now: Millis) {
        if self.hold_from(record, word, now) {
            up(&self.counters.lapsed);
        }
    }

    fn hold_from(&self, record: &Arc<Record>, word: Word, now: Millis) -> bool {
        let end = now.plus(self.limits.retention);
        if record.swap(word, Word::new(Kind::Held, end)).is_err() {
            return false;
        }
        let mut parts = record.parts();
        parts.settled = now;
        self.expiry.by_tick(record, &mut parts, end);
        drop(parts);
        up(&self.counters.held);
        self.landed(Kind::InFlight);
        if word.has_waiters() {
            self.waiters.wake_all(record, || Gift::LookAgain);
        }
        true
    }

    /// Called by whoever moved a record out of `from`.
    pub(super) fn landed(&self, from: Kind) {
        if from != Kind::InFlight {
            return;
        }
        // The core that this was told who waited for the end of a drain here.
        let before = self.in_flight.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0 || !self.draining.load(Ordering::SeqCst));
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
        let mut parts = record.parts();
        parts.linked = false;
        self.expiry.cancel(record, &mut parts);
        self.room.leave(std::mem::take(&mut parts.room));
    }
}
