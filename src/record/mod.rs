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

/// What a claim or a record costs beside its outcome: a cell, and as much again as a bucket has for
/// four slots, for its share of block and index. A record needs less, but a slab stays until its
/// last record ends.
pub(crate) const fn cost(frame: usize) -> usize {
    size_of::<Cell>() + 64 + frame
}
