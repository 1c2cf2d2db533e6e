//! What is kept of one claim: a cell while it is not done, a record in a slab once it is.
//!
//! Ground rules: a claim is one cell; a takeover or a claim after the end makes a new one, which
//! takes the old one's place in the index. Only a hand-over to a waiter keeps the cell and gives it
//! a new token. A completion copies what must be kept into a slab, publishes it by the cell's state
//! word, and swings the index over; the cell is then given back. So nothing unfinished ever stands
//! in a slab, and slabs die of age alone.

// Room 2 of 3 with unsafe code: cells and slabs are memory that threads hand to each other.
#![allow(unsafe_code)]

pub(crate) mod cell;
pub(crate) mod slab;
pub(crate) mod word;

pub(crate) use cell::{Cell, Cells, Owned};
pub(crate) use slab::{Finished, Place, Record, Slabs};

/// What a claim costs while it is not done: its cell, the slot, its share of block and bucket, and
/// the identity once more where it is too long for the cell.
pub(crate) const fn claim_cost(frame: usize) -> usize {
    size_of::<Cell>() + 64 + frame
}

/// What a record of `bytes` in a slab costs beside a large outcome: an eighth more, because a slab
/// lives until its last record ends, and two slots at the worst load.
pub(crate) const fn record_cost(bytes: usize) -> usize {
    bytes + bytes / 8 + 48
}
