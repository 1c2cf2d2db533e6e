//! The connection to the server or the cluster: one step there and back.
//!
//! Ground rules:
//!
//! 1. All callers share a connection, and what was sent first is done first.
//! 2. A connection that has ended, that leads to a server which is no primary any more, or that was
//!    asked something and has been silent since for as long as a step may take, is replaced by the next
//!    caller, however soon those who asked gave up. The driver's own `ConnectionManager` keeps the
//!    latter two; the cluster's connection knows them.
//! 3. A step whose connection ended under it may have been done. It is repeated at once if a repeated
//!    one does no harm; else the caller is told that nobody knows. The connection to a cluster
//!    repeats by itself, so there a release may find that it was lost, and a forget or a resolve that
//!    nothing is left to do, when it has been done a moment before.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cluster_async::ClusterConnection,
    cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr},
};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::step::Script;
use crate::tier::TierError;

pub(super) struct Link {
    pub(super) to: To,
    /// How long a step may take, connecting included.
    pub(super) within: Duration,
    /// How many replicas must have a step before it counts as done.
    pub(super) replicas: usize,
}

pub(super) enum To {
    Server(Box<Server>),
    Cluster(ClusterConnection),
}

/// One server, and the connection that is used at present.
pub(super) struct Server {
    client: Client,
    config: AsyncConnectionConfig,
    /// How long a connection may be silent.
    patience: Duration,
    open: Mutex<Option<Open>>,
    /// Held while a connection is being made: one caller makes it for all.
    connecting: tokio::sync::Mutex<()>,
    /// Connections made so far.
    made: AtomicU64,
}

#[derive(Clone)]
struct Open {
    connection: MultiplexedConnection,
    nth: u64,
    /// When it was asked something for the first time after its last answer.
    asked: Option<Instant>,
}

impl Link {
    /// Runs a script on the server that has its keys.
    pub(super) async fn run(
        &self,
        script: &Script,
        keys: &[Vec<u8>],
        args: &[&[u8]],
    ) -> Result<Vec<Value>, TierError> {
        let Ok(done) = timeout(self.within, self.step(script, keys, args)).await else {
            return Err(TierError::unavailable(format!(
                "no answer from Redis within {:?}",
                self.within
            )));
        };
        match done? {
            Value::Array(values) => Ok(values),
            other => Err(TierError::unusable(format!("not an answer of ours: {other:?}"))),
        }
    }

    async fn step(
        &self,
        script: &Script,
        keys: &[Vec<u8>],
        args: &[&[u8]],
    ) -> Result<Value, TierError> {
        let replicas = if script.is_replicated { self.replicas } else { 0 };
        let (mut is_known, mut may_repeat) = (true, script.may_repeat);
        loop {
            let step = script.command(is_known, keys, args);
            match self.send(step, &keys[0], replicas).await {
                Err(error) if is_known && is(&error, ServerErrorKind::NoScript) => is_known = false,
                Err(error) if may_repeat && error.is_connection_dropped() => may_repeat = false,
                Err(error) => return Err(refusal(&error)),
                Ok((value, acknowledged)) if acknowledged >= replicas => return Ok(value),
                Ok((_, acknowledged)) => {
                    return Err(TierError::unavailable(format!(
                        "{acknowledged} of {replicas} replicas have the step: it may get lost"
                    )));
                }
            }
        }
    }

    /// What the server answers, and how many replicas have what it has written.
    async fn send(&self, step: Cmd, key: &[u8], replicas: usize) -> RedisResult<(Value, usize)> {
        if replicas == 0 {
            let answer = match &self.to {
                To::Server(server) => server.send(&step).await?,
                To::Cluster(cluster) => {
                    cluster.clone().route_command(step, RoutingInfo::SingleNode(owner(key))).await?
                }
            };
            return Ok((answer.extract_error()?, 0));
        }
        // Twice, if the server has to be told the script first, and the answer still comes in time.
        let limit = (self.within / 4).as_millis().max(1) as u64;
        let mut both = ::redis::pipe();
        both.add_command(step);
        both.cmd("WAIT").arg(replicas).arg(limit);
        let answers = match &self.to {
            To::Server(server) => server.send_both(&both).await?,
            To::Cluster(cluster) => cluster.clone().route_pipeline(both, 0, 2, owner(key)).await?,
        };
        let mut answers = answers.into_iter();
        let step = answers.next().unwrap_or(Value::Nil).extract_error()?;
        let acknowledged = answers.next().unwrap_or(Value::Nil).extract_error()?;
        Ok((step, ::redis::from_redis_value(acknowledged)?))
    }
}

/// The primary that has the slot of `key`.
fn owner(key: &[u8]) -> SingleNodeRoutingInfo {
    SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master))
}

impl Server {
    pub(super) fn new(client: Client, config: AsyncConnectionConfig, patience: Duration) -> Self {
        Self {
            client,
            config,
            patience,
            open: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            made: AtomicU64::new(0),
        }
    }

    pub(super) async fn send(&self, command: &Cmd) -> RedisResult<Value> {
        let mut open = self.connection().await?;
        let answer = open.connection.req_packed_command(command).await;
        self.note(open.nth, answer.and_then(Value::extract_error))
    }

    async fn send_both(&self, both: &::redis::Pipeline) -> RedisResult<Vec<Value>> {
        let mut open = self.connection().await?;
        let answers = open.connection.req_packed_commands(both, 0, 2).await;
        // Each for itself, as a single answer would be.
        let answers = answers.and_then(|all| all.into_iter().map(Value::extract_error).collect());
        self.note(open.nth, answers)
    }

    /// The connection, for a caller who asks it something now.
    async fn connection(&self) -> RedisResult<Open> {
        let present = || {
            let (mut open, now) = (self.open.lock(), Instant::now());
            let is_silent = |asked: Instant| now.duration_since(asked) >= self.patience;
            open.take_if(|open| open.asked.is_some_and(is_silent));
            let open = open.as_mut()?;
            open.asked.get_or_insert(now);
            Some(open.clone())
        };
        if let Some(open) = present() {
            return Ok(open);
        }
        let _alone = self.connecting.lock().await;
        if let Some(open) = present() {
            return Ok(open);
        }
        let connection =
            self.client.get_multiplexed_async_connection_with_config(&self.config).await?;
        let nth = self.made.fetch_add(1, Ordering::Relaxed);
        let open = Open { connection, nth, asked: Some(Instant::now()) };
        *self.open.lock() = Some(open.clone());
        Ok(open)
    }

    /// Draws the conclusions of an answer of the connection `nth`.
    fn note<T>(&self, nth: u64, answer: RedisResult<T>) -> RedisResult<T> {
        let is_of_no_use = answer.as_ref().err().is_some_and(|error| {
            error.is_unrecoverable_error() || is(error, ServerErrorKind::ReadOnly)
        });
        let mut present = self.open.lock();
        if let Some(open) = present.as_mut().filter(|open| open.nth == nth) {
            open.asked = None;
            if is_of_no_use {
                *present = None;
            }
        }
        drop(present);
        answer
    }
}

fn is(error: &RedisError, kind: ServerErrorKind) -> bool {
    error.kind() == ErrorKind::Server(kind)
}

/// What an error of the driver or the server means to a caller.
///
/// Refusals that end by themselves (a failover, a server that loads its data, one that is full until
/// records end) are worth another try; those that somebody must do something about are not.
pub(super) fn refusal(error: &RedisError) -> TierError {
    let text = error.to_string();
    // Before version 7 an error inside of a script had its code in the text only.
    let says = |code: &str| error.code() == Some(code) || text.contains(&format!("-{code} "));
    let advice = if says("OOM") {
        return TierError::unavailable(format!(
            "Redis is full: give it more memory, or wait until records end: {text}"
        ));
    } else if says("READONLY") {
        return TierError::unavailable(format!("the server is no primary (any more): {text}"));
    } else if says("MISCONF") {
        "Redis cannot write to its disk"
    } else if says("NOPERM") || text.contains("user executing the script") {
        "the user lacks rights: docs/tiers/redis.md lists the commands"
    } else if says("NOAUTH") || says("WRONGPASS") {
        "user and password belong into the URL"
    } else if says("WRONGTYPE") {
        "something else stores values under these names: choose another prefix"
    } else {
        match error.kind() {
            ErrorKind::AuthenticationFailed => "user and password belong into the URL",
            ErrorKind::InvalidClientConfig => "the URL or the features of the driver do not fit",
            ErrorKind::Server(ServerErrorKind::ResponseError) if !passes(&text) => {
                "Redis refused a step"
            }
            ErrorKind::UnexpectedReturnType | ErrorKind::RESP3NotSupported => {
                "Redis did not answer as expected"
            }
            _ => return TierError::unavailable(error.clone()),
        }
    };
    TierError::unusable(format!("{advice}: {text}"))
}

/// Whether an error without a code of its own passes by itself.
fn passes(text: &str) -> bool {
    ["max number of clients", "non local key", "-LOADING", "-NOREPLICAS", "-MASTERDOWN", "-BUSY"]
        .iter()
        .any(|passing| text.contains(passing))
}
