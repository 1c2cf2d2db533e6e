//! Looks through the engine's journals before the engine does.
//!
//! The engine ends its reading of a journal where it does not understand it, and cuts off the rest:
//! right for what a crash has left half written, but a changed byte in the middle loses all that
//! was acknowledged after it, without a word. And a batch whose middle was not written, which a loss of
//! power may leave, it refuses, though nobody was told of that batch. Here the stamps tell which is
//! which: a batch that is known to be synced must be there, and numbers have no gaps.
//!
//! Ground rules: nothing is changed but the end of the last journal, and that only if no synced batch
//! is lost with it.
//!
//! ```text
//! batch:  1 u8 | entries u32 | sequence u64 | entry ... | 3 u8 | xxh3 of the entries u64 | "FJL" 3
//! entry:  2 u8 | type u8 | compression u8 | keyspace u64 | key length u16 | length u32 |
//!         length on disk u32 | key | value
//!         4 u8 | keyspace u64
//! ```
//!
//! All numbers are little endian; zeros follow the last batch. Sequences grow, which is all that says
//! whether one was changed. (fjall 3, `journal/entry.rs`)

use std::{
    fs::{self, File},
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
};

use xxhash_rust::xxh3::Xxh3;

use super::directory::{STAMP, Stamp, damaged, io_error};
use crate::tier::TierError;

const START: u8 = 1;
const ITEM: u8 = 2;
const END: u8 = 3;
const CLEAR: u8 = 4;
const TRAILER: [u8; 4] = [b'F', b'J', b'L', 3];

/// Cuts off what a crash has left half written. The number of the last batch that is there, unless
/// the journals have none.
pub(super) fn mend(directory: &Path, synced: u64) -> Result<Option<u64>, TierError> {
    let failed = |error| io_error(directory, &error);
    let mut journals = journals(directory).map_err(failed)?;
    journals.sort_unstable();
    let mut last = None;
    for (at, (_, path)) in journals.iter().enumerate() {
        let Some(end) = look_through(path, &mut last).map_err(failed)? else { continue };
        let is_active = at + 1 == journals.len();
        if !is_active || last.is_some_and(|last| last.number < synced) {
            let name = path.display();
            return Err(damaged(format!("{name} cannot be read from byte {end} on")));
        }
        let file = File::options().write(true).open(path).map_err(failed)?;
        file.set_len(end).and_then(|()| file.sync_all()).map_err(failed)?;
    }
    if last.is_some_and(|last| last.number < synced) {
        return Err(damaged("the last batches are missing".to_owned()));
    }
    Ok(last.map(|last| last.number))
}

fn journals(directory: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut journals = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "jnl")
            && let Some(number) = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok())
        {
            journals.push((number, path));
        }
    }
    Ok(journals)
}

/// Reads a journal's batches. If something other than zeros follows the last whole one, or a number
/// is missing, where that begins.
fn look_through(path: &Path, last: &mut Option<Batch>) -> io::Result<Option<u64>> {
    let file = File::open(path)?;
    let mut left =
        Left { length: file.metadata()?.len(), file: BufReader::with_capacity(1 << 16, file) };
    let length = left.length;
    loop {
        let begins = length - left.length;
        match batch(&mut left)? {
            Some(next) if last.is_none_or(|last| next.follows(last)) => *last = Some(next),
            Some(_) => return Ok(Some(begins)),
            None => {
                // The end, if there is nothing but zeros from here on.
                let mut again = File::open(path)?;
                io::Seek::seek(&mut again, io::SeekFrom::Start(begins))?;
                return Ok((!is_zero(again)?).then_some(begins));
            }
        }
    }
}

fn is_zero(mut rest: impl Read) -> io::Result<bool> {
    // Compared as a whole: a journal has room for 64 MiB.
    let (mut bytes, zeros) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        match rest.read(&mut bytes)? {
            0 => return Ok(true),
            some if bytes[..some] != zeros[..some] => return Ok(false),
            _ => {}
        }
    }
}

/// What is left of a journal.
struct Left {
    file: BufReader<File>,
    length: u64,
}

impl Left {
    /// The next bytes, if so many are left.
    fn take(&mut self, length: u64) -> io::Result<Option<Vec<u8>>> {
        if length > self.length {
            return Ok(None);
        }
        self.length -= length;
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn array<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        Ok(self.take(N as u64)?.and_then(|bytes| bytes.try_into().ok()))
    }
}

/// What `?` is to an option, inside of a result.
macro_rules! some {
    ($option:expr) => {
        match $option? {
            Some(some) => some,
            None => return Ok(None),
        }
    };
}

#[derive(Clone, Copy)]
struct Batch {
    /// The number in its stamp.
    number: u64,
    sequence: u64,
}

impl Batch {
    fn follows(&self, last: Self) -> bool {
        self.number == last.number + 1 && self.sequence > last.sequence
    }
}

/// The next batch, if it is whole and has a stamp.
fn batch(left: &mut Left) -> io::Result<Option<Batch>> {
    if some!(left.array::<1>()) != [START] {
        return Ok(None);
    }
    let entries = u32::from_le_bytes(some!(left.array()));
    let sequence = u64::from_le_bytes(some!(left.array()));
    let mut hash = Xxh3::new();
    let mut stamp = None;
    for _ in 0..entries {
        match some!(left.array::<1>()) {
            [ITEM] => {
                let head = some!(left.array::<20>());
                let [.., k0, k1, _, _, _, _, v0, v1, v2, v3] = head;
                let key = some!(left.take(u16::from_le_bytes([k0, k1]).into()));
                let value = some!(left.take(u32::from_le_bytes([v0, v1, v2, v3]).into()));
                if *key == STAMP {
                    stamp = Stamp::from_bytes(&value);
                }
                for part in [&[ITEM][..], &head, &key, &value] {
                    hash.update(part);
                }
            }
            [CLEAR] => {
                hash.update(&[CLEAR]);
                hash.update(&some!(left.array::<8>()));
            }
            _ => return Ok(None),
        }
    }
    let is_whole = some!(left.array()) == [END]
        && u64::from_le_bytes(some!(left.array())) == hash.digest()
        && some!(left.array()) == TRAILER;
    Ok(stamp.filter(|_| is_whole).map(|stamp| Batch { number: stamp.number, sequence }))
}
