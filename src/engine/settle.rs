//! How a claim ends: complete, release, hold, renew, and what a lapse does (R8 to R12).

use crate::{
    clock::Millis,
    error::{Lost, LostCause},
    index::YOUNG,
    lane::Lane,
    outcome::Outcome,
    reclaim::Guard,
    record::{
        self, Cell, Cells, Finished, Killed, Owned, Place, Record,
        word::{Kind, View, Word},
    },
    stats::Often,
    sync::{Ordering, between_seq_cst},
    waiters::{Gift, Woken},
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

/// Who settles a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The owner, with the one permit: from in flight, and from held, because a lapsed lease alone
    /// does not make a token stale (R9).
    Owner,
    /// An operator: from held only.
    Operator,
}

impl By {
    /// Why a claim in state `word` cannot be settled, if so.
    fn stale(self, word: Word) -> Option<LostCause> {
        match word.kind() {
            Kind::Completed | Kind::NotKept => Some(LostCause::Completed),
            Kind::Ended => Some(LostCause::Ended),
            Kind::InFlight if self == Self::Operator => Some(LostCause::Held),
            Kind::InFlight | Kind::Held => None,
        }
    }

    /// Whether a permit is still out after this one has settled the claim.
    fn leaves_out(self, word: Word) -> bool {
        self == Self::Operator && word.is_out()
    }
}

impl Engine {
    /// Finishes a claim with an answer, or without one kept. An owner's answer that finds no room
    /// is not kept, because the work is done (R25); an operator can come back. Whatever comes of
    /// it, an owner's permit is used up.
    #[inline]
    pub(crate) fn complete(
        &self,
        lane: &Lane,
        cell: &Cell,
        by: By,
        answer: Option<Outcome>,
        guard: &Guard<'_>,
    ) -> Result<Finish, Lost> {
        self.complete_for(self.settings.retention, lane, cell, by, answer, guard)
    }

    /// As [`Engine::complete`], for an outcome that ends after `retention`, which is at most that of
    /// the store: somebody else has completed it before.
    #[inline]
    pub(crate) fn complete_for(
        &self,
        retention: Millis,
        lane: &Lane,
        cell: &Cell,
        by: By,
        answer: Option<Outcome>,
        guard: &Guard<'_>,
    ) -> Result<Finish, Lost> {
        let now = self.now();
        let mut word = cell.word();
        if let Some(cause) = by.stale(word) {
            return Err(self.lost_permit(lane, cell, by, cause, answer, guard));
        }
        let end = now.plus(retention.min(self.settings.retention));
        let reserved = self.room_of(cell.frame());
        let own = record::cost(cell.frame().len());
        let size = answer.as_ref().map_or(0, Outcome::size);
        let more = own.saturating_add(size).saturating_sub(reserved);
        let fits = self.room.grow(lane.number, more)
            || self.evict_until(|| self.room.grow(lane.number, more), guard);
        let (more, size) = if fits { (more, size) } else { (0, 0) };
        let answer = match answer {
            Some(answer) if !fits && by == By::Operator => return Ok(Finish::NoRoom(answer)),
            answer => answer,
        };
        let finished = Finished {
            frame: cell.frame(),
            fingerprint: cell.fingerprint(),
            token: cell.token(),
            end,
            outcome: answer.as_ref().filter(|_| fits),
        };
        let kept = finished.outcome.is_some();
        let written = self.slabs.write(lane.number, &finished, now, guard);
        self.renew_tables(guard);
        let done = match &written {
            Some((place, _)) => Word::completed(*place),
            // No slab: the cell itself remembers that the work was done.
            None => Word::new(Kind::NotKept, end),
        };
        while let Err(moved) = cell.swap(word, done.with_out(by.leaves_out(word))) {
            word = moved;
            if let Some(cause) = by.stale(word) {
                if let Some((place, record)) = written {
                    self.slabs.withdraw(place, record, guard);
                }
                self.room.shrink(lane.number, more);
                return Err(self.lost_permit(lane, cell, by, cause, answer, guard));
            }
        }
        let was_kept = kept && written.is_some();
        if let Some((place, record)) = written {
            self.slabs.confirm(record);
            if retention < self.settings.retention {
                self.slabs.note_early(lane.number, place, end, guard);
            }
            self.index.swing(cell, Some(place), &self.slabs, guard);
            self.room.shrink(lane.number, (reserved + more).saturating_sub(own + size));
        } else {
            self.room.shrink(lane.number, more);
        }
        if !was_kept && answer.is_some() {
            lane.counters.not_kept_no_room.up();
        }
        if was_kept {
            guard.count(Often::Completed);
        } else {
            lane.counters.not_kept.up();
        }
        let mut woken = self.landed(lane, word.kind());
        if word.has_waiters() {
            let outcome = answer.filter(|_| was_kept);
            let gift = || Gift::Completed { outcome: outcome.clone(), settled: now, end };
            woken.join(self.waiters.wake_all(cell, gift));
        }
        if written.is_some() && !by.leaves_out(word) {
            Cells::retire(cell, guard);
        }
        drop(woken);
        Ok(if was_kept { Finish::Kept } else { Finish::NotKept })
    }

    /// Rebuilds tables before slabs' numbers come round (invariant 5 of the index).
    fn renew_tables(&self, guard: &Guard<'_>) {
        let number = self.slabs.number();
        if number.saturating_sub(self.renewed.load(Ordering::Relaxed)) >= YOUNG {
            self.index.renew(number, &self.slabs, guard);
            self.renewed.store(number, Ordering::Relaxed);
        }
    }

    /// Gives an identity up. With an answer, the waiters present get it; else the oldest of them
    /// becomes the owner (R14). Whatever comes of it, the permit is used up.
    pub(crate) fn release(
        &self,
        lane: &Lane,
        owned: &Owned,
        answer: Option<Outcome>,
    ) -> Result<(), Lost> {
        let guard = self.pin();
        let cell = owned.cell();
        loop {
            let word = cell.word();
            if let Some(cause) = By::Owner.stale(word) {
                return Err(self.lost_permit(lane, cell, By::Owner, cause, answer, &guard));
            }
            let heirs = word.kind() == Kind::InFlight && word.has_waiters() && answer.is_none();
            if heirs && let Some(woken) = self.hand_over(lane, owned, word) {
                lane.counters.released.up();
                drop(woken);
                return Ok(());
            }
            // No heir: either nobody is listed any more, or the state has moved. A registration
            // that slips in between sets no new bit, but its waiter is woken below.
            if self.release_from(lane, cell, By::Owner, word, answer.as_ref(), &guard) {
                return Ok(());
            }
        }
    }

    /// As `release`, of a held claim, by an operator.
    pub(super) fn release_held(
        &self,
        lane: &Lane,
        cell: &Cell,
        guard: &Guard<'_>,
    ) -> Result<(), LostCause> {
        loop {
            let word = cell.word();
            if let Some(cause) = By::Operator.stale(word) {
                return Err(cause);
            }
            if self.release_from(lane, cell, By::Operator, word, None, guard) {
                return Ok(());
            }
        }
    }

    fn release_from(
        &self,
        lane: &Lane,
        cell: &Cell,
        by: By,
        word: Word,
        answer: Option<&Outcome>,
        guard: &Guard<'_>,
    ) -> bool {
        let out = by.leaves_out(word);
        // Left in its slot, if there are few such: the next claim is likely one of the same.
        let haunts = !out && Cells::may_haunt(cell);
        let next = if haunts { Word::ghost(self.now()) } else { word.ended().with_out(out) };
        if cell.swap(word, next).is_err() {
            if haunts {
                Cells::haunts_not(cell);
            }
            return false;
        }
        lane.counters.released.up();
        let mut woken = self.wake(cell, word, || match answer {
            Some(answer) => Gift::Answer(answer.clone()),
            None => Gift::LookAgain,
        });
        woken.join(if haunts {
            self.leave(lane, cell);
            self.landed(lane, word.kind())
        } else {
            self.ended(lane, cell, word.kind(), out, guard)
        });
        drop(woken);
        true
    }

    /// Makes the oldest waiter the owner; `None` if there was none or the state has moved.
    fn hand_over(&self, lane: &Lane, owned: &Owned, word: Word) -> Option<Woken> {
        let now = self.now();
        let cell = owned.cell();
        let deadline = now.plus(self.settings.lease);
        let next = Word::new(Kind::InFlight, deadline).with_waiters().with_out(true);
        let heir = self.waiters.wake_heir(cell, || {
            cell.swap(word, next).ok()?;
            let token = self.index.next_token();
            cell.name_owner(token, now);
            Some((owned.moved(), token))
        })?;
        lane.counters.handed_over.up();
        lane.counters.won.up();
        Some(heir)
    }

    /// Shuts an identity because nobody knows whether the work was done. The permit is used up.
    pub(crate) fn hold(&self, lane: &Lane, owned: &Owned) -> Result<(), Lost> {
        let guard = self.pin();
        let now = self.now();
        let cell = owned.cell();
        loop {
            let word = cell.word();
            if let Some(cause) = By::Owner.stale(word) {
                return Err(self.lost_permit(lane, cell, By::Owner, cause, None, &guard));
            }
            if word.kind() == Kind::Held {
                self.let_go(cell, &guard);
                return Ok(());
            }
            if self.hold_from(lane, cell, word, now, false).is_some() {
                return Ok(());
            }
        }
    }

    /// Holds a claim whose lease has lapsed. A renewal or completion in between wins.
    pub(super) fn hold_lapsed(&self, lane: &Lane, cell: &Cell, word: Word, now: Millis) -> Woken {
        let Some(woken) = self.hold_from(lane, cell, word, now, word.is_out()) else {
            return Woken::default();
        };
        lane.counters.lapsed.up();
        woken
    }

    fn hold_from(
        &self,
        lane: &Lane,
        cell: &Cell,
        word: Word,
        now: Millis,
        out: bool,
    ) -> Option<Woken> {
        let end = now.plus(self.settings.retention);
        cell.swap(word, Word::new(Kind::Held, end).with_out(out)).ok()?;
        cell.settle(now);
        lane.counters.held.up();
        let mut woken = self.landed(lane, Kind::InFlight);
        woken.join(self.wake(cell, word, || Gift::LookAgain));
        Some(woken)
    }

    /// Moves the deadline of a lease to a lease from now, never backwards. An attended claim is
    /// renewed as it is.
    pub(crate) fn renew(&self, lane: &Lane, owned: &Owned) -> Result<(), Lost> {
        let now = self.now();
        let deadline = now.plus(self.settings.lease);
        self.redate(lane, owned, now, |word| word.with_at(word.at().max(deadline)))
    }

    /// Takes the claim as renewed from now on, until `max_run` from now (R8).
    pub(crate) fn attend(&self, lane: &Lane, owned: &Owned) -> Result<(), Lost> {
        let now = self.now();
        let deadline = now.plus(self.settings.max_run);
        self.redate(lane, owned, now, |word| word.with_at(deadline).attended())
    }

    fn redate(
        &self,
        lane: &Lane,
        owned: &Owned,
        now: Millis,
        next: impl Fn(Word) -> Word,
    ) -> Result<(), Lost> {
        // Held off: the waiters' list goes by the cell's address.
        let _guard = self.pin();
        let cell = owned.cell();
        loop {
            let word = cell.word();
            let held = (word.kind() == Kind::Held).then_some(LostCause::Held);
            if let Some(cause) = By::Owner.stale(word).or(held) {
                return Err(Self::lost(lane, cause, None));
            }
            if word.is_attended() {
                // Nothing gives it more time than `max_run`.
                if word.view(now) == View::InFlight {
                    return Ok(());
                }
                drop(self.hold_lapsed(lane, cell, word, now));
                continue;
            }
            let next = next(word);
            if cell.swap(word, next).is_ok() {
                if next.has_waiters() {
                    // A lease cut short (attended for less than a lease) must be seen in time by
                    // those who wait. Who registers after the swap sees to it.
                    self.alarm.no_later_than(next.at());
                }
                return Ok(());
            }
        }
    }

    fn lost(lane: &Lane, cause: LostCause, outcome: Option<Outcome>) -> Lost {
        lane.counters.lost.up();
        Lost { cause, outcome }
    }

    fn lost_permit(
        &self,
        lane: &Lane,
        cell: &Cell,
        by: By,
        cause: LostCause,
        outcome: Option<Outcome>,
        guard: &Guard<'_>,
    ) -> Lost {
        if by == By::Owner {
            self.let_go(cell, guard);
        }
        Self::lost(lane, cause, outcome)
    }

    /// Whether the owner can still settle its claim; if not, its permit is used up.
    pub(crate) fn owns(&self, owned: &Owned) -> bool {
        let stale = By::Owner.stale(owned.cell().word()).is_some();
        if stale {
            self.let_go(owned.cell(), &self.pin());
        }
        !stale
    }

    /// The permit is used up, and the claim is not in flight.
    fn let_go(&self, cell: &Cell, guard: &Guard<'_>) {
        let mut word = cell.word();
        while let Err(moved) = cell.swap(word, word.with_out(false)) {
            word = moved;
        }
        if word.is_final() {
            let to = (word.kind() == Kind::Completed).then(|| word.place());
            // Who settled it may not have come so far.
            if !self.pass_on(cell, guard) {
                self.index.swing(cell, to, &self.slabs, guard);
            }
            Cells::retire(cell, guard);
        }
    }

    /// Ends a claim whose time is over, from `word`; `None` if it has moved.
    pub(super) fn end(
        &self,
        lane: &Lane,
        cell: &Cell,
        word: Word,
        guard: &Guard<'_>,
    ) -> Option<Woken> {
        let out = word.is_out();
        cell.swap(word, word.ended().with_out(out)).ok()?;
        let mut woken = self.wake(cell, word, || Gift::LookAgain);
        woken.join(self.ended(lane, cell, word.kind(), out, guard));
        Some(woken)
    }

    /// Called by whoever moved a claim from `from` to its end, where `out` tells whether a permit
    /// still has the cell.
    fn ended(&self, lane: &Lane, cell: &Cell, from: Kind, out: bool, guard: &Guard<'_>) -> Woken {
        self.leave(lane, cell);
        let woken = self.landed(lane, from);
        self.index.swing(cell, None, &self.slabs, guard);
        if !out {
            Cells::retire(cell, guard);
        }
        woken
    }

    /// Called by whoever moved a claim out of `from`. The last one wakes those who wait for the end
    /// of a drain: when the answer is dropped, because the caller may have locked the sweep, and
    /// has still to wake the waiters and to give the cell back should one of these panic.
    #[inline]
    pub(super) fn landed(&self, lane: &Lane, from: Kind) -> Woken {
        if from != Kind::InFlight {
            return Woken::default();
        }
        lane.in_flight.fetch_sub(1, Ordering::SeqCst);
        between_seq_cst();
        if self.draining.load(Ordering::SeqCst) && self.in_flight() == 0 {
            let wakers = std::mem::take(&mut self.drained.lock().wakers);
            return Woken::of(wakers.into_values());
        }
        Woken::default()
    }

    /// Makes a record dead whose end has come, and gives its room back.
    pub(super) fn expire_record(
        &self,
        lane: &Lane,
        place: Place,
        record: &Record,
        guard: &Guard<'_>,
    ) {
        match self.slabs.kill(place, record, guard) {
            Killed::Now => self.leave_record(lane, record),
            Killed::Copy => {}
            Killed::Before => return,
        }
        lane.counters.expired.up();
    }

    /// Gives the room of a record back. The caller has made it dead.
    pub(super) fn leave_record(&self, lane: &Lane, record: &Record) {
        let account = crate::identity::Identity::from_frame(record.frame()).account();
        self.room.leave(lane.number, account, record.cost());
    }
}
