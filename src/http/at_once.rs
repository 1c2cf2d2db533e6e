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
    pin::Pin,
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
pub(crate) async fn within<F: Future>(
    limit: Duration,
    mut future: Pin<&mut F>,
) -> Option<F::Output> {
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

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        pin::pin,
        sync::Arc,
        task::Context,
    };

    use tokio::{sync::oneshot, task::yield_now};

    use super::*;

    fn tasks() -> usize {
        Handle::current().metrics().num_alive_tasks()
    }

    /// Polls once.
    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(std::task::Waker::noop()))
    }

    #[tokio::test]
    async fn what_does_not_wait_needs_no_task() {
        let work = Box::pin(async { tasks() });
        let waits = || panic!("it does not wait");
        assert_eq!(detached(&Handle::current(), work, waits).await, Ok::<usize, CutOff>(0));
        assert_eq!(tasks(), 0);
    }

    #[tokio::test]
    async fn r18_what_has_to_wait_goes_on_whoever_leaves_after_the_first_poll() {
        let ((go, gate), (told, ended)) = (oneshot::channel(), oneshot::channel());
        let until_the_end = Arc::new(());
        let held = Arc::clone(&until_the_end);
        let work = Box::pin(async move {
            let () = gate.await.unwrap();
            told.send("done").unwrap();
        });
        let runtime = Handle::current();
        let mut started = Box::pin(detached(&runtime, work, move || held));
        assert!(poll(started.as_mut()).is_pending());
        // The client's waker is gone with the client: it is the task's that must be woken.
        drop(started);
        assert_eq!((tasks(), Arc::strong_count(&until_the_end)), (1, 2));
        go.send(()).unwrap();
        assert_eq!(ended.await, Ok("done"));
        while tasks() > 0 {
            yield_now().await;
        }
        assert_eq!(Arc::strong_count(&until_the_end), 1);
    }

    #[tokio::test]
    async fn r11_a_panic_is_told_whether_it_comes_at_once_or_later() {
        async fn fails(turns: usize) {
            for _ in 0..turns {
                yield_now().await;
            }
            panic!("as it should in this test");
        }
        for turns in [0, 1, 5] {
            let told = detached(&Handle::current(), Box::pin(fails(turns)), || ()).await;
            assert_eq!(told, Err(CutOff::Panicked), "{turns}");
        }
        assert_eq!(tasks(), 0);
    }

    #[test]
    fn r11_what_waits_in_a_runtime_that_ends_is_cut_off() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let handle = runtime.handle().clone();
        drop(runtime);
        let mut started = pin!(detached(&handle, Box::pin(pending::<()>()), || ()));
        assert_eq!(poll(started.as_mut()), Poll::Ready(Err(CutOff::ShutDown)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_counts_from_the_first_wait() {
        let hour = Duration::from_secs(60 * 60);
        assert_eq!(within(Duration::ZERO, pin!(ready(1))).await, Some(1));
        assert_eq!(within(hour, pin!(async { yield_now().await })).await, Some(()));
        assert_eq!(within(hour, pin!(pending::<()>())).await, None);
    }

    #[test]
    fn a_runtime_without_timers_is_refused_before_anything_runs() {
        let plain = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let seen = Runtime::default();
        let refused = || catch_unwind(AssertUnwindSafe(|| seen.current())).is_err();
        assert!(refused(), "there is no runtime at all");
        assert!(plain.block_on(async { refused() }), "there is one without timers");
        let timed = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        assert!(!timed.block_on(async { refused() }));
    }
}
