//! What the work says of itself, and what the caller is told.

use std::{error::Error, fmt, sync::Arc, time::Duration};

use super::typed::CodecError;
use crate::{ClaimError, Outcome, tier::TierError};

/// When a caller asks again that another owner was in the way of.
const SOON: Duration = Duration::from_secs(1);

/// Why something failed, shared by all that are told of it.
pub type Cause = Arc<dyn Error + Send + Sync>;

/// What the work says of itself when it ends.
///
/// A panic, and a future of [`Worker::run`](super::Worker::run) that is dropped in the middle of the
/// work, say nothing: then [`StoreBuilder::on_abandon`](crate::StoreBuilder::on_abandon) decides, by
/// default as [`Unknown`](Self::Unknown).
///
/// ```
/// use oncekey::{Outcome, worker::Verdict};
///
/// fn charge(answer: std::io::Result<u16>) -> Verdict {
///     match answer {
///         Ok(status @ 200..300) => Verdict::Done(Outcome::new(status)),
///         Ok(503) => Verdict::retry("the bank is closed: it has charged nothing"),
///         Ok(status) => Verdict::unknown(format!("the bank said {status}")),
///         Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Verdict::retry(error),
///         Err(error) => Verdict::unknown(error), // it may have been charged
///     }
/// }
/// assert!(matches!(charge(Ok(201)), Verdict::Done(_)));
/// ```
#[derive(Clone, Debug)]
#[must_use = "it is what `run` settles the key by"]
pub enum Verdict<T = Outcome> {
    /// It is done; this is what every later attempt gets. It is not run again.
    Done(T),
    /// It is done, and the key was completed in the work's own transaction, which was committed
    /// ([`Job::complete_in`](super::Job::complete_in)).
    Committed,
    /// Nothing was done: the key is released, and the next attempt runs. Say it only of work that has
    /// had no effect, or of one whose every effect was in the transaction of
    /// [`Job::complete_in`](super::Job::complete_in), or stands in what
    /// [`Job::checkpoint`](super::Job::checkpoint) has left, which the next attempt gets.
    Retry(Cause),
    /// Nobody knows whether it was done: the key is held until an operator resolves it or its
    /// retention ends. It is not run again.
    Unknown(Cause),
}

impl<T> Verdict<T> {
    /// [`Verdict::Retry`] with any error or text.
    pub fn retry(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Retry(Arc::from(cause.into()))
    }

    /// [`Verdict::Unknown`] with any error or text.
    pub fn unknown(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unknown(Arc::from(cause.into()))
    }
}

/// The work is done: what came of it, and by whom.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ran<T = Outcome> {
    /// What the work has left.
    pub outcome: T,
    /// True if another attempt ran it, before or while this one waited; false if this call did.
    pub replayed: bool,
    /// False if this call ran it and the store had no room for its outcome (R25), or the tier could
    /// not be told of it in the life of its lease: later attempts may be told
    /// [`RunError::NotKept`].
    pub kept: bool,
}

impl<T> Ran<T> {
    pub(super) fn map<U>(self, outcome: U) -> Ran<U> {
        Ran { outcome, replayed: self.replayed, kept: self.kept }
    }
}

/// Why there is no outcome. [`disposition`](Self::disposition) says what a consumer does with the
/// message.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RunError {
    /// The work said that nothing was done ([`Verdict::Retry`]), or another owner gave the key up
    /// while this attempt waited. Retry.
    Retry(Cause),
    /// The work said that nobody knows ([`Verdict::Unknown`]); the key is held now.
    Unknown(Cause),
    /// The key is held since an earlier attempt of which nobody knows whether it was done (R11), or
    /// its record's fingerprint cannot be compared with (R4). An operator finds out, then
    /// [`Store::resolve`](crate::Store::resolve) or [`Tiered::resolve`](crate::tier::Tiered::resolve).
    Held,
    /// Another owner still ran when the wait limit was over, more wait for it than may (R15), or it
    /// is still being found out whether a transaction was committed. Retry.
    InFlight,
    /// The work was done, but its outcome was not kept (R20, R25). There is nothing left to do.
    NotKept,
    /// The key was used for something else (R5): another fingerprint. Retrying does not help.
    Mismatch,
    /// This call ran the work, but its token was stale when it ended: its claim was taken over,
    /// forgotten or resolved meanwhile (R9). Nothing of it was stored; here is what the work had to
    /// say. A retry gets what the winner has left. Without a common transaction the work may have
    /// been done twice.
    Lost(Option<Outcome>),
    /// The memory could not take the key in. Nothing was done; retry.
    Refused(ClaimError),
    /// The tier did not answer (T2). Nothing was done; retry.
    Unavailable {
        /// What happened.
        error: Arc<TierError>,
        /// When to try again, at least 1 s.
        retry_after: Duration,
    },
    /// The work is done, but its outcome cannot be read or written by this codec.
    Codec(CodecError),
}

impl RunError {
    /// What a consumer does with the message whose attempt ended so.
    ///
    /// | error | disposition | because |
    /// |---|---|---|
    /// | `Retry`, `InFlight`, `Lost`, `Refused`, `Unavailable` | `Requeue` | a later attempt finds out or runs |
    /// | `NotKept` | `Ack` | it is done |
    /// | `Unknown`, `Held`, `Mismatch`, `Codec` | `DeadLetter` | no later attempt ends otherwise; somebody must look |
    ///
    /// A message that is requeued again and again is poison: count deliveries, and dead-letter it by
    /// that count.
    pub fn disposition(&self) -> Disposition {
        match self {
            Self::NotKept => Disposition::Ack,
            Self::Retry(_) | Self::InFlight | Self::Lost(_) => Disposition::Requeue { after: SOON },
            Self::Refused(error) => Disposition::Requeue { after: wait_of(error) },
            Self::Unavailable { retry_after, .. } => Disposition::Requeue { after: *retry_after },
            Self::Unknown(_) | Self::Held | Self::Mismatch | Self::Codec(_) => {
                Disposition::DeadLetter
            }
        }
    }
}

fn wait_of(error: &ClaimError) -> Duration {
    match error {
        ClaimError::Full { retry_after } | ClaimError::AccountFull { retry_after } => *retry_after,
        ClaimError::Draining => SOON,
    }
}

/// What a consumer does with a message.
///
/// ```
/// use std::time::Duration;
/// use oncekey::worker::{Disposition, RunError};
///
/// assert_eq!(RunError::Mismatch.disposition(), Disposition::DeadLetter);
/// let after = Duration::from_secs(1);
/// assert_eq!(RunError::InFlight.disposition(), Disposition::Requeue { after });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Acknowledge it: it is done.
    Ack,
    /// Give it back to the queue, to be delivered again.
    Requeue {
        /// Not before.
        after: Duration,
    },
    /// Set it aside for an operator.
    DeadLetter,
}

/// What becomes of a message whose attempt ended as `ran`: done is [`Disposition::Ack`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use oncekey::{Fingerprint, Identity, Outcome, Store};
/// use oncekey::worker::{Disposition, Verdict, disposition};
///
/// let store = Store::builder().build()?;
/// let id = Identity::new("acct_42", "charge", "invoice-7")?;
/// let fp = Fingerprint::request("", "charge", b"1200 usd");
/// let ran = store.run(&id, fp, |_| async { Verdict::Done(Outcome::new(200)) }).await;
/// assert_eq!(disposition(&ran), Disposition::Ack);
/// # Ok(())
/// # }
/// ```
pub fn disposition<T>(ran: &Result<Ran<T>, RunError>) -> Disposition {
    ran.as_ref().err().map_or(Disposition::Ack, RunError::disposition)
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Retry(cause) => write!(f, "nothing was done, try again: {cause}"),
            Self::Unknown(cause) => {
                write!(f, "it is not known whether it was done, the key is held: {cause}")
            }
            Self::Held => f.write_str(
                "it is not known whether an earlier attempt has done it: find out, and resolve the key",
            ),
            Self::InFlight => f.write_str("another owner runs it: try again later"),
            Self::NotKept => f.write_str("it was done, but its outcome was not kept"),
            Self::Mismatch => f.write_str("the key was used for something else"),
            Self::Lost(_) => f.write_str(
                "lost: the claim was taken over, forgotten or resolved while the work ran; try again \
                 to get what the winner has left",
            ),
            Self::Refused(error) => error.fmt(f),
            Self::Unavailable { error, retry_after } => {
                write!(f, "{error}; nothing was done, try again in {} s", retry_after.as_secs())
            }
            Self::Codec(error) => error.fmt(f),
        }
    }
}

impl Error for RunError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Retry(cause) | Self::Unknown(cause) => Some(&**cause),
            Self::Refused(error) => Some(error),
            Self::Unavailable { error, .. } => Some(&**error),
            Self::Codec(error) => Some(error),
            Self::Held | Self::InFlight | Self::NotKept | Self::Mismatch | Self::Lost(_) => None,
        }
    }
}

impl From<ClaimError> for RunError {
    fn from(error: ClaimError) -> Self {
        Self::Refused(error)
    }
}
