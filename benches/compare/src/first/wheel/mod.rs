//! A hierarchical timer wheel: what is to happen when, for very many things.
//!
//! Pure: it knows no clock and takes `now` as a number of ticks (the store uses milliseconds). One
//! owner at a time (`&mut`), no lock, no thread.
//!
//! Each level has 64 slots; a slot of level `n` spans `64^n` ticks, and 11 levels cover every
//! `u64`, so that nothing is clamped and nothing wraps. `turned` is the time up to which the wheel
//! was turned. Its digits to the base 64 are the hands, one for each level, and a timer stands at
//! the highest digit in which its time differs from `turned`:
//!
//! ```text
//!                  level 2            level 1            level 0          list
//!                  4096 ticks each    64 ticks each      1 tick each
//! digit of turned        5                 63                 62
//!                  0....5.6....63     0.......63         0......62.63     open
//!                         #                                         #     ###
//!                         |                                         |     |
//!                   6:00:00 to         round is over,         5:63:63     due, or of a slot that
//!                   6:63:63            nothing left                       has begun
//! ```
//!
//! Turning to `now` goes from one occupied slot to the next, wherever that is: the lowest bit set
//! in the lowest level that has one. Empty time costs nothing. A slot that has begun is moved as a
//! whole, by its first link, into the list `open`; from there each timer is handed out if it is due
//! and else put into a lower level, one for each unit of budget.
//!
//! Invariants:
//!
//! 1. A timer of level `n` has the digits of `turned` above digit `n`, and a greater digit `n`. So
//!    all timers in levels are later than `turned`, and those of a level are earlier than those of
//!    the next. Turning on to a time before the next occupied slot keeps this true.
//! 2. A bit of `occupied` is set if and only if the list of that slot has a timer.
//! 3. `open` has the timers of slots that have begun but were not dealt with, and those that were
//!    late when they came. It is emptied before the wheel turns on, so that none is passed over.
//! 4. `turned` never goes back and never beyond `now`; it stays behind only where a budget ran out.
//! 5. A timer's number (`serial`) is never used twice, also after its place was given back.
//!
//! Work: a call of [`Wheel::advance`] deals with at most `budget` timers and steps over at most as
//! many slots plus one, in 11 comparisons each. A timer is dealt with at most once for each level
//! and in practice three or four times (24 h in milliseconds are five digits). The rest is constant
//! time, on average over growth and shrinkage of the slab.
//!
//! Memory: 24 bytes and the item for each timer, as long as timers that come together leave
//! together; see `slab` for the worst case. 2.8 KB for the slots.

mod slab;

use std::num::NonZeroU64;

use self::slab::{NIL, Slab};

/// Bits of a digit.
const DIGIT: u32 = 6;
const SLOTS: usize = 1 << DIGIT;
const LEVELS: usize = u64::BITS.div_ceil(DIGIT) as usize;
/// The list beside those of the slots.
const OPEN: usize = LEVELS * SLOTS;

/// A wheel must never hold more timers than this (64 GiB of them, and more): whoever limits the
/// number of keys keeps it below.
pub(crate) const MOST_TIMERS: usize = 1 << 31;

/// Items that each have a time.
pub(crate) struct Wheel<T> {
    /// The greatest time ever given. Time does not go back.
    now: u64,
    /// How far the wheel has come on its way to `now`.
    turned: u64,
    /// First timer of each slot's list, level by level, and of `open`.
    first: Box<[u32; OPEN + 1]>,
    /// For each level, which slots have timers.
    occupied: [u64; LEVELS],
    timers: Slab<Timer<T>>,
    serial: NonZeroU64,
}

/// Names one timer of one wheel, for ever: it is never mistaken for another, later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimerId {
    serial: NonZeroU64,
    place: u32,
}

struct Timer<T> {
    at: u64,
    serial: NonZeroU64,
    back: Back,
    next: u32,
    item: T,
}

impl<T> Wheel<T> {
    /// An empty wheel that was turned to `start`.
    pub(crate) fn new(start: u64) -> Self {
        Self {
            now: start,
            turned: start,
            first: Box::new([NIL; OPEN + 1]),
            occupied: [0; LEVELS],
            timers: Slab::new(),
            serial: NonZeroU64::MIN,
        }
    }

    /// Adds an item for the time `at`. One that is late (`at` not after the last `now`) comes out
    /// at the next [`advance`](Self::advance).
    pub(crate) fn insert(&mut self, at: u64, item: T) -> TimerId {
        let serial = self.serial;
        self.serial = serial.saturating_add(1);
        let timer = Timer { at, serial, back: Back::list(OPEN), next: NIL, item };
        let place = self.timers.insert(timer);
        self.link(place, self.list_for(at));
        TimerId { serial, place }
    }

    /// Takes an item out before its time; `None` if it has come out already.
    pub(crate) fn remove(&mut self, id: TimerId) -> Option<T> {
        if self.timers.get(id.place)?.serial != id.serial {
            return None;
        }
        self.unlink(id.place);
        Some(self.timers.remove(id.place)?.item)
    }

    /// Turns the wheel to `now` and appends what is due to `out`, at most `budget` items, in no
    /// particular order; never one before its time. A `now` before an earlier one counts as that.
    ///
    /// Returns true if the budget ran out before the wheel had reached `now`: call again. The
    /// budget also pays for the items that only move to a lower level, so a call may return true
    /// and append nothing. With a budget of zero nothing moves.
    pub(crate) fn advance(&mut self, now: u64, budget: usize, out: &mut Vec<T>) -> bool {
        self.now = self.now.max(now);
        let now = self.now;
        let mut left = budget;
        loop {
            while let Some(timer) = self.timers.get(self.first[OPEN]) {
                if left == 0 {
                    return true;
                }
                left -= 1;
                let (place, at) = (self.first[OPEN], timer.at);
                self.unlink(place);
                if at > now {
                    self.link(place, self.list_for(at));
                } else if let Some(timer) = self.timers.remove(place) {
                    out.push(timer.item);
                }
            }
            match self.next_slot() {
                Some((list, begin)) if begin <= now => {
                    self.turned = begin;
                    self.open(list);
                }
                _ => {
                    self.turned = now;
                    return false;
                }
            }
        }
    }

    /// When to [`advance`](Self::advance) next: no item is due before. It may be earlier than the
    /// first item's time, because a timer far away has to move to a lower level in between. `None`
    /// if there is no item. Late items are due at the last `now`.
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        if self.first[OPEN] != NIL {
            return Some(self.turned);
        }
        self.next_slot().map(|(_, begin)| begin)
    }

    /// The list in which a timer for `at` stands (invariant 1).
    const fn list_for(&self, at: u64) -> usize {
        if at <= self.turned {
            return OPEN;
        }
        let level = (at ^ self.turned).ilog2() / DIGIT;
        let slot = (at >> (level * DIGIT)) as usize % SLOTS;
        level as usize * SLOTS + slot
    }

    /// The first slot that has timers, and when it begins.
    fn next_slot(&self) -> Option<(usize, u64)> {
        let level = self.occupied.iter().position(|slots| *slots != 0)?;
        let slot = self.occupied[level].trailing_zeros();
        let shift = level as u32 * DIGIT;
        // The digits above are those of `turned`; the ones below are zero.
        let above = self.turned >> shift & !(SLOTS as u64 - 1);
        Some((level * SLOTS + slot as usize, (above | u64::from(slot)) << shift))
    }

    /// Moves the whole list of a slot to `open`, which is empty.
    fn open(&mut self, list: usize) {
        debug_assert_eq!(self.first[OPEN], NIL, "turned on before all was dealt with");
        let place = std::mem::replace(&mut self.first[list], NIL);
        self.occupied[list / SLOTS] &= !(1 << (list % SLOTS));
        self.first[OPEN] = place;
        if let Some(timer) = self.timers.get_mut(place) {
            timer.back = Back::list(OPEN);
        }
    }

    /// Puts the timer, which stands nowhere, at the front of a list.
    fn link(&mut self, place: u32, list: usize) {
        let next = std::mem::replace(&mut self.first[list], place);
        if let Some(timer) = self.timers.get_mut(next) {
            timer.back = Back::place(place);
        }
        if let Some(timer) = self.timers.get_mut(place) {
            (timer.back, timer.next) = (Back::list(list), next);
        }
        if list != OPEN {
            self.occupied[list / SLOTS] |= 1 << (list % SLOTS);
        }
    }

    /// Takes the timer out of the list it stands in.
    fn unlink(&mut self, place: u32) {
        let Some(&Timer { back, next, .. }) = self.timers.get(place) else { return };
        if let Some(timer) = self.timers.get_mut(next) {
            timer.back = back;
        }
        match back.unpack() {
            Ok(place) => {
                if let Some(timer) = self.timers.get_mut(place) {
                    timer.next = next;
                }
            }
            Err(list) => {
                self.first[list] = next;
                if next == NIL && list != OPEN {
                    self.occupied[list / SLOTS] &= !(1 << (list % SLOTS));
                }
            }
        }
    }
}

/// What stands before a timer: another one, or, before the first, the list itself. So a timer can
/// leave without knowing its list, and a whole list can move by its first timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Back(u32);

impl Back {
    /// Set for a list; no place reaches it.
    const LIST: u32 = MOST_TIMERS as u32;

    const fn place(place: u32) -> Self {
        debug_assert!(place < Self::LIST, "more than MOST_TIMERS");
        Self(place)
    }

    const fn list(list: usize) -> Self {
        Self(list as u32 | Self::LIST)
    }

    /// The place, or else the list.
    const fn unpack(self) -> Result<u32, usize> {
        if self.0 & Self::LIST == 0 { Ok(self.0) } else { Err((self.0 & !Self::LIST) as usize) }
    }
}
