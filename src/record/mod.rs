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
mod pages;
pub(crate) mod slab;
pub(crate) mod word;

pub(crate) use cell::{Cell, Cells, Owned};
pub(crate) use pages::{Pages, prefetch};
pub(crate) use slab::{Finished, Killed, Place, Record, Slabs};

/// Slots of the index have room for 48 bits of an address. All platforms that Rust's standard
/// library runs on give out such ones, unless a program asks for others or tags its pointers.
pub(super) fn assert_fits_a_slot(address: usize) {
    assert!(address as u64 >> 48 == 0, "memory at {address:#x}: more than 48 bits of address");
}

/// What a record costs beside its outcome: its head and identity in a slab, an eighth more for what
/// slabs have at their ends, and two buckets' worth of slots, the old table's beside the new one's.
/// `tests/core_memory.rs` holds it against a counting allocator.
pub(crate) const fn cost(frame: usize) -> usize {
    232 + frame + frame / 8
}

/// What a claim that is not done costs more than that, at least: its cell. The room that is
/// reserved for the outcome covers it.
pub(crate) const CLAIM: usize = size_of::<Cell>() + 64;
