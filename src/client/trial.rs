//! One intent: its key, its attempts, and the time that is left. What both faces of the client share.

use std::{future::Future, ops::ControlFlow, time::Duration};

use backon::{BackoffBuilder as _, ExponentialBackoff, ExponentialBuilder};
use http::{Extensions, HeaderMap, HeaderValue, Response};
use http_body::Body;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{AnswerBody, BoxError, IntentError, Report, judge, layer::Policy};
use crate::IntentKey;

/// An answer whose `Retry-After` is behind the end of all clocks is not waited for anyway.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Made before the first attempt, and kept over all of them.
pub(super) struct Trial<'p> {
    policy: &'p Policy,
    pub(super) key: HeaderValue,
    attempts: u32,
    limits: ExponentialBackoff,
    deadline: Instant,
    /// Of the present attempt.
    end: Instant,
}

/// What one attempt came to: the answer, or an error and whether another attempt may help.
pub(super) type Sent<B, E> = Result<Response<B>, (E, bool)>;

/// The end of a trial, or another attempt.
type Verdict<B, E> = ControlFlow<Result<Response<AnswerBody<B>>, IntentError<E>>>;

impl<'p> Trial<'p> {
    /// Finds the key of the request, or makes it, and sets its field.
    pub(super) fn begin<E>(
        policy: &'p Policy,
        headers: &mut HeaderMap,
        extensions: &Extensions,
    ) -> Result<Self, IntentError<E>> {
        let mut set = headers.get_all(&policy.field).iter();
        let key = match (set.next(), set.next()) {
            (Some(set), None) => set.clone(),
            (Some(_), Some(_)) => return Err(IntentError::ManyKeys),
            (None, _) => {
                let key = extensions.get().cloned().unwrap_or_else(IntentKey::random);
                let text = match policy.bare {
                    true => bare(&key).ok_or(IntentError::NotBare)?,
                    false => key.as_key().to_field_value(),
                };
                // A key is printable ASCII, so it is a value; refused rather than sent without.
                let value = HeaderValue::try_from(text);
                let value = value.map_err(|error| IntentError::Body(error.into()))?;
                headers.insert(&policy.field, value.clone());
                value
            }
        };
        let now = Instant::now();
        let limits = ExponentialBuilder::new()
            .with_min_delay(policy.min_delay)
            .with_max_delay(policy.max_delay)
            .without_max_times()
            .build();
        let deadline = after(now, policy.deadline);
        Ok(Self { policy, key, attempts: 0, limits, deadline, end: now })
    }

    /// What comes before the first attempt, under the same deadline.
    pub(super) async fn in_time<F: Future, E>(
        &self,
        prepare: F,
    ) -> Result<F::Output, IntentError<E>> {
        let done = timeout_at(self.deadline, prepare).await;
        done.map_err(|late| IntentError::Body(late.into()))
    }

    /// The next attempt begins. Whoever sends it, and whoever waits for it, may know its key.
    pub(super) fn begin_attempt(&mut self, extensions: &mut Extensions) {
        self.attempts = self.attempts.saturating_add(1);
        self.end = after(Instant::now(), self.policy.attempt_timeout).min(self.deadline);
        extensions.insert(self.report(false));
    }

    /// What is sent, cut off at the end of the attempt's time: then nothing.
    pub(super) async fn in_attempt<F: Future>(&self, send: F) -> Option<F::Output> {
        timeout_at(self.end, send).await.ok()
    }

    /// Judges what an attempt came to; if there is to be another, returns when it is time for it.
    pub(super) async fn judge<B, E>(&mut self, sent: Option<Sent<B, E>>) -> Verdict<B, E>
    where
        B: Body<Error: Into<BoxError>> + Unpin,
    {
        let (last, asked) = match sent {
            None => (Err(IntentError::TimedOut(self.report(false))), Duration::ZERO),
            Some(Err((error, may_help))) => {
                let failed = Err(IntentError::Failed(self.report(false), error));
                if !may_help {
                    return ControlFlow::Break(failed);
                }
                (failed, Duration::ZERO)
            }
            Some(Ok(response)) => match self.receive(response).await {
                Ok((response, true)) => {
                    let asked = judge::retry_after(response.headers());
                    (Ok(response), asked)
                }
                Ok((response, false)) => return ControlFlow::Break(Ok(response)),
                Err(broken) => (Err(broken), Duration::ZERO),
            },
        };
        // Full jitter: somewhere between nothing and the limit. What was asked for comes on top, so
        // that those who were told the same time are spread too.
        let limit = self.limits.next().unwrap_or(self.policy.max_delay);
        let next = after(after(Instant::now(), asked), limit.mul_f64(fastrand::f64()));
        if self.attempts >= self.policy.max_attempts || next >= self.deadline {
            return ControlFlow::Break(last);
        }
        drop(last); // its connection is of use to the next attempt
        sleep_until(next).await;
        ControlFlow::Continue(())
    }

    /// The answer, read as far as it must be, and whether the same request may get another one.
    async fn receive<B, E>(
        &self,
        response: Response<B>,
    ) -> Result<(Response<AnswerBody<B>>, bool), IntentError<E>>
    where
        B: Body<Error: Into<BoxError>> + Unpin,
    {
        /// A problem is a few hundred bytes.
        const PROBLEM: u64 = 64 << 10;

        let (mut parts, body) = response.into_parts();
        let is_replay = self.policy.is_replay(&parts.headers);
        let is_conflict = parts.status == http::StatusCode::CONFLICT;
        let most = self.policy.max_answer.max(if is_conflict { PROBLEM } else { 0 });
        let read = AnswerBody::read(body, &parts.headers, most);
        let body = match timeout_at(self.end, read).await {
            Ok(Ok(body)) => body,
            Ok(Err(error)) => {
                return Err(IntentError::BrokenOff(self.report(is_replay), error.into()));
            }
            Err(_) => return Err(IntentError::TimedOut(self.report(is_replay))),
        };
        let conflict = if is_conflict { body.whole() } else { None };
        let again = self.policy.is_passing(parts.status, &parts.headers, conflict.as_deref());
        parts.extensions.insert(self.report(is_replay));
        Ok((Response::from_parts(parts, body), again))
    }

    fn report(&self, is_replay: bool) -> Report {
        Report { attempts: self.attempts, is_replay, key: self.key.clone() }
    }
}

/// The key without quotes, if it is the same key without them (R6).
fn bare(key: &IntentKey) -> Option<String> {
    let is_plain = |byte: u8| matches!(byte, 0x21..=0x7e) && !matches!(byte, b'"' | b',');
    key.as_str().bytes().all(is_plain).then(|| key.as_str().to_owned())
}

fn after(from: Instant, span: Duration) -> Instant {
    from.checked_add(span.min(FAR)).unwrap_or(from)
}
