//! Who may still have an answer that is there.

use std::{fmt, sync::Arc};

use http::request::Parts;

use super::attempt::Caller;
use crate::Identity;

type MayReplay = dyn Fn(&Parts, Identity<'_>) -> bool + Send + Sync;

/// The setting [`may_replay`](super::Policy::may_replay).
#[derive(Clone, Default)]
pub(crate) struct Veto(Option<Arc<MayReplay>>);

impl Veto {
    pub(crate) fn of(may: impl Fn(&Parts, Identity<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(may)))
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// What has to be kept of a request for the question, if it will be asked.
    pub(crate) fn keeps(&self, parts: &Parts) -> Option<Arc<Parts>> {
        self.0.as_ref().map(|_| Arc::new(parts.clone()))
    }

    /// Whether the request may have the answer.
    pub(crate) fn allows(&self, parts: Option<&Parts>, caller: &Caller) -> bool {
        match (&self.0, parts, caller.identity()) {
            (None, ..) => true,
            (Some(may), Some(parts), Ok(identity)) => may(parts, identity),
            // Whoever set a veto is not passed over.
            (Some(_), ..) => false,
        }
    }
}

impl fmt::Debug for Veto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Fn" } else { "None" })
    }
}
