//! What permits and waiters keep of their store.

use crate::{lane::Lane, reclaim::Guard, sync::Arc};

use super::Engine;

/// A lane's hold on its store. Permits and waiters count on the one of their lane: a count on the
/// store itself would be one line of memory for all of them.
#[repr(align(128))]
pub(crate) struct Hold {
    engine: Arc<Engine>,
    lane: usize,
}

impl Hold {
    pub(crate) fn new(engine: Arc<Engine>, lane: usize) -> Self {
        Self { engine, lane }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn lane(&self) -> &Lane {
        self.engine.lane(self.lane)
    }

    /// As [`Engine::approach`], in this lane.
    #[inline]
    pub(crate) fn approach(&self, hash: u64) -> Guard<'_> {
        self.engine.approach(self.lane, hash)
    }
}
