//! What is done at once needs neither a task nor a timer: most handlers, most bodies.
//!
//! Ground rules:
//!
//! 1. A future is polled where it is called, once. Only if it has to wait then, it gets what waiting
//!    needs.
//! 2. Nobody can drop a future while it is polled. So what is [`detached`] in the very poll in which it
//!    first has to wait was never in the hands of a client that may leave (R18): between that poll and
//!    the task there is no await.
//! 3. A panic is caught as a task would catch it: it ends the work, not the client's connection.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::atomic::{AtomicBool, Ordering},
    task::Poll,
    time::Duration,
};

use tokio::runtime::Handle;

/// Why what was [`detached`] came to no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CutOff {
    Panicked,
    /// The runtime ended.
    ShutDown,
}

/// Runs `future` to its end, whoever drops this meanwhile. `waits` is called when it has to wait for
/// the first time; what it answers is dropped with the future.
pub(crate) async fn detached<F, G>(
    runtime: &Handle,
    mut future: Pin<Box<F>>,
    waits: impl FnOnce() -> G,
) -> Result<F::Output, CutOff>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
    G: Send + 'static,
{
    let first = poll_fn(|cx| {
        // What a panic has left half done is dropped below, as a task does.
        Poll::Ready(catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))))
    });
    match first.await {
        Ok(Poll::Ready(output)) => return Ok(output),
        Ok(Poll::Pending) => {}
        Err(_) => return Err(CutOff::Panicked),
    }
    let while_it_waits = waits();
    let task = runtime.spawn(async move {
        let _until_the_end = while_it_waits;
        future.await
    });
    task.await.map_err(|error| match error.is_panic() {
        true => CutOff::Panicked,
        false => CutOff::ShutDown,
    })
}

/// What `future` comes to, or `None` if it has to wait for longer than `limit`.
pub(crate) async fn within<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    match poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        Poll::Ready(output) => Some(output),
        Poll::Pending => tokio::time::timeout(limit, future).await.ok(),
    }
}

/// The runtime that is there when something has to wait.
#[derive(Default)]
pub(crate) struct Runtime {
    /// That there are timers was seen; a runtime that has them keeps them. Guards no other memory.
    has_timers: AtomicBool,
}

impl Runtime {
    /// The present one. Panics, as tokio does, if there is none or it has no timers, so that a request
    /// fails before anything has run, and not when it has to wait.
    #[track_caller]
    pub(crate) fn current(&self) -> Handle {
        let runtime = Handle::current();
        if !self.has_timers.load(Ordering::Relaxed) {
            drop(tokio::time::sleep(Duration::ZERO));
            self.has_timers.store(true, Ordering::Relaxed);
        }
        runtime
    }
}
