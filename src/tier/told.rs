//! What was forgotten or resolved, for those in this process that ask (rule 13).

use std::collections::VecDeque;

use super::Recalls;
use crate::Identity;

/// How long it is told, in milliseconds.
const TOLD: u64 = 5 * 60 * 1000;

/// The identities that were forgotten or resolved of late, by numbers.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// Each with its time.
    identities: VecDeque<(u64, [Vec<u8>; 3])>,
    /// The number of the first of them.
    first: u64,
}

impl Told {
    pub(crate) fn tell(&mut self, id: Identity<'_>, now: u64) {
        while self.identities.front().is_some_and(|(at, _)| at.saturating_add(TOLD) < now) {
            self.identities.pop_front();
            self.first += 1;
        }
        self.identities.push_back((now, name(id)));
    }

    pub(crate) fn since(&self, since: Option<u64>) -> Recalls {
        let now = self.first + self.identities.len() as u64;
        let skipped = since.unwrap_or(now).clamp(self.first, now) - self.first;
        let identities = self.identities.iter().skip(skipped as usize);
        Recalls { now, identities: identities.map(|(_, name)| name.clone()).collect() }
    }
}

/// Account, endpoint and key.
pub(crate) fn name(id: Identity<'_>) -> [Vec<u8>; 3] {
    [id.account(), id.endpoint(), id.key()].map(<[u8]>::to_vec)
}
