//! What every tier owes.

use std::{future::Future, pin::Pin, sync::Arc};

use oncekey::tier::conformance::{Host, check};

use super::*;

struct OneFile {
    place: Place,
    clock: ManualClock,
    /// The tier is open all the time, so that no node finds itself alone.
    _first: SqliteTier,
}

impl Host for OneFile {
    fn node(&self) -> Pin<Box<dyn Future<Output = Arc<dyn Tier>> + Send + '_>> {
        Box::pin(async { Arc::new(self.place.open_at(&self.clock).await) as Arc<dyn Tier> })
    }

    fn advance(&self, by: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move { self.clock.advance(by) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t8_the_tier_in_sqlite_keeps_the_contract() {
    let _watchdog = watchdog();
    let (place, clock) = (Place::new(), ManualClock::new());
    let host = OneFile { _first: place.open_at(&clock).await, place, clock };
    let failures = check(&host).await;
    assert!(failures.is_empty(), "{failures:#?}");
}
