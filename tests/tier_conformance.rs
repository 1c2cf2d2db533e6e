//! The conformance suite on tiers that keep the contract: the one in memory, and the same one in
//! three ways that servers have, with answers that take their time.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

mod common;

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use common::{DAY, watchdog};
use oncekey::{
    Identity, ManualClock, Outcome, Token,
    tier::{
        Answer, Claimed, Forgotten, Found, Landed, MemoryTier, NewClaim, Recalls, Resolved, Tier,
        TierError,
        conformance::{Host, check},
    },
};
use tokio::{sync::Semaphore, task::yield_now};

/// How an answer comes.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// With awaits before and behind the step.
    Awaits,
    /// The same, while one of a few places is taken.
    Pooled,
    /// From a task that has begun with the first poll. It goes on if its answer is given up.
    Task,
    /// From a task that has begun with the call, polled or not.
    Eager,
}

/// The tier in memory behind such a way.
#[derive(Clone, Debug)]
struct Remote {
    tier: MemoryTier,
    way: Way,
    places: Arc<Semaphore>,
    calls: Arc<AtomicUsize>,
}

/// An identity that owns its parts.
struct Name([Vec<u8>; 3]);

impl Name {
    fn of(id: Identity<'_>) -> Self {
        Self([id.account(), id.endpoint(), id.key()].map(<[u8]>::to_vec))
    }

    fn get(&self) -> Identity<'_> {
        Identity::new(&self.0[0], &self.0[1], &self.0[2]).unwrap()
    }
}

impl Remote {
    fn call<T: Send + 'static>(
        &self,
        step: impl Future<Output = Result<T, TierError>> + Send + 'static,
    ) -> Answer<'static, T> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let later = async {
            yield_now().await;
            let answer = step.await;
            yield_now().await;
            answer
        };
        match self.way {
            Way::Awaits => Box::pin(later),
            Way::Pooled => {
                let places = Arc::clone(&self.places);
                Box::pin(async move {
                    let _place = places.acquire().await.unwrap();
                    later.await
                })
            }
            Way::Task => Box::pin(async { tokio::spawn(later).await.unwrap() }),
            Way::Eager => {
                let task = tokio::spawn(later);
                Box::pin(async { task.await.unwrap() })
            }
        }
    }
}

impl Tier for Remote {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        let tier = self.tier.clone();
        self.call(async move { tier.beat(owner, lease).await })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.claim(id.get(), claim).await })
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.take_over(id.get(), seen, claim).await })
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        let (tier, id, outcome) = (self.tier.clone(), Name::of(id), outcome.cloned());
        self.call(async move { tier.complete(id.get(), token, outcome.as_ref(), retention).await })
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.release(id.get(), token).await })
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.hold(id.get(), token, retention).await })
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.lapse(id.get(), token).await })
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.checkpoint(id.get(), token, bytes).await })
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.look_up(id.get()).await })
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        let (tier, id) = (self.tier.clone(), Name::of(id));
        self.call(async move { tier.forget(id.get(), forced).await })
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        let (tier, id, outcome) = (self.tier.clone(), Name::of(id), outcome.cloned());
        self.call(async move { tier.resolve(id.get(), outcome.as_ref(), retention).await })
    }

    fn reap(&self, most: usize) -> Answer<'_, usize> {
        let tier = self.tier.clone();
        self.call(async move { tier.reap(most).await })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        let tier = self.tier.clone();
        self.call(async move { tier.recalls(since).await })
    }
}

struct Here {
    tier: Remote,
    clock: ManualClock,
}

impl Here {
    fn new(way: Way) -> Self {
        let clock = ManualClock::new();
        let tier = MemoryTier::with_clock(clock.clone());
        let places = Arc::new(Semaphore::new(2));
        Self { tier: Remote { tier, way, places, calls: Arc::default() }, clock }
    }
}

impl Host for Here {
    fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
        Box::pin(async { Arc::new(self.tier.clone()) as Arc<dyn Tier> })
    }

    fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move { self.clock.advance(by) })
    }
}

/// The suite as a user runs it: a future that may be spawned.
async fn keeps_the_contract(way: Way) {
    let _watchdog = watchdog();
    let host = Here::new(way);
    let calls = Arc::clone(&host.tier.calls);
    // A second time on the same records, as on a server that is not emptied.
    let suite = tokio::spawn(async move { [check(&host).await, check(&host).await].concat() });
    let failures = suite.await.unwrap();
    assert!(failures.is_empty(), "{way:?}: {failures:#?}");
    let calls = calls.load(Ordering::Relaxed) / 2;
    assert!(calls > 1000, "{way:?}: {calls} calls are no suite");
}

/// Over nothing else but the tier itself.
#[tokio::test]
async fn t8_the_tier_in_memory_keeps_the_contract() {
    struct Memory(MemoryTier, ManualClock);

    impl Host for Memory {
        fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
            Box::pin(async { Arc::new(self.0.clone()) as Arc<dyn Tier> })
        }

        fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
            Box::pin(async move { self.1.advance(by) })
        }
    }

    let _watchdog = watchdog();
    let clock = ManualClock::new();
    let tier = MemoryTier::with_clock(clock.clone());
    let failures = check(&Memory(tier.clone(), clock.clone())).await;
    assert!(failures.is_empty(), "{failures:#?}");
    // Whether room comes back is what the suite cannot see.
    clock.advance(DAY * 10);
    let kept = tier.len();
    assert_eq!(tier.reap(kept - 1).await.unwrap(), kept - 1);
    assert_eq!((tier.reap(kept).await.unwrap(), tier.len()), (1, 0));
}

#[tokio::test]
async fn t8_right_tiers_pass_however_their_answers_come() {
    for way in [Way::Awaits, Way::Pooled, Way::Task, Way::Eager] {
        keeps_the_contract(way).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn t8_right_tiers_pass_on_many_threads() {
    for way in [Way::Awaits, Way::Pooled, Way::Task, Way::Eager] {
        keeps_the_contract(way).await;
    }
}
