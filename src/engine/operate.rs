//! What operators and the sweep do.

use std::task::Waker;

use crate::{
    clock::Millis,
    error::{Busy, LostCause, ResolveError},
    identity::Identity,
    outcome::Outcome,
    record::{
        Record,
        word::{Kind, View},
    },
    stats::Stats,
    sync::{Arc, Ordering},
    waiters::Gift,
};

use super::{
    Engine,
    settle::{By, Finish},
};

/// What one step of the sweep did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Records taken out.
    pub(crate) reaped: usize,
    /// Timers looked at.
    pub(crate) looked_at: usize,
    /// Whether more is due.
    pub(crate) more: bool,
}

impl Engine {
    /// The record of an identity that a caller could still see.
    pub(crate) fn live(&self, frame: &[u8]) -> Option<(Arc<Record>, View)> {
        let record = self.index.find(frame)?;
        let now = self.now();
        let mut word = record.word();
        if word.view(now) == View::Lapsed && self.lapse_holds(word) {
            self.hold_lapsed(&record, word, now);
            word = record.word();
        }
        match word.view(now) {
            View::Gone => None,
            view => Some((record, view)),
        }
    }

    /// Settles a held identity with an outcome.
    pub(crate) fn resolve(&self, frame: &[u8], outcome: Outcome) -> Result<(), ResolveError> {
        let (record, view) = self.live(frame).ok_or(ResolveError::Absent)?;
        self.resolvable(view)?;
        match self.complete(&record, By::Operator, Some(outcome)) {
            Ok(Finish::NoRoom(outcome)) => Err(ResolveError::Full(outcome)),
            Ok(Finish::Kept | Finish::NotKept) => {
                self.counters.resolved.up();
                Ok(())
            }
            Err(lost) => Err(unresolved(lost.cause)),
        }
    }

    /// Settles a held identity by release: the next caller runs.
    pub(crate) fn resolve_release(&self, frame: &[u8]) -> Result<(), ResolveError> {
        let (record, view) = self.live(frame).ok_or(ResolveError::Absent)?;
        self.resolvable(view)?;
        match self.release(&record, By::Operator, None) {
            Ok(()) => {
                self.counters.resolved.up();
                Ok(())
            }
            Err(lost) => Err(unresolved(lost.cause)),
        }
    }

    fn resolvable(&self, view: View) -> Result<(), ResolveError> {
        match view {
            View::Held => Ok(()),
            View::InFlight | View::Lapsed => Err(ResolveError::InFlight),
            View::Completed | View::NotKept => Err(ResolveError::Completed),
            View::Gone => Err(ResolveError::Absent),
        }
    }

    /// Forgets an identity. True if a caller could have seen it. A lapsed claim is not busy: it is
    /// as good as held, or anybody's.
    pub(crate) fn forget(&self, record: &Arc<Record>, force: bool) -> Result<bool, Busy> {
        loop {
            let word = record.word();
            let view = word.view(self.now());
            match word.kind() {
                Kind::InFlight if view == View::InFlight && !force => return Err(Busy),
                Kind::InFlight | Kind::Held => {
                    if record.swap(word, word.ended()).is_err() {
                        continue;
                    }
                    if view == View::Lapsed {
                        self.counters.lapsed.up();
                    }
                    self.landed(word.kind());
                }
                Kind::Completed | Kind::NotKept | Kind::Ended => {}
            }
            let forgotten = self.unlink(record) && view != View::Gone;
            if word.has_waiters() {
                self.waiters.wake_all(record, || Gift::LookAgain);
            }
            if forgotten {
                self.counters.forgotten.up();
            }
            return Ok(forgotten);
        }
    }

    pub(crate) fn find(&self, frame: &[u8]) -> Option<Arc<Record>> {
        self.index.find(frame)
    }

    /// All records of an account.
    pub(crate) fn of_account(&self, account: &[u8]) -> Vec<Arc<Record>> {
        self.index.pick(|record| Identity::from_frame(record.frame()).account() == account)
    }

    pub(crate) fn stats(&self) -> Stats {
        let mut stats = Stats {
            keys: self.room.keys(),
            bytes: self.room.bytes(),
            in_flight: self.in_flight.load(Ordering::SeqCst),
            waiters: self.waiters.total(),
            nearly_full: self.room.nearly_full(),
            sweep_alive: !self.expiry.alarm().is_dead(),
            ..Stats::default()
        };
        self.counters.read_into(&mut stats);
        stats
    }

    /// Takes no new claims from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Whether nothing is in flight; if something is, `waker` is called when it has landed.
    /// `number` names the caller to [`Engine::leave_drain`].
    pub(crate) fn is_drained(&self, number: &mut Option<u64>, waker: &Waker) -> bool {
        // Listed before the count is read: who lands last either is seen or sees the waker.
        let mut drained = self.drained.lock();
        if self.in_flight.load(Ordering::SeqCst) == 0 {
            return true;
        }
        let number = *number.get_or_insert_with(|| {
            drained.last += 1;
            drained.last
        });
        let old = drained.wakers.insert(number, waker.clone());
        drop(drained);
        drop(old);
        false
    }

    /// Takes a waker off the list that [`Engine::is_drained`] has put there.
    pub(crate) fn leave_drain(&self, number: u64) {
        // Bound to a name so that it is dropped after the lock.
        let _waker = self.drained.lock().wakers.remove(&number);
    }

    pub(crate) fn alarm(&self) -> &Arc<crate::expire::Alarm> {
        self.expiry.alarm()
    }

    /// A time before which nothing is due.
    pub(crate) fn next_due(&self) -> Option<Millis> {
        self.expiry.next()
    }

    /// Looks at a bounded number of records whose timers have fired (R24).
    pub(crate) fn sweep_step(&self) -> Step {
        let now = self.now();
        let mut fired = Vec::new();
        let more = self.expiry.fired(now, &mut fired);
        let mut step = Step { reaped: 0, looked_at: fired.len(), more };
        let mut unseen = Unseen { engine: self, records: fired.into_iter(), now };
        for record in unseen.records.by_ref() {
            step.reaped += usize::from(self.fire(&record, now));
        }
        step
    }

    /// Gives memory back that a burst has left behind (R26).
    pub(crate) fn trim(&self) {
        self.index.shrink_if_sparse();
        self.room.trim();
    }

    /// Looks at one record whose timer has fired; true if it was taken out.
    fn fire(&self, record: &Arc<Record>, now: Millis) -> bool {
        // Whether it is the timer that has fired or one set since: what follows sets the one that is
        // needed, by a state seen after this.
        self.expiry.cancel(record, &mut record.parts());
        loop {
            let word = record.word();
            match word.view(now) {
                View::InFlight if word.has_waiters() => {
                    self.expiry.exactly(record, &mut record.parts(), word.at());
                    return false;
                }
                View::InFlight | View::Held | View::Completed | View::NotKept => {
                    self.expiry.by_tick(record, &mut record.parts(), word.at());
                    return false;
                }
                View::Lapsed if self.lapse_holds(word) => {
                    // Its end has a new timer now.
                    self.hold_lapsed(record, word, now);
                    return false;
                }
                View::Lapsed => {
                    // Waits for who takes it over, one of its waiters or a caller to come, until
                    // its retention ends (T3).
                    let end = word.at().plus(self.settings.retention);
                    if now < end {
                        self.expiry.by_tick(record, &mut record.parts(), end);
                        if word.has_waiters() {
                            self.waiters.wake_all(record, || Gift::LookAgain);
                        }
                        return false;
                    }
                    if record.swap(word, word.ended()).is_ok() {
                        self.counters.lapsed.up();
                        self.landed(Kind::InFlight);
                        self.waiters.wake_all(record, || Gift::LookAgain);
                        return self.reap(record, word);
                    }
                }
                View::Gone => {
                    if word.kind() != Kind::Held || record.swap(word, word.ended()).is_ok() {
                        return self.reap(record, word);
                    }
                }
            }
        }
    }

    fn reap(&self, record: &Arc<Record>, word: crate::record::word::Word) -> bool {
        let reaped = self.unlink(record);
        if reaped {
            self.count_end(word);
        }
        reaped
    }

    /// Counts a record that ended by its retention; what ended otherwise was counted then.
    pub(super) fn count_end(&self, word: crate::record::word::Word) {
        if word.kind() != Kind::Ended {
            self.counters.expired.up();
        }
    }
}

/// Records whose timers have fired and that nobody has looked at yet. If a panic comes in between
/// (a waker's, who is somebody else's), they get another timer: none is forgotten.
struct Unseen<'a> {
    engine: &'a Engine,
    records: std::vec::IntoIter<Arc<Record>>,
    now: Millis,
}

impl Drop for Unseen<'_> {
    fn drop(&mut self) {
        for record in self.records.by_ref() {
            let mut parts = record.parts();
            self.engine.expiry.cancel(&record, &mut parts);
            self.engine.expiry.exactly(&record, &mut parts, self.now);
        }
    }
}

fn unresolved(cause: LostCause) -> ResolveError {
    match cause {
        LostCause::Completed => ResolveError::Completed,
        LostCause::Held => ResolveError::InFlight,
        LostCause::Ended => ResolveError::Absent,
    }
}
