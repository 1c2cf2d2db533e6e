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
    /// Chunks with memory.
    held: usize,
    len: usize,
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
        Self { directory: Vec::new(), room: NIL, holes: NIL, held: 0, len: 0 }
    }

    #[cfg(test)]
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Heap bytes.
    #[cfg(test)]
    pub(super) const fn bytes(&self) -> usize {
        self.directory.capacity() * size_of::<Chunk<V>>()
            + self.held * size_of::<[Option<V>; CHUNK]>()
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
        let slots = chunk.slots.get_or_insert_with(|| {
            self.held += 1;
            Box::new([const { None }; CHUNK])
        });
        slots[slot as usize] = Some(value);
        chunk.free &= !(1 << slot);
        if chunk.free == 0 {
            self.unlink(number, List::Room);
        }
        self.len += 1;
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
        self.len -= 1;
        if was_full {
            self.link(number, List::Room);
        }
        // Chunk 0 stays, so that a store with one key at a time does not allocate for each. Any
        // other would keep the directory below it too.
        if is_empty && number != 0 {
            self.unlink(number, List::Room);
            self.directory[number as usize].slots = None;
            self.held -= 1;
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    impl<V> Slab<V> {
        /// Invariants 1 and 2, and the bound of 3.
        pub(in crate::wheel) fn check(&self) {
            let (mut room, mut holes) = (Vec::new(), Vec::new());
            let (mut len, mut held) = (0, 0);
            for (number, chunk) in self.directory.iter().enumerate() {
                let free = chunk.slots.as_ref().map_or(u32::MAX, |slots| {
                    held += 1;
                    slots.iter().rev().fold(0, |bits, slot| bits << 1 | u32::from(slot.is_none()))
                });
                assert_eq!(chunk.free, free);
                len += free.count_zeros() as usize;
                match &chunk.slots {
                    None => holes.push(number as u32),
                    Some(_) if free != 0 => room.push(number as u32),
                    Some(_) => {}
                }
            }
            assert_eq!((self.len, self.held), (len, held));
            for (first, expected) in [(self.room, room), (self.holes, holes)] {
                let (mut found, mut back, mut at) = (Vec::new(), NIL, first);
                while at != NIL {
                    assert_eq!(self.directory[at as usize].back, back);
                    found.push(at);
                    (back, at) = (at, self.directory[at as usize].next);
                }
                found.sort_unstable();
                assert_eq!(found, expected);
            }
            assert!(held <= len + 1);
            assert!(self.directory.first().is_none_or(|chunk| chunk.slots.is_some()));
            assert!(self.directory.last().is_none_or(|chunk| chunk.slots.is_some()));
            let room = SMALL_DIRECTORY.max(4 * self.directory.len() + 4);
            assert!(self.directory.capacity() <= room);
        }
    }

    #[test]
    fn memory_follows_the_number_of_values() {
        let mut slab = Slab::new();
        let mut sizes = Vec::new();
        for _ in 0..5 {
            let places: Vec<_> = (0..100_000).map(|n| slab.insert(n)).collect();
            let full = slab.bytes();
            for place in &places[..90_000] {
                slab.remove(*place);
            }
            slab.check();
            assert!(slab.bytes() * 4 < full, "{} of {full}", slab.bytes());
            for place in &places[90_000..] {
                slab.remove(*place);
            }
            slab.check();
            sizes.push(slab.bytes());
        }
        assert!(sizes[0] < 10_000, "{sizes:?}");
        assert!(sizes.iter().all(|size| *size == sizes[0]), "{sizes:?}");
    }

    /// Against a map: a value is where its number says until it is taken, and once only.
    #[derive(Clone, Debug)]
    enum Step {
        Insert(u16),
        Remove(prop::sample::Index),
        RemoveUpFrom(prop::sample::Index),
    }

    proptest! {
        #[test]
        fn holds_what_a_map_holds(steps in prop::collection::vec(prop_oneof![
            6 => (1..80u16).prop_map(Step::Insert),
            4 => any::<prop::sample::Index>().prop_map(Step::Remove),
            1 => any::<prop::sample::Index>().prop_map(Step::RemoveUpFrom),
        ], 1..60)) {
            let (mut slab, mut map, mut value) = (Slab::new(), BTreeMap::new(), 0u64);
            for step in steps {
                let places: Vec<u32> = map.keys().copied().collect();
                match step {
                    Step::Insert(many) => for _ in 0..many {
                        value += 1;
                        let place = slab.insert(value);
                        prop_assert_eq!(map.insert(place, value), None);
                    },
                    Step::Remove(_) | Step::RemoveUpFrom(_) if places.is_empty() => {}
                    Step::Remove(at) => {
                        let place = *at.get(&places);
                        prop_assert_eq!(slab.remove(place), map.remove(&place));
                        prop_assert_eq!(slab.remove(place), None);
                    }
                    Step::RemoveUpFrom(at) => for place in &places[at.index(places.len())..] {
                        prop_assert_eq!(slab.remove(*place), map.remove(place));
                    },
                }
                slab.check();
                prop_assert_eq!(slab.len(), map.len());
                for (place, value) in &map {
                    prop_assert_eq!(slab.get(*place), Some(value));
                }
            }
            prop_assert_eq!(slab.get(NIL), None);
            prop_assert_eq!(slab.remove(NIL), None);
        }
    }
}
