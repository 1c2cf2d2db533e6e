//! Looks through the engine's manifests before the engine does: it writes down what each must hash
//! to, and does not look (lsm-tree 3, `version/recovery.rs`). A changed byte there can bring an older
//! record back.
//!
//! ```text
//! keyspaces/ID/current:  number of the manifest u64 | xxh3 of it u128 | 0 u8
//! keyspaces/ID/vNUMBER:  the manifest
//! ```
//!
//! All numbers are little endian. A keyspace without `current` was being made, or dropped: the engine
//! clears it away.

use std::{
    fs,
    io::{self, ErrorKind},
    path::Path,
};

use xxhash_rust::xxh3::xxh3_128;

use super::directory::{damaged, io_error};
use crate::tier::TierError;

/// Refuses a directory with a manifest that is not as it was written.
pub(super) fn check(records: &Path) -> Result<(), TierError> {
    let failed = |error| io_error(records, &error);
    for keyspace in fs::read_dir(records.join("keyspaces")).map_err(failed)? {
        let keyspace = keyspace.map_err(failed)?.path();
        if !is_whole(&keyspace).map_err(failed)? {
            return Err(damaged(format!("the manifest of {} was changed", keyspace.display())));
        }
    }
    Ok(())
}

fn is_whole(keyspace: &Path) -> io::Result<bool> {
    let Some(current) = read(&keyspace.join("current"))? else { return Ok(true) };
    let Some((number, hash)) = current.split_first_chunk() else { return Ok(false) };
    let number = u64::from_le_bytes(*number);
    let Some(manifest) = read(&keyspace.join(format!("v{number}")))? else { return Ok(false) };
    Ok(*hash == [&xxh3_128(&manifest).to_le_bytes()[..], &[0]].concat())
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
