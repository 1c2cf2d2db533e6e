//! Those who came second: one list for threads and tasks (R13 to R15).
//!
//! Ground rules: a waiter is a [`Seat`] in the list of one cell. The lists stand in shards chosen by
//! the cell's address. Who moves a cell on empties its list before it lets go of its guard, so an
//! address is never reused while it has a list. A shard's lock is taken before a seat's, and wakers
//! are called with neither held.
//!
//! Invariants:
//!
//! 1. A seat gets at most one [`Gift`], from the thread that took it off the list.
//! 2. The waiters' bit of a cell's state is set under the lock of its shard, by the same
//!    compare-and-swap that has seen the cell in flight. So whoever moves the cell on either
//!    stops the registration or sees the bit and comes for the lock: no wake-up is lost (R14).
//! 3. Who gives a seat up looks for a gift afterwards; an heir that leaves passes the permit on.

use std::{
    collections::{BTreeMap, HashMap},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    task::{Context, Poll, Waker},
};

use crate::{
    clock::Millis,
    outcome::Outcome,
    record::{Cell, Owned},
    sync::{Arc, AtomicUsize, Mutex, Ordering},
};

const SHARDS: u64 = if cfg!(oncekey_loom) { 1 } else { 64 };

/// What a waiter is woken with.
#[derive(Debug)]
pub(crate) enum Gift {
    /// The claim has moved on: look again.
    LookAgain,
    /// The owner completed.
    Completed {
        /// What it left, if that was kept.
        outcome: Option<Outcome>,
        /// When.
        settled: Millis,
        /// When its record ends.
        end: Millis,
    },
    /// The owner gave this answer and released (R14).
    Answer(Outcome),
    /// The owner released; this waiter is the next owner, with this token.
    Permit(Owned, u64),
}

/// One waiter's place: a waker until the gift is there.
#[derive(Debug, Default)]
pub(crate) struct Seat {
    place: Mutex<Place>,
}

#[derive(Debug, Default)]
struct Place {
    waker: Option<Waker>,
    gift: Option<Gift>,
}

impl Seat {
    /// Takes the gift, or keeps the waker of `cx` for it.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<Gift> {
        let mut place = self.place.lock();
        if let Some(gift) = place.gift.take() {
            return Poll::Ready(gift);
        }
        if place.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        let old = place.waker.replace(cx.waker().clone());
        drop(place);
        // Unlocked: with a waker its task may end, and that may end anything.
        drop(old);
        Poll::Pending
    }

    fn give(&self, gift: Gift) -> Option<Waker> {
        let mut place = self.place.lock();
        place.gift = Some(gift);
        place.waker.take()
    }
}

/// Why a seat was not given.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoSeat {
    /// The cell is no longer in flight.
    LookAgain,
    /// A cap is reached (R15).
    TooMany,
}

/// A listed waiter, by which it can leave.
#[derive(Debug)]
pub(crate) struct Ticket {
    cell: u64,
    number: u64,
    pub(crate) seat: Arc<Seat>,
}

/// The waiters of one cell, oldest first.
#[derive(Debug, Default)]
struct List {
    seats: BTreeMap<u64, Arc<Seat>>,
}

#[derive(Debug, Default)]
struct Shard {
    lists: HashMap<u64, List, ahash::RandomState>,
    next: u64,
}

impl Shard {
    /// Takes a list out; the last one takes the memory with it (R26).
    fn remove(&mut self, cell: u64) -> Option<List> {
        let list = self.lists.remove(&cell);
        if self.lists.is_empty() {
            self.lists = HashMap::default();
        }
        list
    }
}

/// Wakers that are called when it is dropped: with no lock held, because they may call the store.
#[derive(Debug, Default)]
#[must_use = "it wakes when it is dropped"]
pub(crate) struct Woken(Vec<Waker>);

impl Woken {
    pub(crate) fn of(wakers: impl IntoIterator<Item = Waker>) -> Self {
        Self(wakers.into_iter().collect())
    }

    /// Not to be called here.
    pub(crate) fn take(mut self) -> Vec<Waker> {
        std::mem::take(&mut self.0)
    }

    /// These and those.
    #[inline]
    pub(crate) fn join(&mut self, mut others: Self) {
        if !others.0.is_empty() {
            self.0.append(&mut others.0);
        }
    }
}

impl Drop for Woken {
    #[inline]
    fn drop(&mut self) {
        if !self.0.is_empty() {
            call_all(self.0.drain(..));
        }
    }
}

/// Calls all wakers, the oldest first, also if one of them panics; then it panics as that one did.
fn call_all(wakers: impl IntoIterator<Item = Waker>) {
    let mut panicked = None;
    for waker in wakers {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
            panicked = Some(panic);
        }
    }
    if let Some(panic) = panicked.filter(|_| !std::thread::panicking()) {
        resume_unwind(panic);
    }
}

/// All waiters of a store.
#[derive(Debug)]
pub(crate) struct Waiters {
    shards: Box<[Mutex<Shard>]>,
    total: AtomicUsize,
    max_each: usize,
    max_total: usize,
}

impl Waiters {
    pub(crate) fn new(max_each: usize, max_total: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            total: AtomicUsize::new(0),
            max_each,
            max_total,
        }
    }

    /// How many wait, in all.
    pub(crate) fn total(&self) -> usize {
        self.total.load(Ordering::Relaxed)
    }

    /// How many wait for `cell`.
    pub(crate) fn count(&self, cell: &Cell) -> usize {
        let shard = self.shard(cell.bits()).lock();
        shard.lists.get(&cell.bits()).map_or(0, |list| list.seats.len())
    }

    /// Takes a seat for `cell`. `mark` sets the waiters' bit, or says that the cell has
    /// moved on; it runs under the list's lock (invariant 2).
    pub(crate) fn join(&self, cell: &Cell, mark: impl FnOnce() -> bool) -> Result<Ticket, NoSeat> {
        let key = cell.bits();
        let mut shard = self.shard(key).lock();
        if !mark() {
            return Err(NoSeat::LookAgain);
        }
        let listed = shard.lists.get(&key).map_or(0, |list| list.seats.len());
        if listed >= self.max_each || !self.enter() {
            return Err(NoSeat::TooMany);
        }
        let number = shard.next;
        shard.next += 1;
        let seat = Arc::new(Seat::default());
        let list = shard.lists.entry(key).or_default();
        list.seats.insert(number, Arc::clone(&seat));
        Ok(Ticket { cell: key, number, seat })
    }

    /// Gives a seat up. A gift that was there already is handed back and must not be dropped
    /// unseen (invariant 3).
    pub(crate) fn leave(&self, ticket: &Ticket) -> Option<Gift> {
        let mut shard = self.shard(ticket.cell).lock();
        if let Some(list) = shard.lists.get_mut(&ticket.cell)
            && list.seats.remove(&ticket.number).is_some()
        {
            if list.seats.is_empty() {
                shard.remove(ticket.cell);
            }
            self.exit(1);
            return None;
        }
        drop(shard);
        ticket.seat.place.lock().gift.take()
    }

    /// Gives all waiters of `cell` what `gift` makes for each; they are woken when the answer is
    /// dropped. The caller has moved the cell on and still holds its guard.
    pub(crate) fn wake_all(&self, cell: &Cell, gift: impl Fn() -> Gift) -> Woken {
        let list = self.shard(cell.bits()).lock().remove(cell.bits());
        list.map_or_else(Woken::default, |list| self.settle(list, gift))
    }

    fn settle(&self, list: List, gift: impl Fn() -> Gift) -> Woken {
        self.exit(list.seats.len());
        Woken(list.seats.into_values().filter_map(|seat| seat.give(gift())).collect())
    }

    /// Makes the oldest waiter of `cell` its next owner. `hand_over` names the new owner in the
    /// cell, under the list's lock, and answers with what it gets; `None` means that the cell has
    /// moved on. The heir is woken when the answer is dropped; `None` if nobody became the owner.
    pub(crate) fn wake_heir(
        &self,
        cell: &Cell,
        hand_over: impl FnOnce() -> Option<(Owned, u64)>,
    ) -> Option<Woken> {
        let mut shard = self.shard(cell.bits()).lock();
        let list = shard.lists.get_mut(&cell.bits())?;
        let heir = list.seats.first_entry()?;
        let (owned, token) = hand_over()?;
        let seat = heir.remove();
        if list.seats.is_empty() {
            shard.remove(cell.bits());
        }
        self.exit(1);
        // The gift is laid down under the lock: an heir that leaves now finds it.
        Some(Woken::of(seat.give(Gift::Permit(owned, token))))
    }

    /// Settles those whose owner's lease has lapsed by `now`, and answers with when the next one may.
    /// `deadline` reads the deadline of a cell that is in flight.
    pub(crate) fn lapse(
        &self,
        now: Millis,
        deadline: impl Fn(&Cell) -> Option<Millis>,
        woken: &mut Woken,
    ) -> Option<Millis> {
        if self.total() == 0 {
            return None;
        }
        let mut next: Option<Millis> = None;
        for shard in &self.shards {
            let mut lapsed = Vec::new();
            let mut shard = shard.lock();
            let keys: Vec<u64> = shard.lists.keys().copied().collect();
            for key in keys {
                // The list has a waiter and is locked.
                let cell = Cell::waited_for(key, &shard);
                let at = deadline(cell).filter(|at| *at > now);
                match at {
                    None => lapsed.extend(shard.remove(key)),
                    Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                }
            }
            drop(shard);
            for list in lapsed {
                woken.join(self.settle(list, || Gift::LookAgain));
            }
        }
        next
    }

    fn shard(&self, cell: u64) -> &Mutex<Shard> {
        // Cells are 12 units of 16 bytes apart; the low bits would be much the same.
        &self.shards[(cell / 12 % SHARDS) as usize]
    }

    fn enter(&self) -> bool {
        self.total
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |total| {
                (total < self.max_total).then_some(total + 1)
            })
            .is_ok()
    }

    fn exit(&self, seats: usize) {
        self.total.fetch_sub(seats, Ordering::Relaxed);
    }
}
