//! The allocator of the whole program, and how many bytes it has given out.
//!
//! The one room with `unsafe`: a global allocator cannot be written without.
#![allow(unsafe_code)]

use std::{
    alloc::{GlobalAlloc, Layout},
    sync::atomic::{AtomicBool, AtomicIsize, Ordering},
};

#[cfg(feature = "mimalloc")]
type Inner = mimalloc::MiMalloc;
#[cfg(not(feature = "mimalloc"))]
type Inner = std::alloc::System;

/// The name of the allocator that was built in.
pub(crate) const NAME: &str = if cfg!(feature = "mimalloc") { "mimalloc" } else { "system" };

#[cfg(feature = "mimalloc")]
const INNER: Inner = mimalloc::MiMalloc;
#[cfg(not(feature = "mimalloc"))]
const INNER: Inner = std::alloc::System;

#[global_allocator]
static ALLOCATOR: Counted = Counted(INNER);

/// Off while anything is timed: a count that all threads share would cost those most who allocate
/// most.
static COUNTING: AtomicBool = AtomicBool::new(false);
static GIVEN: AtomicIsize = AtomicIsize::new(0);

/// Counts from now on.
pub(crate) fn count() {
    COUNTING.store(true, Ordering::SeqCst);
}

/// Bytes that were given out since [`count`] and not given back: what was asked for, without what
/// the allocator adds. Less than zero if older ones were given back.
pub(crate) fn given() -> isize {
    GIVEN.load(Ordering::SeqCst)
}

struct Counted(Inner);

fn note(bytes: isize) {
    if COUNTING.load(Ordering::Relaxed) {
        GIVEN.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: every call is handed on as it came, and its answer back as it is; counting touches no
// memory that was asked for and does not allocate.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size().cast_signed());
        // SAFETY: the caller's promises are handed on.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size().cast_signed());
        // SAFETY: the caller's promises are handed on.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        note(-layout.size().cast_signed());
        // SAFETY: the caller's promises are handed on.
        unsafe { self.0.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: the caller's promises are handed on.
        unsafe { self.0.realloc(memory, layout, size) }
    }
}
