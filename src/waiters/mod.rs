//! Those who came second: one list for threads and tasks (R13 to R15).
//!
//! Ground rules: a waiter is a [`Seat`] in the list of one record. The lists stand in shards chosen
//! by the record's address; the caller keeps the record alive while a seat is listed, so an
//! address is never reused early. A shard's lock is taken before a seat's, and wakers are called
//! with neither held.
//!
//! Invariants:
//!
//! 1. A seat gets at most one [`Gift`], from the thread that took it off the list.
//! 2. The waiters' bit of a record's state is set under the lock of its shard, by the same
//!    compare-and-swap that has seen the record in flight. So whoever moves the record on either
//!    stops the registration or sees the bit and comes for the lock: no wake-up is lost (R14).
//! 3. Who gives a seat up looks for a gift afterwards; an heir that leaves passes the permit on.

use std::{
    collections::{BTreeMap, HashMap},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    task::{Context, Poll, Waker},
};

use crate::{
    outcome::Outcome,
    record::Record,
    sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering},
};

const SHARDS: usize = 64;

/// What a waiter is woken with.
#[derive(Debug)]
pub(crate) enum Gift {
    /// The record has moved on: look at it again.
    LookAgain,
    /// The owner gave this answer and released (R14).
    Answer(Outcome),
    /// The owner released; this waiter is the next owner, with this token.
    Permit(u64),
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
    /// The record is no longer in flight.
    LookAgain,
    /// A cap is reached (R15).
    TooMany,
}

/// A listed waiter, by which it can leave.
#[derive(Debug)]
pub(crate) struct Ticket {
    number: u64,
    pub(crate) seat: Arc<Seat>,
}

/// The waiters of one record, oldest first.
#[derive(Debug, Default)]
struct List {
    seats: BTreeMap<u64, Arc<Seat>>,
}

#[derive(Debug, Default)]
struct Shard {
    lists: HashMap<usize, List, ahash::RandomState>,
    next: u64,
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

    /// How many wait for `record`.
    pub(crate) fn count(&self, record: &Arc<Record>) -> usize {
        let shard = self.shard(record).lock();
        shard.lists.get(&address(record)).map_or(0, |list| list.seats.len())
    }

    /// Takes a seat for `record`. `mark` sets the waiters' bit, or says that the record has moved
    /// on; it runs under the list's lock (invariant 2).
    pub(crate) fn join(
        &self,
        record: &Arc<Record>,
        mark: impl FnOnce() -> bool,
    ) -> Result<Ticket, NoSeat> {
        let mut shard = self.shard(record).lock();
        if !mark() {
            return Err(NoSeat::LookAgain);
        }
        let listed = shard.lists.get(&address(record)).map_or(0, |list| list.seats.len());
        if listed >= self.max_each || !self.enter() {
            return Err(NoSeat::TooMany);
        }
        let number = shard.next;
        shard.next += 1;
        let seat = Arc::new(Seat::default());
        let list = shard.lists.entry(address(record)).or_default();
        list.seats.insert(number, Arc::clone(&seat));
        Ok(Ticket { number, seat })
    }

    /// Gives a seat up. A gift that was there already is handed back and must not be dropped
    /// unseen (invariant 3).
    pub(crate) fn leave(&self, record: &Arc<Record>, ticket: &Ticket) -> Option<Gift> {
        let mut shard = self.shard(record).lock();
        if let Some(list) = shard.lists.get_mut(&address(record))
            && list.seats.remove(&ticket.number).is_some()
        {
            if list.seats.is_empty() {
                shard.lists.remove(&address(record));
            }
            self.exit(1);
            return None;
        }
        drop(shard);
        ticket.seat.place.lock().gift.take()
    }

    /// Wakes all waiters of `record` with what `gift` makes for each.
    pub(crate) fn wake_all(&self, record: &Arc<Record>, gift: impl Fn() -> Gift) {
        let list = self.shard(record).lock().lists.remove(&address(record));
        let Some(list) = list else { return };
        self.exit(list.seats.len());
        // All gifts first: a waker may panic, and no seat must be left without.
        let wakers: Vec<Waker> =
            list.seats.into_values().filter_map(|seat| seat.give(gift())).collect();
        call_all(wakers);
    }

    /// Makes the oldest waiter of `record` its next owner. `hand_over` names the new owner in the
    /// record, under the list's lock, and answers with its token; `None` means that the record has
    /// moved on. Answers false if nobody became the owner.
    pub(crate) fn wake_heir(
        &self,
        record: &Arc<Record>,
        hand_over: impl FnOnce() -> Option<u64>,
    ) -> bool {
        let mut shard: MutexGuard<'_, Shard> = self.shard(record).lock();
        let Some(list) = shard.lists.get_mut(&address(record)) else { return false };
        let Some(heir) = list.seats.first_entry() else { return false };
        let Some(token) = hand_over() else { return false };
        let seat = heir.remove();
        if list.seats.is_empty() {
            shard.lists.remove(&address(record));
        }
        self.exit(1);
        // The gift is laid down under the lock: an heir that leaves now finds it.
        let waker = seat.give(Gift::Permit(token));
        drop(shard);
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }

    fn shard(&self, record: &Arc<Record>) -> &Mutex<Shard> {
        // Records are at least 128 bytes apart; the low bits would all be the same.
        &self.shards[(address(record) >> 7) % SHARDS]
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

/// Calls all wakers, the oldest first, also if one of them panics; then it panics as that one did.
pub(crate) fn call_all(wakers: impl IntoIterator<Item = Waker>) {
    let mut panicked = None;
    for waker in wakers {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
            panicked = Some(panic);
        }
    }
    if let Some(panic) = panicked {
        resume_unwind(panic);
    }
}

fn address(record: &Arc<Record>) -> usize {
    Arc::as_ptr(record).addr()
}
