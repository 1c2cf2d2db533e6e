//! What a caller is told of the attempts.

use std::fmt;

use http::HeaderValue;

use super::IntentError;

/// How an answer came, or that none did: an extension of each response to a covered request, and
/// part of an [`IntentError`](super::IntentError). It is an extension of each attempt's request too, so
/// that what is inside of this layer (signing, tracing) knows the attempt and the key.
///
/// ```
/// use oncekey::client::Report;
///
/// fn told<B>(response: &http::Response<B>) -> Option<(u32, bool)> {
///     let report = response.extensions().get::<Report>()?;
///     Some((report.attempts(), report.is_replay()))
/// }
/// # assert_eq!(told(&http::Response::new(())), None);
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Report {
    pub(super) attempts: u32,
    pub(super) is_replay: bool,
    pub(super) key: HeaderValue,
}

impl Report {
    /// The report in an error of `reqwest-middleware`, if the error is one of [`IntentLayer`]'s and
    /// something was sent: above all the key, to go on with.
    ///
    /// ```
    /// use oncekey::client::Report;
    /// use reqwest_middleware::{ClientWithMiddleware, Error};
    ///
    /// async fn go_on(client: &ClientWithMiddleware, error: &Error) -> Option<reqwest::Response> {
    ///     let key = Report::of(error)?.key();
    ///     let again = client.post("https://pay.example/charges").header("Idempotency-Key", key);
    ///     again.body("{}").send().await.ok()
    /// }
    /// ```
    ///
    /// [`IntentLayer`]: super::IntentLayer
    pub fn of(error: &reqwest_middleware::Error) -> Option<&Self> {
        match error {
            reqwest_middleware::Error::Middleware(error) => {
                error.downcast_ref::<IntentError<reqwest_middleware::Error>>()?.report()
            }
            reqwest_middleware::Error::Reqwest(_) => None,
        }
    }

    /// How many attempts there were, from 1. One that was cut off counts.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Whether the answer is that of an earlier attempt, perhaps of another process: it is marked as
    /// replayed.
    pub fn is_replay(&self) -> bool {
        self.is_replay
    }

    /// The value of the key's field, as it was sent each time. Keep it if no answer came, and set it
    /// as the field of the next try: a new key could mean a second charge.
    pub fn key(&self) -> &HeaderValue {
        &self.key
    }
}

/// Shows the numbers, not the key: whoever reads it in a log could ask for the answer with it.
impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Report")
            .field("attempts", &self.attempts)
            .field("is_replay", &self.is_replay)
            .finish_non_exhaustive()
    }
}
