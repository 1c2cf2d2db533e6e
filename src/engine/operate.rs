//! What operators do.

use std::{task::Waker, time::Duration};

use crate::{
    clock::Millis,
    error::{Busy, LostCause, ResolveError},
    fingerprint::Fingerprint,
    identity::{Frame, Identity},
    index::{For, What},
    outcome::Outcome,
    reclaim::Guard,
    record::{
        Cell, Killed, Record,
        word::{Kind, View},
    },
    stats::{Often, Stats},
    sync::{Arc, Ordering, between_seq_cst},
    waiters::Woken,
};

use super::{
    Engine,
    settle::{By, Finish},
};

/// What an operator is told of an identity.
pub(crate) struct Shown {
    pub(crate) view: View,
    pub(crate) age: Duration,
    pub(crate) remaining: Duration,
    pub(crate) token: u64,
    #[cfg_attr(
        not(feature = "http"),
        expect(dead_code, reason = "only a client asks by the key alone")
    )]
    pub(crate) fingerprint: Fingerprint,
    pub(crate) waiters: usize,
}

/// A sum of counts as a gauge shows it. The lanes are read one after the other: of a claim that comes
/// in one and goes in another meanwhile only the going may be seen, and the sum may be below zero.
fn shown(in_flight: usize) -> usize {
    if in_flight > usize::MAX / 2 { 0 } else { in_flight }
}

/// What stands for an identity.
struct Viewed<'g> {
    cell: Option<&'g Cell>,
    record: Option<&'g Record>,
    view: View,
}

impl Engine {
    fn find<'g>(&'g self, frame: &Frame, guard: &'g Guard<'g>) -> What<'g> {
        let hash = self.hash(&Identity::from_frame(frame));
        loop {
            match self.index.find(hash, frame, For::Reading, &self.slabs, guard).what {
                What::Cell(cell) if self.pass_on(cell, guard) => {}
                what => return what,
            }
        }
    }

    /// The cell or the record of an identity and what it is; `Gone` if a caller would not see it.
    fn view<'g>(&'g self, frame: &Frame, guard: &'g Guard<'g>) -> Viewed<'g> {
        let mut before = What::Absent;
        loop {
            let what = self.find(frame, guard);
            let viewed = self.view_of(what, guard);
            // Invariant 4 of the engine.
            if viewed.view != View::Gone || what.is_same(&before) {
                return viewed;
            }
            before = what;
        }
    }

    fn view_of<'g>(&'g self, what: What<'g>, guard: &'g Guard<'g>) -> Viewed<'g> {
        let now = self.now();
        let (cell, record) = match what {
            What::Absent => (None, None),
            What::Record(_, record) => (None, Some(record)),
            What::Cell(cell) => {
                let mut word = cell.word();
                if word.view(now) == View::Lapsed && self.lapse_holds(word) {
                    drop(self.hold_lapsed(self.own_lane(), cell, word, now));
                    word = cell.word();
                }
                match word.view(now) {
                    View::Completed => (Some(cell), self.slabs.at(word.place(), guard)),
                    view => return Viewed { cell: Some(cell), record: None, view },
                }
            }
        };
        let view = match record {
            Some(record) if !record.is_over(now) && record.is_kept() => View::Completed,
            Some(record) if !record.is_over(now) => View::NotKept,
            _ => View::Gone,
        };
        Viewed { cell, record, view }
    }

    /// When the present owner has won and when its lease ends, if one runs.
    pub(crate) fn running(&self, frame: &Frame) -> Option<(Millis, Millis)> {
        let guard = self.pin();
        let What::Cell(cell) = self.find(frame, &guard) else { return None };
        let word = cell.word();
        (word.view(self.now()) == View::InFlight).then(|| (cell.claimed(), word.at()))
    }

    /// What there is to tell of an identity.
    pub(crate) fn show(&self, frame: &Frame) -> Option<Shown> {
        let guard = self.pin();
        // Judges a lapse, as a caller would.
        let Viewed { cell, record, view } = self.view(frame, &guard);
        let now = self.now();
        let retention = Duration::from_millis(self.settings.retention.0);
        let of_record = |record: &Record| {
            let remaining = record.end().since(now);
            let age = retention.saturating_sub(remaining);
            let (token, fingerprint) = (record.token(), record.fingerprint());
            Shown { view, age, remaining, token, fingerprint, waiters: 0 }
        };
        if view == View::Gone {
            return None;
        }
        if let Some(record) = record {
            return Some(of_record(record));
        }
        let cell = cell?;
        let word = cell.word();
        let since = match word.kind() {
            Kind::Completed => return self.slabs.at(word.place(), &guard).map(of_record),
            Kind::InFlight => cell.claimed(),
            Kind::Held | Kind::NotKept | Kind::Ended => cell.settled(),
        };
        Some(Shown {
            view,
            age: now.since(since),
            remaining: if word.kind() == Kind::Ended {
                Duration::ZERO
            } else {
                word.at().since(now)
            },
            token: cell.token(),
            fingerprint: *cell.fingerprint(),
            waiters: self.waiters.count(cell),
        })
    }

    /// Settles a held identity with an outcome, or by release: then the next caller runs.
    pub(crate) fn resolve(
        &self,
        frame: &Frame,
        outcome: Option<Outcome>,
    ) -> Result<(), ResolveError> {
        let guard = self.pin();
        let lane = self.own_lane();
        let Viewed { cell, view, .. } = self.view(frame, &guard);
        let cell = match (cell, view) {
            (Some(cell), View::Held) => cell,
            (_, View::InFlight | View::Lapsed) => return Err(ResolveError::InFlight),
            (_, View::Completed | View::NotKept) => return Err(ResolveError::Completed),
            (_, View::Gone | View::Held) => return Err(ResolveError::Absent),
        };
        let settled = match outcome {
            Some(outcome) => match self.complete(lane, cell, By::Operator, Some(outcome), &guard) {
                Ok(Finish::NoRoom(outcome)) => return Err(ResolveError::Full(outcome)),
                Ok(Finish::Kept | Finish::NotKept) => Ok(()),
                Err(lost) => Err(lost.cause),
            },
            None => self.release_held(lane, cell, &guard),
        };
        match settled {
            Ok(()) => {
                lane.counters.resolved.up();
                Ok(())
            }
            Err(LostCause::Completed) => Err(ResolveError::Completed),
            Err(LostCause::Held) => Err(ResolveError::InFlight),
            Err(LostCause::Ended) => Err(ResolveError::Absent),
        }
    }

    /// Forgets an identity. True if a caller could have seen it. A lapsed claim is not busy: it is
    /// as good as held, or anybody's.
    pub(crate) fn forget(&self, frame: &Frame, force: bool) -> Result<bool, Busy> {
        // Declared first: waiters are woken when nothing is locked any more.
        let mut woken = Woken::default();
        let _still = self.sweeping.lock();
        let guard = self.pin();
        let what = self.find(frame, &guard);
        self.forget_what(what, force, &mut woken, &guard)
    }

    /// The caller has locked the sweep, which moves no record meanwhile.
    fn forget_what(
        &self,
        what: What<'_>,
        force: bool,
        woken: &mut Woken,
        guard: &Guard<'_>,
    ) -> Result<bool, Busy> {
        let lane = self.own_lane();
        let now = self.now();
        let (place, record) = match what {
            What::Absent => return Ok(false),
            What::Record(place, record) => (place, Some(record)),
            What::Cell(cell) => loop {
                let word = cell.word();
                let view = word.view(now);
                let seen = view != View::Gone;
                match word.kind() {
                    Kind::InFlight if view == View::InFlight && !force => return Err(Busy),
                    Kind::InFlight | Kind::Held | Kind::NotKept => {
                        let Some(settled) = self.end(lane, cell, word, guard) else { continue };
                        woken.join(settled);
                        if view == View::Lapsed {
                            lane.counters.lapsed.up();
                        }
                        if seen {
                            lane.counters.forgotten.up();
                        } else {
                            lane.counters.expired.up();
                        }
                        return Ok(seen);
                    }
                    Kind::Completed => break (word.place(), self.slabs.at(word.place(), guard)),
                    Kind::Ended if self.pass_on(cell, guard) => {
                        let successor = self.find(cell.frame(), guard);
                        return self.forget_what(successor, force, woken, guard);
                    }
                    Kind::Ended => return Ok(false),
                }
            },
        };
        let Some(record) = record else { return Ok(false) };
        let seen = !record.is_over(now);
        if !seen {
            self.expire_record(lane, place, record, guard);
            return Ok(false);
        }
        match self.slabs.kill(place, record, guard) {
            Killed::Now => self.leave_record(lane, record),
            Killed::Copy => {}
            Killed::Before => return Ok(false),
        }
        lane.counters.forgotten.up();
        Ok(true)
    }

    /// Forgets all identities of an account that are not in flight, and says how many.
    pub(crate) fn forget_account(&self, account: &[u8]) -> usize {
        let mut forgotten = 0;
        let mut position = Some(0);
        while let Some(at) = position {
            // For each bucket, so that nothing is held back for long.
            let mut woken = Woken::default();
            let _still = self.sweeping.lock();
            let guard = self.pin();
            position = self.index.walk(at, &self.slabs, &guard, &mut |what| {
                let frame: &[u8] = match what {
                    What::Absent => return,
                    What::Cell(cell) => cell.frame(),
                    What::Record(_, record) => record.frame(),
                };
                if Identity::from_frame(frame).account() == account {
                    let was_seen = self.forget_what(what, false, &mut woken, &guard) == Ok(true);
                    forgotten += usize::from(was_seen);
                }
            });
        }
        forgotten
    }

    /// Identities in flight.
    pub(super) fn in_flight(&self) -> usize {
        // A claim may be taken off in another lane than the one it was added in.
        let counts = self.lanes.iter().map(|lane| lane.in_flight.load(Ordering::SeqCst));
        counts.fold(0, usize::wrapping_add)
    }

    pub(crate) fn stats(&self) -> Stats {
        let (keys, bytes) = self.room.used();
        let mut stats = Stats {
            keys,
            bytes,
            in_flight: shown(self.in_flight()),
            waiters: self.waiters.total(),
            nearly_full: self.room.nearly_full(),
            sweep_alive: !self.alarm.is_dead(),
            ..Stats::default()
        };
        self.lanes.iter().for_each(|lane| lane.counters.read_into(&mut stats));
        stats.won += self.domain.counted(Often::Won);
        stats.completed += self.domain.counted(Often::Completed);
        stats.replays += self.domain.counted(Often::Replayed);
        stats.met_in_flight += self.domain.counted(Often::MetInFlight);
        stats
    }

    /// Takes no new claims from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        between_seq_cst();
    }

    /// Whether nothing is in flight; if something is, `waker` is called when it has landed.
    /// `number` names the caller to [`Engine::leave_drain`].
    pub(crate) fn is_drained(&self, number: &mut Option<u64>, waker: &Waker) -> bool {
        // Listed before the counts are read: who lands last either is seen or sees the waker.
        let mut drained = self.drained.lock();
        let number = *number.get_or_insert_with(|| {
            drained.last += 1;
            drained.last
        });
        let old = drained.wakers.insert(number, waker.clone());
        drop(drained);
        drop(old);
        self.in_flight() == 0
    }

    /// Takes a waker off the list that [`Engine::is_drained`] has put there.
    pub(crate) fn leave_drain(&self, number: u64) {
        // Bound to a name so that it is dropped after the lock.
        let _waker = self.drained.lock().wakers.remove(&number);
    }

    pub(crate) fn alarm(&self) -> &Arc<crate::expire::Alarm> {
        &self.alarm
    }
}
