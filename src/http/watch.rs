//! What logs and metrics are told: `docs/observability.md` lists every name.
//!
//! Ground rules:
//!
//! 1. An attempt ends once, whoever sees it: the client's future, or the owner's task, which may
//!    outlive it. One that nobody ends was left by its client.
//! 2. Nothing here sees an account, a key, a header line or a body: what is not handed in cannot
//!    leak. The endpoint is a name of the service's own.
//! 3. Without the features there is nothing: [`Watch`] has no size and its methods do nothing.

use super::problem::Problem;

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(any(feature = "tracing", feature = "metrics")), expect(dead_code))]
pub(crate) enum Ending {
    /// The handler ran and its response was kept.
    Kept,
    /// The handler ran and its response was not kept (R20).
    NotKept,
    /// The handler ran and the identity was released (R17).
    Released,
    /// The inner service returned an error, and the identity was released (R11).
    Failed,
    /// The token was stale when the handler was done (R9).
    Lost,
    /// The handler panicked (R11).
    Panicked,
    /// The task was cut off, as when the runtime ends.
    CutOff,
    /// A stored outcome, or what an owner left to its waiters, was handed back.
    Replayed,
    /// The client left before it was answered, and owned nothing.
    Left,
    /// The request body broke off.
    Broken,
    /// One of our own answers.
    Refused(Problem),
}

impl Ending {
    /// As logs and metrics say it.
    #[cfg_attr(not(any(feature = "tracing", feature = "metrics")), expect(dead_code))]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::NotKept => "not-kept",
            Self::Released => "released",
            Self::Failed => "error",
            Self::Lost => "lost",
            Self::Panicked => "panicked",
            Self::CutOff => "cut-off",
            Self::Replayed => "replayed",
            Self::Left => "left",
            Self::Broken => "broken",
            Self::Refused(problem) => problem.slug(),
        }
    }
}

pub(crate) use self::imp::{Watch, refused, unclaimed};

#[cfg(not(any(feature = "tracing", feature = "metrics")))]
mod imp {
    use std::{sync::Arc, time::Duration};

    use super::Ending;
    use crate::{
        Token,
        http::{attempt::Caller, problem::Problem},
    };

    pub(crate) fn unclaimed() {}

    pub(crate) fn refused(_: &str, _: Problem) {}

    #[derive(Clone)]
    pub(crate) struct Watch;

    impl Watch {
        pub(crate) fn new(_: &Arc<Caller>) -> Self {
            Self
        }

        pub(crate) fn silent(_: &Arc<Caller>) -> Self {
            Self
        }

        pub(crate) fn waits(&self) {}

        pub(crate) fn waited(&self) {}

        pub(crate) fn owns(&self, _: Token) {}

        pub(crate) fn replayed(&self, _: Option<Duration>) {}

        pub(crate) fn end(&self, _: Ending) {}

        pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
            work()
        }
    }
}

#[cfg(any(feature = "tracing", feature = "metrics"))]
mod imp {
    use std::{
        sync::{
            Arc, OnceLock,
            atomic::{AtomicBool, Ordering},
        },
        time::{Duration, Instant},
    };

    use super::Ending;
    use crate::{
        Token,
        http::{attempt::Caller, problem::Problem},
    };

    #[cfg(feature = "tracing")]
    const TARGET: &str = "oncekey";

    /// A request passed because no endpoint was known (R2).
    pub(crate) fn unclaimed() {
        #[cfg(feature = "tracing")]
        tracing::debug!(target: TARGET, "no endpoint: the request passes unclaimed");
        #[cfg(feature = "metrics")]
        metrics::counter!("oncekey_unclaimed_total").increment(1);
    }

    /// An attempt that its head has ended.
    pub(crate) fn refused(endpoint: &str, problem: Problem) {
        #[cfg(feature = "tracing")]
        tracing::debug!(target: TARGET, endpoint, outcome = problem.slug(), "attempt ended");
        #[cfg(feature = "metrics")]
        attempts(endpoint, problem.slug());
    }

    #[cfg(feature = "metrics")]
    fn attempts(endpoint: &str, outcome: &'static str) {
        metrics::counter!(
            "oncekey_attempts_total",
            "endpoint" => endpoint.to_owned(),
            "outcome" => outcome
        )
        .increment(1);
    }

    /// One attempt, watched by its client's future and by its owner's task.
    #[derive(Clone)]
    pub(crate) struct Watch(Arc<Watched>);

    struct Watched {
        caller: Arc<Caller>,
        has_ended: AtomicBool,
        waits_since: OnceLock<Instant>,
        has_waited: AtomicBool,
        /// Parent of what the handler logs.
        #[cfg(feature = "tracing")]
        span: tracing::Span,
    }

    impl Watch {
        pub(crate) fn new(caller: &Arc<Caller>) -> Self {
            #[cfg(feature = "tracing")]
            let span = tracing::debug_span!(
                target: TARGET,
                "attempt",
                endpoint = caller.endpoint,
                outcome = tracing::field::Empty,
                token = tracing::field::Empty,
                waited_ms = tracing::field::Empty,
                age_ms = tracing::field::Empty,
            );
            Self(Arc::new(Watched {
                caller: Arc::clone(caller),
                has_ended: AtomicBool::new(false),
                waits_since: OnceLock::new(),
                has_waited: AtomicBool::new(false),
                #[cfg(feature = "tracing")]
                span,
            }))
        }

        /// Of a request that is no attempt: nobody is told of it.
        pub(crate) fn silent(caller: &Arc<Caller>) -> Self {
            Self(Arc::new(Watched {
                caller: Arc::clone(caller),
                has_ended: AtomicBool::new(true),
                waits_since: OnceLock::new(),
                has_waited: AtomicBool::new(true),
                #[cfg(feature = "tracing")]
                span: tracing::Span::none(),
            }))
        }

        /// It begins to wait for an owner, or goes on to.
        pub(crate) fn waits(&self) {
            self.0.waits_since.get_or_init(Instant::now);
        }

        /// It waits no more.
        pub(crate) fn waited(&self) {
            self.0.waited();
        }

        /// It has won the claim.
        pub(crate) fn owns(&self, token: Token) {
            let _ = token;
            #[cfg(feature = "tracing")]
            self.0.span.record("token", tracing::field::display(token));
        }

        /// It is handed an outcome of this age back; none for one that was never stored.
        pub(crate) fn replayed(&self, age: Option<Duration>) {
            let is_told = !self.0.has_ended.load(Ordering::Relaxed);
            if let Some(age) = age.filter(|_| is_told) {
                #[cfg(feature = "tracing")]
                self.0.span.record("age_ms", millis(age));
                #[cfg(feature = "metrics")]
                metrics::histogram!(
                    "oncekey_replay_age_seconds",
                    "endpoint" => self.0.caller.endpoint.clone()
                )
                .record(age.as_secs_f64());
            }
            self.end(Ending::Replayed);
        }

        pub(crate) fn end(&self, ending: Ending) {
            self.0.end(ending);
        }

        /// Part of the owner's work, in the attempt's span.
        #[cfg(feature = "tracing")]
        pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
            self.0.span.in_scope(work)
        }

        #[cfg(not(feature = "tracing"))]
        pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
            work()
        }
    }

    #[cfg(feature = "tracing")]
    fn millis(span: Duration) -> u64 {
        u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
    }

    impl Watched {
        fn waited(&self) {
            let Some(since) = self.waits_since.get() else { return };
            // Relaxed, as below: the flag guards no other memory.
            if self.has_waited.swap(true, Ordering::Relaxed) {
                return;
            }
            let waited = since.elapsed();
            #[cfg(feature = "tracing")]
            self.span.record("waited_ms", millis(waited));
            #[cfg(feature = "metrics")]
            metrics::histogram!("oncekey_wait_seconds", "endpoint" => self.caller.endpoint.clone())
                .record(waited.as_secs_f64());
        }

        fn end(&self, ending: Ending) {
            if self.has_ended.swap(true, Ordering::Relaxed) {
                return;
            }
            self.waited();
            #[cfg(feature = "tracing")]
            {
                let (endpoint, outcome) = (&*self.caller.endpoint, ending.name());
                self.span.record("outcome", outcome);
                // Whoever wants to know of double runs and of work that nobody knows the end of
                // finds them without the rest.
                if matches!(ending, Ending::Lost | Ending::Panicked | Ending::CutOff) {
                    tracing::warn!(target: TARGET, parent: &self.span, endpoint, outcome, "attempt ended");
                } else {
                    tracing::debug!(target: TARGET, parent: &self.span, endpoint, outcome, "attempt ended");
                }
            }
            #[cfg(feature = "metrics")]
            {
                attempts(&self.caller.endpoint, ending.name());
                if ending == Ending::Lost {
                    let endpoint = self.caller.endpoint.clone();
                    metrics::counter!("oncekey_lost_tokens_total", "endpoint" => endpoint)
                        .increment(1);
                }
            }
        }
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            self.end(Ending::Left);
        }
    }
}

#[cfg(feature = "metrics")]
impl super::IdempotencyLayer {
    /// Sets the gauges: `oncekey_keys`, `oncekey_bytes`, `oncekey_in_flight`, `oncekey_waiters`,
    /// `oncekey_nearly_full`, `oncekey_tasks` and `oncekey_buffered_bytes`. Call it when your metrics
    /// are read, or once in a while; counters and histograms need no call.
    pub fn record_gauges(&self) {
        let (store, layer) = (self.store().stats(), self.stats());
        metrics::gauge!("oncekey_keys").set(store.keys as f64);
        metrics::gauge!("oncekey_bytes").set(store.bytes as f64);
        metrics::gauge!("oncekey_in_flight").set(store.in_flight as f64);
        metrics::gauge!("oncekey_waiters").set(store.waiters as f64);
        metrics::gauge!("oncekey_nearly_full").set(f64::from(u8::from(store.nearly_full)));
        metrics::gauge!("oncekey_tasks").set(layer.tasks as f64);
        metrics::gauge!("oncekey_buffered_bytes").set(layer.buffered as f64);
    }
}
