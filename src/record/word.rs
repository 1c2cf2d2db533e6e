//! The state word of a cell: one word in which lapse, renewal, completion, release and the
//! registration of a waiter compete, so that exactly one of them wins.
//!
//! ```text
//!  63                                   5    4         3         2      0
//! | at, where the record lies, or successor | out 1 | waiters 1 | kind 3 |
//!
//!         renew, attend, hand-over
//!               +--------+
//!               v        |
//!  claim --> InFlight ---+--> Completed (record)   final
//!               |   |             ^   NotKept (end) ---> Ended   at its end
//!        lapse, |   | release,    | late completion, resolve
//!        hold,  |   | forget,     |
//!        drop   v   v takeover    |
//!             Held --+--> Ended   |                final
//!               +-----------------+
//! ```
//!
//! `at` is the lease's deadline while in flight, else the end of the hold. A completed word names
//! the record in a slab instead; the end stands there. `NotKept` in a cell is the rare completion
//! for which no slab was to be had. A takeover ends a claim by a word that names its *successor*, the
//! cell of the claim that takes its place: so there is no moment at which neither stands.
//!
//! `out` is set while a permit holds the cell. The compare-and-swap that makes a word final without
//! it, or that clears it in a final word, appoints its thread to give the cell back: one word, so
//! exactly one thread. A released claim may be left in its slot as a ghost instead, so that retries
//! use one slot again and again; then the compare-and-swap that takes it out of the slot appoints.

use crate::clock::Millis;

/// What a cell is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An owner runs; `at` is the deadline of its lease.
    InFlight,
    /// Nobody knows whether the work was done; `at` is the end of the hold.
    Held,
    /// Finished: a record has taken over.
    Completed,
    /// Finished, but the answer was not kept; `at` is its end.
    NotKept,
    /// Released, forgotten, taken over or past its end: the next claim takes its place.
    Ended,
}

/// What a claim is at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// In flight, the lease runs.
    InFlight,
    /// In flight, but the lease has lapsed and nobody has judged it yet.
    Lapsed,
    /// Outcome unknown.
    Held,
    /// A record has the answer.
    Completed,
    /// Finished without an outcome.
    NotKept,
    /// Ended, or past its end: as if it were not there.
    Gone,
}

/// A state word. See the drawing at the head of the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

const KIND_BITS: u32 = 3;
const KIND: u64 = (1 << KIND_BITS) - 1;
const WAITERS: u64 = 1 << KIND_BITS;
const OUT: u64 = 1 << (KIND_BITS + 1);
const AT_SHIFT: u32 = KIND_BITS + 2;

/// In flight, and the lease needs no renewal.
const ATTENDED: u64 = 5;

/// Released, and left in its slot for the next claim: who takes it out of the slot retires it.
const GHOST: u64 = 6;

/// Taken over: whoever meets it goes on to the successor.
const TAKEN_OVER: u64 = 7;

const _: () = assert!(Millis::MAX.0 << AT_SHIFT >> AT_SHIFT == Millis::MAX.0);
const _: () = assert!(super::Place::BITS + AT_SHIFT <= u64::BITS);
const _: () = assert!(super::cell::BITS + AT_SHIFT <= u64::BITS);

impl Word {
    /// A cell that stands for nothing.
    pub(crate) const BLANK: Self = Self(Kind::Ended as u64);

    /// A word without waiters, not attended, without a permit.
    pub(crate) fn new(kind: Kind, at: Millis) -> Self {
        Self(at.min(Millis::MAX).0 << AT_SHIFT | kind as u64)
    }

    /// Completed: the record lies at `place`.
    pub(crate) fn completed(place: super::Place) -> Self {
        Self(place.bits() << AT_SHIFT | Kind::Completed as u64)
    }

    /// Released at that time, and left in its slot.
    pub(crate) fn ghost(at: Millis) -> Self {
        Self(at.min(Millis::MAX).0 << AT_SHIFT | GHOST)
    }

    /// Taken over by the claim in the cell of that name.
    pub(crate) fn taken_over(by: u64) -> Self {
        Self(by << AT_SHIFT | TAKEN_OVER)
    }

    /// The name of the cell of the claim that has taken this one over.
    pub(crate) fn successor(self) -> Option<u64> {
        (self.0 & KIND == TAKEN_OVER).then_some(self.0 >> AT_SHIFT)
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn kind(self) -> Kind {
        match self.0 & KIND {
            0 | ATTENDED => Kind::InFlight,
            1 => Kind::Held,
            2 => Kind::Completed,
            3 => Kind::NotKept,
            _ => Kind::Ended,
        }
    }

    pub(crate) fn at(self) -> Millis {
        Millis(self.0 >> AT_SHIFT)
    }

    /// Where the record lies, of a completed word.
    pub(crate) fn place(self) -> super::Place {
        super::Place::from_bits(self.0 >> AT_SHIFT)
    }

    /// Whether somebody may be in the waiters' list. Set under the list's lock only (R14).
    pub(crate) fn has_waiters(self) -> bool {
        self.0 & WAITERS != 0
    }

    /// Whether a permit holds the cell.
    pub(crate) fn is_out(self) -> bool {
        self.0 & OUT != 0
    }

    /// Whether the lease needs no renewal while the permit lives; its lapse always holds (R8).
    pub(crate) fn is_attended(self) -> bool {
        self.0 & KIND == ATTENDED
    }

    /// Whether the cell is left in its slot for the next claim.
    pub(crate) fn is_ghost(self) -> bool {
        self.0 & KIND == GHOST
    }

    /// Whether nothing stands in this cell's place.
    pub(crate) fn is_over(self) -> bool {
        self.kind() == Kind::Ended && self.successor().is_none()
    }

    /// Whether the word never changes again, but for `out`.
    pub(crate) fn is_final(self) -> bool {
        matches!(self.kind(), Kind::Completed | Kind::Ended)
    }

    pub(crate) fn with_waiters(self) -> Self {
        Self(self.0 | WAITERS)
    }

    pub(crate) fn with_out(self, out: bool) -> Self {
        Self(self.0 & !OUT | if out { OUT } else { 0 })
    }

    /// Another deadline, the same bits otherwise.
    pub(crate) fn with_at(self, at: Millis) -> Self {
        Self(at.min(Millis::MAX).0 << AT_SHIFT | self.0 & (KIND | WAITERS | OUT))
    }

    /// Ended at the same time, no bits.
    pub(crate) fn ended(self) -> Self {
        Self::new(Kind::Ended, self.at())
    }

    /// In flight, attended.
    pub(crate) fn attended(self) -> Self {
        Self(self.0 & !KIND | ATTENDED)
    }

    /// What the cell is at `now`. At its deadline a lease has lapsed and a hold has ended.
    pub(crate) fn view(self, now: Millis) -> View {
        let past = now >= self.at();
        match (self.kind(), past) {
            (Kind::InFlight, false) => View::InFlight,
            (Kind::InFlight, true) => View::Lapsed,
            (Kind::Held, false) => View::Held,
            (Kind::Completed, _) => View::Completed,
            (Kind::NotKept, false) => View::NotKept,
            (Kind::Held | Kind::NotKept, true) | (Kind::Ended, _) => View::Gone,
        }
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Word")
            .field("kind", &self.kind())
            .field("at", &self.at())
            .field("out", &self.is_out())
            .field("waiters", &self.has_waiters())
            .field("attended", &self.is_attended())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::{Place, cell};

    const KINDS: [Kind; 4] = [Kind::InFlight, Kind::Held, Kind::NotKept, Kind::Ended];

    proptest! {
        #[test]
        fn every_part_round_trips(
            kind in prop::sample::select(&KINDS[..]),
            at in 0..=Millis::MAX.0,
            other in 0..=Millis::MAX.0,
            waiters: bool,
            out: bool,
            attended: bool,
        ) {
            let mut word = Word::new(kind, Millis(at));
            let attended = attended && kind == Kind::InFlight;
            if waiters { word = word.with_waiters(); }
            if out { word = word.with_out(true); }
            if attended { word = word.attended(); }
            for (word, at) in [(word, at), (word.with_at(Millis(other)), other)] {
                let word = Word::from_bits(word.bits());
                prop_assert_eq!(word.kind(), kind);
                prop_assert_eq!(word.at(), Millis(at));
                prop_assert_eq!(word.has_waiters(), waiters);
                prop_assert_eq!(word.is_out(), out);
                prop_assert_eq!(word.is_attended(), attended);
                prop_assert!(!word.with_out(false).is_out());
            }
        }

        #[test]
        fn a_completed_word_names_its_record(bits in 0..1_u64 << Place::BITS) {
            let place = Place::from_bits(bits);
            let word = Word::completed(place).with_out(true);
            prop_assert_eq!(word.kind(), Kind::Completed);
            prop_assert_eq!(word.place(), place);
        }
    }

    proptest! {
        #[test]
        fn r10_a_word_that_was_taken_over_names_its_successor(by in 0..1_u64 << cell::BITS) {
            let word = Word::taken_over(by).with_out(true);
            prop_assert_eq!((word.kind(), word.successor()), (Kind::Ended, Some(by)));
            prop_assert_eq!(word.with_out(false).successor(), Some(by));
            prop_assert_eq!(word.view(Millis(0)), View::Gone);
        }
    }

    #[test]
    fn only_a_takeover_names_a_successor() {
        let at = Millis::MAX;
        let others = [Word::ghost(at), Word::new(Kind::InFlight, at).attended()];
        let records = [Word::completed(Place::from_bits(7))];
        let plain = KINDS.map(|kind| Word::new(kind, at));
        for word in plain.iter().chain(&others).chain(&records) {
            assert_eq!(word.with_waiters().with_out(true).successor(), None, "{word:?}");
        }
    }

    /// The words there are, as [`Word::is_ghost`], [`Word::is_over`] and [`Word::is_final`] see them.
    #[test]
    fn who_may_take_the_place_of_a_word_and_whether_it_changes() {
        let at = Millis(1_000);
        for (word, seen) in [
            (Word::new(Kind::InFlight, at), [false, false, false]),
            (Word::new(Kind::InFlight, at).attended(), [false, false, false]),
            (Word::new(Kind::Held, at), [false, false, false]),
            (Word::new(Kind::NotKept, at), [false, false, false]),
            (Word::completed(Place::from_bits(7)), [false, false, true]),
            (Word::taken_over(7), [false, false, true]),
            (Word::new(Kind::Ended, at), [false, true, true]),
            (Word::BLANK, [false, true, true]),
            (Word::ghost(at), [true, true, true]),
        ] {
            let waited = word.with_waiters().with_waiters();
            assert!(waited.has_waiters() && !word.has_waiters(), "{word:?}");
            for word in [word, waited, word.with_out(true), waited.with_out(true)] {
                assert_eq!([word.is_ghost(), word.is_over(), word.is_final()], seen, "{word:?}");
            }
        }
        assert_eq!(Word::ghost(at).at(), at);
    }

    #[test]
    fn debug_shows_the_parts() {
        let word = Word::new(Kind::InFlight, Millis(7)).attended().with_waiters();
        let shown =
            "Word { kind: InFlight, at: Millis(7), out: false, waiters: true, attended: true }";
        assert_eq!(format!("{word:?}"), shown);
    }

    #[test]
    fn r22_a_record_ends_at_its_deadline_and_not_before() {
        let at = Millis(1_000);
        for (kind, before, after) in [
            (Kind::InFlight, View::InFlight, View::Lapsed),
            (Kind::Held, View::Held, View::Gone),
            (Kind::NotKept, View::NotKept, View::Gone),
            (Kind::Ended, View::Gone, View::Gone),
        ] {
            assert_eq!(Word::new(kind, at).view(Millis(999)), before);
            assert_eq!(Word::new(kind, at).view(at), after);
        }
    }
}
