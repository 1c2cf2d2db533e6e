//! What has to wait: the task that goes on with it, and the runtime that it needs.

use std::{
    sync::atomic::{AtomicBool, Ordering},
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

/// Runs `future` to its end, whoever drops this meanwhile: as a task from the first poll on.
pub(crate) async fn detached<F>(future: F) -> Result<F::Output, CutOff>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(future).await.map_err(|error| match error.is_panic() {
        true => CutOff::Panicked,
        false => CutOff::ShutDown,
    })
}

/// The runtime that is there when something has to wait.
#[derive(Default)]
pub(crate) struct Runtime {
    /// That there are timers was seen; a runtime that has them keeps them. Guards no other memory.
    has_timers: AtomicBool,
}

impl Runtime {
    /// Panics, as tokio does, if there is none or it has no timers, so that a request fails before
    /// anything has run, and not when it has to wait.
    #[track_caller]
    pub(crate) fn check(&self) {
        drop(Handle::current());
        if !self.has_timers.load(Ordering::Relaxed) {
            drop(tokio::time::sleep(Duration::ZERO));
            self.has_timers.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        panic::{AssertUnwindSafe, catch_unwind},
        pin::{Pin, pin},
        sync::Arc,
        task::{Context, Poll},
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
    async fn r18_what_has_to_wait_goes_on_whoever_leaves_after_the_first_poll() {
        let ((go, gate), (told, ended)) = (oneshot::channel(), oneshot::channel());
        let until_the_end = Arc::new(());
        let held = Arc::clone(&until_the_end);
        let mut started = Box::pin(detached(async move {
            let _held = held;
            let () = gate.await.unwrap();
            told.send("done").unwrap();
        }));
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
            assert_eq!(detached(fails(turns)).await, Err(CutOff::Panicked), "{turns}");
        }
        assert_eq!(tasks(), 0);
    }

    #[test]
    fn r11_what_waits_in_a_runtime_that_ends_is_cut_off() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut started = pin!(detached(pending::<()>()));
        let entered = runtime.enter();
        assert!(poll(started.as_mut()).is_pending());
        drop(entered);
        drop(runtime);
        assert_eq!(poll(started.as_mut()), Poll::Ready(Err(CutOff::ShutDown)));
    }

    #[test]
    fn a_runtime_without_timers_is_refused_before_anything_runs() {
        let plain = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let seen = Runtime::default();
        let refused = || catch_unwind(AssertUnwindSafe(|| seen.check())).is_err();
        assert!(refused(), "there is no runtime at all");
        assert!(plain.block_on(async { refused() }), "there is one without timers");
        let timed = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        assert!(!timed.block_on(async { refused() }));
    }
}
