//! What one account may have of what all accounts share, where that was set (R25).
//!
//! Ground rules:
//!
//! 1. Without a limit for each account there is no [`Shares`] and nothing is counted.
//! 2. A count belongs to a [`Share`], which gives it back when dropped: by whoever holds it, a task
//!    that outlives its client included. So the counts are exact on every way out.
//! 3. An account that has nothing has no place here: the map is as large as the number of accounts
//!    that have something at this moment.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use parking_lot::Mutex;

use super::{attempt::Caller, layer::IdempotencyLayer};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// Owners at work.
    Tasks,
    /// Duplicates that wait.
    Waiters,
    /// Bytes of request bodies in memory.
    Buffered,
}

const KINDS: usize = 3;

/// The most that one account may have of each; `usize::MAX` where nothing was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Most([usize; KINDS]);

impl Most {
    pub(crate) const NO_LIMIT: Self = Self([usize::MAX; KINDS]);

    pub(crate) fn of(&self, of: Of) -> usize {
        self.0[of as usize]
    }

    fn set(&mut self, of: Of, most: usize) {
        self.0[of as usize] = most;
    }
}

/// For each account, so that one that asks for too much harms no other: beyond a limit its own
/// requests are refused, and those of others are not (R25). The number of its *live* keys is
/// limited by the store, which knows when they end:
/// [`StoreBuilder::max_keys_per_account`](crate::StoreBuilder::max_keys_per_account).
///
/// Replays and mismatches take nothing of these and are answered beyond the limits too. Counts are
/// exact, over all clones of a layer; as with [`max_tasks`](Self::max_tasks), setting a limit
/// starts new ones. An account that has nothing at work takes no memory.
impl IdempotencyLayer {
    /// How many keys of one account may be in flight at once; beyond it 429 with `Retry-After`.
    /// Default: no limit but [`max_tasks`](Self::max_tasks), because only the service knows what
    /// one of its accounts may do.
    #[must_use]
    pub fn max_tasks_per_account(self, tasks: usize) -> Self {
        self.most_of_each(Of::Tasks, tasks)
    }

    /// How many duplicates of one account may wait at once; beyond it 409 at once. Default: no
    /// limit but those of the store ([`max_waiters`](crate::StoreBuilder::max_waiters)).
    #[must_use]
    pub fn max_waiters_per_account(self, waiters: usize) -> Self {
        self.most_of_each(Of::Waiters, waiters)
    }

    /// How many bytes of request bodies of one account may be in memory at once; beyond it 429
    /// with `Retry-After`. Default: no limit but [`max_buffered`](Self::max_buffered).
    ///
    /// Set it to several times [`max_request`](Self::max_request): a client that sends slowly
    /// holds what it has sent.
    #[must_use]
    pub fn max_buffered_per_account(self, bytes: usize) -> Self {
        self.most_of_each(Of::Buffered, bytes)
    }

    fn most_of_each(self, of: Of, most: usize) -> Self {
        self.limits(|limits| limits.each.set(of, most))
    }
}

type Shard = HashMap<Box<[u8]>, [usize; KINDS]>;

/// What the accounts have.
pub(crate) struct Shares {
    most: Most,
    hasher: RandomState,
    shards: [Mutex<Shard>; 64],
}

impl Shares {
    /// `None` if nothing is limited.
    pub(crate) fn new(most: Most) -> Option<Arc<Self>> {
        let shards = std::array::from_fn(|_| Mutex::default());
        let made = || Arc::new(Self { most, hasher: RandomState::new(), shards });
        (most != Most::NO_LIMIT).then(made)
    }

    /// A share of nothing yet.
    pub(crate) fn open(self: &Arc<Self>, caller: &Arc<Caller>, of: Of) -> Share {
        Share { shares: Arc::clone(self), caller: Arc::clone(caller), of, amount: 0 }
    }

    /// How many accounts have anything here.
    pub(crate) fn accounts(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    fn shard(&self, account: &[u8]) -> &Mutex<Shard> {
        &self.shards[self.hasher.hash_one(account) as usize % self.shards.len()]
    }

    fn add(&self, account: &[u8], of: Of, more: usize) -> bool {
        let most = self.most.of(of);
        if most == usize::MAX {
            return true;
        }
        let mut shard = self.shard(account).lock();
        let has = shard.get(account).map_or(0, |has| has[of as usize]);
        let Some(sum) = has.checked_add(more).filter(|&sum| sum <= most) else { return false };
        match shard.get_mut(account) {
            Some(has) => has[of as usize] = sum,
            None => shard.entry(account.into()).or_default()[of as usize] = sum,
        }
        true
    }

    fn sub(&self, account: &[u8], of: Of, less: usize) {
        if self.most.of(of) == usize::MAX {
            return;
        }
        let mut shard = self.shard(account).lock();
        let Some(has) = shard.get_mut(account) else { return };
        has[of as usize] = has[of as usize].saturating_sub(less);
        if *has == [0; KINDS] {
            shard.remove(account);
            if shard.is_empty() {
                *shard = Shard::default();
            }
        }
    }
}

/// What one request has of its account's share.
pub(crate) struct Share {
    shares: Arc<Shares>,
    caller: Arc<Caller>,
    of: Of,
    amount: usize,
}

impl Share {
    /// Takes so much more; false if that is over the limit, and then nothing changed.
    pub(crate) fn grow(&mut self, more: usize) -> bool {
        let granted = more == 0 || self.shares.add(&self.caller.account, self.of, more);
        if granted {
            self.amount += more;
        }
        granted
    }

    pub(crate) fn shrink(&mut self, less: usize) {
        let less = less.min(self.amount);
        if less > 0 {
            self.amount -= less;
            self.shares.sub(&self.caller.account, self.of, less);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    fn caller(account: &str) -> Arc<Caller> {
        let (account, endpoint) = (account.as_bytes().to_vec(), String::new());
        Arc::new(Caller { account, endpoint, key: Key::new("k").unwrap() })
    }

    fn shares(tasks: usize, buffered: usize) -> Arc<Shares> {
        let mut most = Most::NO_LIMIT;
        most.set(Of::Tasks, tasks);
        most.set(Of::Buffered, buffered);
        Shares::new(most).unwrap()
    }

    #[test]
    fn r25_a_share_is_exact_and_each_account_has_its_own() {
        let shares = shares(2, 100);
        let (a, b) = (caller("a"), caller("b"));
        let take = |caller: &Arc<Caller>, of, amount| {
            let mut share = shares.open(caller, of);
            share.grow(amount).then_some(share)
        };
        let first = take(&a, Of::Tasks, 1).unwrap();
        let second = take(&a, Of::Tasks, 1).unwrap();
        assert!(take(&a, Of::Tasks, 1).is_none());
        assert!(take(&b, Of::Tasks, 2).is_some());
        let mut bytes = take(&a, Of::Buffered, 60).unwrap();
        assert!(!bytes.grow(41));
        assert!(!bytes.grow(usize::MAX));
        assert!(bytes.grow(40));
        bytes.shrink(99);
        bytes.shrink(99);
        assert!(take(&a, Of::Buffered, 101).is_none());
        assert!(take(&a, Of::Waiters, usize::MAX - 1).is_some(), "not limited, not counted");
        drop((first, bytes));
        assert!(take(&a, Of::Tasks, 1).is_some());
        assert_eq!(shares.accounts(), 1);
        drop(second);
        assert_eq!(shares.accounts(), 0, "an account that has nothing takes no memory");
    }

    #[test]
    fn r25_nothing_is_counted_where_nothing_is_limited() {
        assert!(Shares::new(Most::NO_LIMIT).is_none());
    }

    #[test]
    fn r25_threads_that_take_and_give_leave_nothing() {
        let shares = shares(3, 1_000);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let shares = &shares;
                scope.spawn(move || {
                    for n in 0..2_000_usize {
                        let of = if n % 2 == 0 { Of::Tasks } else { Of::Buffered };
                        let mut share = shares.open(&caller(["a", "b", "c"][n % 3]), of);
                        if share.grow(1 + thread % 2) && n % 5 == 0 {
                            share.grow(1);
                            share.shrink(1);
                        }
                    }
                });
            }
        });
        assert_eq!(shares.accounts(), 0);
    }
}
