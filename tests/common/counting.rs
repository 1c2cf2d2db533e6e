//! An allocator that counts the live bytes of each thread by itself, so that tests which keep to
//! one thread may run beside each other.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unsafe_code, reason = "an allocator that counts is unsafe by its trait")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that ends frees after its locals are gone; nobody asks for its count then.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

fn size(layout: Layout) -> isize {
    isize::try_from(layout.size()).unwrap_or(isize::MAX)
}

// SAFETY: every call goes to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(size(layout));
        // SAFETY: the caller keeps the contract of `alloc`, which is the same one.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-size(layout));
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Live bytes of this thread since some point.
pub struct Since(isize);

impl Since {
    pub fn now() -> Self {
        PEAK.set(LIVE.get());
        Self(LIVE.get())
    }

    pub fn bytes(&self) -> usize {
        usize::try_from(LIVE.get() - self.0).unwrap_or(0)
    }

    pub fn peak(&self) -> usize {
        usize::try_from(PEAK.get() - self.0).unwrap_or(0)
    }
}
