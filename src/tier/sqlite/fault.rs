//! What SQLite's errors mean to a caller: whether trying again can help, and what to do.
//!
//! Ground rules: result codes, never texts, decide (<https://sqlite.org/rescode.html>). What is not
//! known to last is unavailable, because of such a step nobody knows whether it was done.

use std::{fmt, io};

use crate::tier::TierError;

/// An error that all steps of a group can be told of.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    lasts: bool,
    is_lock: bool,
    text: String,
}

impl Fault {
    /// Trying again may help.
    pub(super) fn passing(text: impl Into<String>) -> Self {
        Self { lasts: false, is_lock: false, text: text.into() }
    }

    /// Trying again does not help.
    pub(super) fn lasting(text: impl Into<String>) -> Self {
        Self { lasts: true, is_lock: false, text: text.into() }
    }

    /// Whether somebody else had the lock, and nothing was done.
    pub(super) fn is_lock(&self) -> bool {
        self.is_lock
    }

    /// As `self`, with what was being done.
    pub(super) fn during(self, what: &str) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Fault> for TierError {
    fn from(fault: Fault) -> Self {
        if fault.lasts { Self::unusable(fault.text) } else { Self::unavailable(fault.text) }
    }
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        let code = match &error {
            sqlx::Error::Database(database) => database.code().and_then(|code| code.parse().ok()),
            _ => None,
        };
        let (lasts, advice) = match &error {
            sqlx::Error::Database(_) => of_code(code.unwrap_or(0)),
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => (true, DAMAGED),
            sqlx::Error::Configuration(_) => (true, "the pool's options are wrong"),
            sqlx::Error::WorkerCrashed => (false, "the connection is lost"),
            _ => (false, "the step failed"),
        };
        let is_lock = code.is_some_and(|code| code & 0xff == BUSY);
        Self { lasts, is_lock, text: format!("{advice}: {error}") }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind as Kind;
        let lasts = matches!(
            error.kind(),
            Kind::PermissionDenied
                | Kind::ReadOnlyFilesystem
                | Kind::StorageFull
                | Kind::QuotaExceeded
                | Kind::NotADirectory
                | Kind::Unsupported
                | Kind::InvalidData
        );
        Self { lasts, is_lock: false, text: error.to_string() }
    }
}

const DAMAGED: &str = "the database is damaged: stop the service and restore a backup of the file";

/// Whether an error of a result code lasts, and what to do.
fn of_code(code: u32) -> (bool, &'static str) {
    match code & 0xff {
        BUSY if code == SNAPSHOT => (
            false,
            "another transaction has written since this one has read: begin it by `BEGIN IMMEDIATE`",
        ),
        1 | 17 => (true, "the tables of the tier do not fit: were they changed by hand?"),
        3 | 8 | 23 => (
            true,
            "the database cannot be written: look at the rights of the file and its \
                              directory, and at the pool's options",
        ),
        BUSY | 6 => (false, "another transaction has locked the database for too long"),
        11 | 26 => (true, DAMAGED),
        13 => (true, "the disk is full, or the database has reached its `max_page_count`"),
        14 => (
            true,
            "the database cannot be opened: look at its path and at the rights of the file \
                      and its directory",
        ),
        18 => (true, "an outcome is larger than SQLite's limit for a value"),
        19 | 20 => {
            (true, "the database refuses the row: does a trigger of your own stand in the way?")
        }
        _ => (false, "the step failed"),
    }
}

/// `SQLITE_BUSY`.
const BUSY: u32 = 5;
/// `SQLITE_BUSY_SNAPSHOT`.
const SNAPSHOT: u32 = 517;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_is_unavailable() {
        for (code, lasts) in
            [(5, false), (6, false), (7, false), (8, true), (10, false), (11, true)]
                .into_iter()
                .chain([(13, true), (14, true), (26, true)])
        {
            assert_eq!(of_code(code).0, lasts, "code {code}");
        }
        let full = Fault::from(io::Error::from(io::ErrorKind::StorageFull)).during("a beat");
        assert!(matches!(TierError::from(full), TierError::Unusable(_)));
        let lost = Fault::from(sqlx::Error::WorkerCrashed);
        assert!(matches!(TierError::from(lost), TierError::Unavailable(_)));
    }
}
