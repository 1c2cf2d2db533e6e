//! Values in numbered places: found by number in constant time, and the memory goes when they go.
//!
//! The places stand in chunks of [`CHUNK`], and the chunks in a directory:
//!
//! ```text
//! directory   | chunk 0 | chunk 1 | chunk 2 | chunk 3 |      place 70 = chunk 2, slot 6
//!                  |         |         |         |
//!              [######]  [#..##.]    hole     [##....]
//!                full      room                  room
//! ```
//!
//! 1. A chunk is full (in no list), has room (in the list `room`), or is a hole without memory (in
//!    the list `holes`). A bit in `free` is set if and only if that slot is empty.
//! 2. A chunk whose last value leaves becomes a hole, but for chunk 0, which stays. A hole at the
//!    end leaves the directory.
//! 3. So the heap holds chunk 0, at worst a chunk for each value, and a directory of at worst four
//!    times what the highest chunk that is left needs (24 bytes for 32 values). The first is the
//!    case of one value left in each chunk. Values that came at about the same time share chunks;
//!    if they also go at about the same time, the heap follows their number.

/// Slots of a chunk: one for each bit of [`Chunk::free`]. Small, so that one value that stays does
/// not keep much memory; large enough that directory and allocator add little to each.
pub(super) const CHUNK: usize = u32::BITS as usize;

/// No chunk, no place: also out of the range of every `get`.
pub(super) const NIL: u32 = u32::MAX;

/// A directory smaller than this is not worth a reallocation.
const SMALL_DIRECTORY: usize = 64;

pub(super) struct Slab<V> {
    directory: Vec<Chunk<V>>,
    /// First chunk that has memory and an empty slot.
    room: u32,
    /// First chunk without memory.
    holes: u32,
}

struct Chunk<V> {
    slots: Option<Box<[Option<V>; CHUNK]>>,
    free: u32,
    /// Neighbours in `room` or `holes`.
    back: u32,
    next: u32,
}

impl<V> Slab<V> {
    pub(super) const fn new() -> Self {
        Self { directory: Vec::new(), room: NIL, holes: NIL }
    }

    pub(super) fn get(&self, place: u32) -> Option<&V> {
        let (chunk, slot) = split(place);
        self.directory.get(chunk as usize)?.slots.as_ref()?[slot].as_ref()
    }

    pub(super) fn get_mut(&mut self, place: u32) -> Option<&mut V> {
        let (chunk, slot) = split(place);
        self.directory.get_mut(chunk as usize)?.slots.as_mut()?[slot].as_mut()
    }

    /// Puts `value` into an empty place, whose number it returns: lowest places of a chunk first.
    pub(super) fn insert(&mut self, value: V) -> u32 {
        let number = self.chunk_with_room();
        let chunk = &mut self.directory[number as usize];
        let slot = chunk.free.trailing_zeros();
        let slots = chunk.slots.get_or_insert_with(|| Box::new([const { None }; CHUNK]));
        slots[slot as usize] = Some(value);
        chunk.free &= !(1 << slot);
        if chunk.free == 0 {
            self.unlink(number, List::Room);
        }
        number * CHUNK as u32 + slot
    }

    /// Takes the value out of `place`.
    pub(super) fn remove(&mut self, place: u32) -> Option<V> {
        let (number, slot) = split(place);
        let chunk = self.directory.get_mut(number as usize)?;
        let value = chunk.slots.as_mut()?[slot].take()?;
        let was_full = chunk.free == 0;
        chunk.free |= 1 << slot;
        let is_empty = chunk.free == u32::MAX;
        if was_full {
            self.link(number, List::Room);
        }
        // Chunk 0 stays, so that a store with one key at a time does not allocate for each. Any
        // other would keep the directory below it too.
        if is_empty && number != 0 {
            self.unlink(number, List::Room);
            self.directory[number as usize].slots = None;
            self.link(number, List::Holes);
            self.trim();
        }
        Some(value)
    }

    /// A chunk of the list `room`, made if there is none.
    fn chunk_with_room(&mut self) -> u32 {
        if self.room != NIL {
            return self.room;
        }
        let number = self.holes;
        if number != NIL {
            self.unlink(number, List::Holes);
            self.link(number, List::Room);
            return number;
        }
        let number = self.directory.len() as u32;
        self.directory.push(Chunk { slots: None, free: u32::MAX, back: NIL, next: NIL });
        self.link(number, List::Room);
        number
    }

    /// Gives back the end of the directory. Each chunk that leaves here was pushed once, and a
    /// directory is copied only after it lost three quarters: constant time on average.
    fn trim(&mut self) {
        while self.directory.last().is_some_and(|chunk| chunk.slots.is_none()) {
            self.unlink(self.directory.len() as u32 - 1, List::Holes);
            self.directory.pop();
        }
        let (len, capacity) = (self.directory.len(), self.directory.capacity());
        if capacity > SMALL_DIRECTORY && len < capacity / 4 {
            self.directory.shrink_to((len * 2).max(SMALL_DIRECTORY));
        }
    }

    fn first(&mut self, list: List) -> &mut u32 {
        match list {
            List::Room => &mut self.room,
            List::Holes => &mut self.holes,
        }
    }

    fn link(&mut self, number: u32, list: List) {
        let next = std::mem::replace(self.first(list), number);
        if let Some(chunk) = self.directory.get_mut(next as usize) {
            chunk.back = number;
        }
        let chunk = &mut self.directory[number as usize];
        (chunk.back, chunk.next) = (NIL, next);
    }

    fn unlink(&mut self, number: u32, list: List) {
        let Chunk { back, next, .. } = self.directory[number as usize];
        match self.directory.get_mut(back as usize) {
            Some(chunk) => chunk.next = next,
            None => *self.first(list) = next,
        }
        if let Some(chunk) = self.directory.get_mut(next as usize) {
            chunk.back = back;
        }
    }
}

#[derive(Clone, Copy)]
enum List {
    Room,
    Holes,
}

/// The chunk and the slot of a place.
const fn split(place: u32) -> (u32, usize) {
    (place / CHUNK as u32, place as usize % CHUNK)
}
