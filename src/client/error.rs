//! Why there is no answer.

use std::{error::Error, fmt};

use super::{BoxError, Report};

/// Why a request of a covered method has no answer. `E` is the error of the client underneath.
///
/// Where there is a [`report`](Self::report), at least one attempt was made, and whether the work was
/// done is not known: each of them may have had its effect though its answer is lost. So go on with the
/// same key, which the report has, later: that attempt does what was not done, or gets the answer of
/// what was. A new key could do it a second time. Where there is no report, nothing was sent under a
/// key. Callers of `reqwest-middleware` find it by [`Report::of`].
///
/// ```
/// use oncekey::client::IntentError;
///
/// fn told<E>(error: &IntentError<E>) -> &'static str {
///     match error.report() {
///         Some(_) => "keep `report.key()` and ask again under it",
///         None => "nothing was sent under a key",
///     }
/// }
/// # assert_eq!(told(&IntentError::<()>::ManyKeys), "nothing was sent under a key");
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum IntentError<E> {
    /// Nothing was sent: the body is a stream, has trailers, or is larger than
    /// [`max_body`](super::IntentLayer::max_body), and could not be sent a second time as it was.
    NotRepeatable,
    /// Nothing was sent: the body could not be read, or was not there within the
    /// [`deadline`](super::IntentLayer::deadline).
    Body(BoxError),
    /// Nothing was sent: the request has more than one key.
    ManyKeys,
    /// Nothing was sent: keys are to be sent [bare](super::IntentLayer::bare_keys), and this one, made
    /// elsewhere than by [`IntentKey`](crate::IntentKey), has a space, a `"` or a `,`, so that it could
    /// be read as another.
    NotBare,
    /// The last attempt was not answered in time: it was cut off by its
    /// [`attempt_timeout`](super::IntentLayer::attempt_timeout) or by the
    /// [`deadline`](super::IntentLayer::deadline). The work may be done, or be under way still: ask
    /// again later, under the report's key.
    TimedOut(Report),
    /// The last attempt failed with an error of the client underneath. It, or one before it, may have
    /// been done all the same: ask again later, under the report's key.
    Failed(Report, E),
    /// The request is of a method that is not covered, and failed as it was sent, once.
    Passed(E),
    /// The last answer began to come and broke off. The work may well be done: ask again later, under
    /// the report's key.
    BrokenOff(Report, BoxError),
}

impl<E> IntentError<E> {
    /// What there is to know of the attempts, if there were any.
    pub fn report(&self) -> Option<&Report> {
        match self {
            Self::NotRepeatable
            | Self::Body(_)
            | Self::ManyKeys
            | Self::NotBare
            | Self::Passed(_) => None,
            Self::TimedOut(report) | Self::Failed(report, _) | Self::BrokenOff(report, _) => {
                Some(report)
            }
        }
    }
}

impl<E> fmt::Display for IntentError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let after = |f: &mut fmt::Formatter<'_>, what: &str, report: &Report| {
            write!(
                f,
                "{what}, at attempt {}; whether the work was done is not known: ask again later \
                 with the same key (`Report::key`), not with a new one",
                report.attempts
            )
        };
        match self {
            Self::NotRepeatable => f.write_str(
                "nothing was sent: the body is a stream, has trailers or is too large to be kept for \
                 a second attempt; hand it over as bytes, or raise `max_body`",
            ),
            Self::Body(_) => f.write_str("nothing was sent: the body could not be read"),
            Self::ManyKeys => f.write_str(
                "nothing was sent: the request has more than one idempotency key; set one",
            ),
            Self::NotBare => f.write_str(
                "nothing was sent: the key has a space, a quote or a comma, which cannot be sent \
                 without quotes; derive one with `IntentKey`, or leave `bare_keys` off",
            ),
            Self::Passed(_) => f.write_str("the request failed; its method has no key"),
            Self::TimedOut(report) => after(f, "no answer in time", report),
            Self::Failed(report, _) => after(f, "the request failed", report),
            Self::BrokenOff(report, _) => after(f, "the answer broke off", report),
        }
    }
}

impl<E: Error + 'static> Error for IntentError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Failed(_, error) | Self::Passed(error) => Some(error),
            Self::Body(error) | Self::BrokenOff(_, error) => Some(&**error),
            Self::NotRepeatable | Self::ManyKeys | Self::NotBare | Self::TimedOut(_) => None,
        }
    }
}
