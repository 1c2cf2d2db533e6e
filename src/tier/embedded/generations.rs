//! Where records lie: in generations, each a keyspace of the engine, which are dropped whole.
//!
//! Ground rules:
//!
//! - A generation has an end, which is its name, and every record in it ends before. When it has
//!   ended it is dropped, in one step, with all that was ever in it.
//! - A record is in one generation at a time, whatever has ended or is gone may lie in others. So to
//!   find one is to ask all of them, the latest first; their filters answer for most that it is not
//!   there.
//! - Nothing is removed by key. What is given up, or has moved to another generation, is written as
//!   [`GONE`]: a merge then drops nothing without a later version, and the engine's journals, which it
//!   keeps until the latest write to a keyspace is in a table, are never kept for a write that a
//!   merge has dropped (fjall issue 288).

use fjall::{Database, Keyspace, KeyspaceCreateOptions, OwnedWriteBatch, UserKey};

use super::directory::unreadable;
use crate::tier::{TierError, record::Record};

/// What stands in the place of a record that is gone. No record is that short.
const GONE: [u8; 1] = [0];

/// What the name of a generation's keyspace begins with; its end follows.
const PREFIX: &str = "until-";

/// The shortest width of a generation.
const MINUTE: u64 = 60_000;

/// Tables of the first level, and such that wait to be written, from which on the writer waits: the
/// engine makes writers wait from 30 and from 4 on.
const RUNS: usize = 24;
const UNWRITTEN: usize = 2;

/// The generation that a record lies in, by its end.
pub(super) type Place = u64;

struct Generation {
    /// No record in it ends later.
    end: Place,
    keyspace: Keyspace,
}

/// All that are there, the earliest first.
pub(super) struct Generations {
    all: Vec<Generation>,
    buffer: u64,
}

impl Generations {
    /// Those that the database has; of other keyspaces the name of one.
    pub(super) fn open(database: &Database, buffer: u64) -> fjall::Result<Result<Self, String>> {
        let mut generations = Self { all: Vec::new(), buffer };
        for name in database.list_keyspace_names() {
            match name.strip_prefix(PREFIX).map(|end| u64::from_str_radix(end, 16)) {
                Some(Ok(end)) => drop(generations.add(database, end)?),
                _ if &*name == super::directory::META => {}
                _ => return Ok(Err(name.to_string())),
            }
        }
        Ok(Ok(generations))
    }

    fn add(&mut self, database: &Database, end: Place) -> fjall::Result<Keyspace> {
        let options = || KeyspaceCreateOptions::default().max_memtable_size(self.buffer);
        let keyspace = database.keyspace(&format!("{PREFIX}{end:016x}"), options)?;
        let at = self.all.partition_point(|other| other.end < end);
        self.all.insert(at, Generation { end, keyspace: keyspace.clone() });
        Ok(keyspace)
    }

    fn at(&self, place: Place) -> Option<&Keyspace> {
        let at = self.all.binary_search_by_key(&place, |generation| generation.end).ok()?;
        Some(&self.all[at].keyspace)
    }

    /// The record of `key` that has not ended, and where it lies.
    pub(super) fn find(
        &self,
        key: &UserKey,
        now: u64,
    ) -> Result<Option<(Place, Record)>, TierError> {
        for Generation { end, keyspace } in self.all.iter().rev().take_while(|it| it.end > now) {
            let Some(bytes) = keyspace.get(key).map_err(|error| unreadable(&error))? else {
                continue;
            };
            if *bytes == GONE {
                continue;
            }
            let record = Record::from_bytes(&bytes).map_err(|error| unreadable(&error))?;
            if !record.is_over(now) {
                return Ok(Some((*end, record)));
            }
        }
        Ok(None)
    }

    /// Adds to `batch` that `record` is what is there of `key`, which was at `was`.
    pub(super) fn keep(
        &mut self,
        database: &Database,
        batch: &mut OwnedWriteBatch,
        key: UserKey,
        was: Option<Place>,
        record: Option<Record>,
        now: u64,
    ) -> fjall::Result<()> {
        let place = match &record {
            Some(record) => Some(self.place(database, was, record.end, now)?),
            None => None,
        };
        if let Some(old) = was.filter(|was| place != Some(*was)).and_then(|was| self.at(was)) {
            batch.insert(old, key.clone(), GONE);
        }
        if let Some((record, keyspace)) = record.zip(place.and_then(|place| self.at(place))) {
            batch.insert(keyspace, key, record.to_bytes());
        }
        Ok(())
    }

    /// Where a record belongs that ends at `end`. It stays where it was if that is not much later
    /// than it need be.
    fn place(
        &mut self,
        database: &Database,
        was: Option<Place>,
        end: u64,
        now: u64,
    ) -> fjall::Result<Place> {
        let width = width(end.saturating_sub(now));
        let fits = |place: Place, most: u64| place >= end && place - end <= most;
        let stays = |was: &Place| fits(*was, width.saturating_mul(2)) && self.at(*was).is_some();
        if let Some(was) = was.filter(stays) {
            return Ok(was);
        }
        if let Some(there) = self.all.iter().find(|there| fits(there.end, width)) {
            return Ok(there.end);
        }
        self.drop_ended(database, now)?;
        let place = end.checked_next_multiple_of(width).unwrap_or(u64::MAX);
        self.add(database, place)?;
        Ok(place)
    }

    /// Drops those that have ended.
    pub(super) fn drop_ended(&mut self, database: &Database, now: u64) -> fjall::Result<()> {
        while self.all.first().is_some_and(|first| first.end <= now) {
            database.delete_keyspace(self.all.remove(0).keyspace)?;
        }
        Ok(())
    }

    /// Whether the engine would make a writer wait.
    pub(super) fn is_behind(&self) -> bool {
        self.all.iter().any(|Generation { keyspace, .. }| {
            keyspace.sealed_memtable_count() >= UNWRITTEN || keyspace.l0_table_count() >= RUNS
        })
    }
}

/// How wide a generation is whose records live for `life`: between an eighth and a quarter of it,
/// so that there are ten of them at most; a power of two of minutes, so that those of different
/// lives have ends in common.
fn width(life: u64) -> u64 {
    let mut width = MINUTE;
    while width < life / 8 {
        width = width.saturating_mul(2);
    }
    width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r25_a_generation_is_at_most_a_quarter_of_a_life_wide() {
        for life in [0, 1, MINUTE, 4 * MINUTE, 3_600_000, 86_400_000, 87_300_000, 1 << 50] {
            let width = width(life);
            assert!(width == MINUTE || (width >= life / 8 && width <= life / 4), "{life}: {width}");
        }
        assert!(width(u64::MAX) >= u64::MAX / 8);
    }
}
