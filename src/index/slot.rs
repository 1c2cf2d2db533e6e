//! The word in a slot. Drawn at the head of the index.

use crate::record::{Cell, Place};

/// A word of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Value(pub(super) u64);

/// Bits of the hash that stand in a slot, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u64);

/// What a slot names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Cell(u64),
    Record(Place),
}

const FROZEN: u64 = 1 << 63;
const TAG_SHIFT: u32 = Place::BITS + 1;
pub(super) const TAG_BITS: u32 = 62 - Place::BITS;
const RECORD: u64 = 1 << Place::BITS;
const TAG: u64 = ((1 << TAG_BITS) - 1) << TAG_SHIFT;

// An address of 48 bits, of which a cell's alignment needs no six.
const _: () = assert!(align_of::<Cell>() == 64 && Place::BITS == 48 - 6);
const _: () = assert!(TAG & (FROZEN | RECORD | (RECORD - 1)) == 0);

/// Bits of a bucket's number that every table has, so the tag need not.
pub(super) const SKIP: u32 = super::table::FEWEST;

impl Tag {
    /// The tag of a hash whose shard was shifted out.
    pub(super) fn of(path: u64) -> Self {
        Self(path << SKIP >> (64 - TAG_BITS) << TAG_SHIFT)
    }
}

impl Value {
    pub(super) const EMPTY: Self = Self(0);
    pub(super) const TOMB: Self = Self(1);

    pub(super) fn cell(tag: Tag, bits: u64) -> Self {
        Self(tag.0 | bits)
    }

    pub(super) fn record(tag: Tag, place: Place) -> Self {
        Self(tag.0 | RECORD | place.bits())
    }

    pub(super) fn is_empty(self) -> bool {
        self.thawed() == Self::EMPTY
    }

    pub(super) fn is_tomb(self) -> bool {
        self.thawed() == Self::TOMB
    }

    pub(super) fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    pub(super) fn frozen(self) -> Self {
        Self(self.0 | FROZEN)
    }

    pub(super) fn thawed(self) -> Self {
        Self(self.0 & !FROZEN)
    }

    /// Whether it names something whose hash has this tag.
    pub(super) fn has(self, tag: Tag) -> bool {
        self.0 & TAG == tag.0 && !self.is_tomb()
    }

    /// What it names. Neither empty nor a tombstone.
    pub(super) fn target(self) -> Target {
        let which = self.0 & (RECORD - 1);
        if self.0 & RECORD == 0 {
            Target::Cell(which)
        } else {
            Target::Record(Place::from_bits(which))
        }
    }

    /// The bit by which a bucket of a table of `1 << bits` buckets is split.
    pub(super) fn split_bit(self, bits: u32) -> usize {
        let place = TAG_SHIFT + TAG_BITS - 1 - (bits - SKIP);
        (self.0 >> place & 1) as usize
    }
}
