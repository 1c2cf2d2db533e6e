//! The small trait that each peer stands behind.

use std::{future::Future, pin::Pin, time::Duration};

use crate::ask::{Answer, Ask, Id, Kept};

/// What a claim is answered with, as far as the peer can tell these apart.
pub(crate) enum Met<P, K> {
    /// The caller is the owner and runs the work.
    Won(P),
    /// An owner runs.
    InFlight,
    /// The work is done.
    Replay(K),
    /// The identity is taken by an attempt with another fingerprint.
    Mismatch,
}

/// How time passes for the records of a peer.
#[derive(Clone, Copy)]
pub(crate) enum Time {
    /// As it does; nothing ends while it is measured.
    Real,
    /// By hand ([`Peer::pass`]), for peers whose records end by themselves.
    ByHand { retention: Duration },
}

/// A wait for the owner, as a task.
pub(crate) type Seat<'a, K> = Pin<Box<dyn Future<Output = Option<K>> + Send + 'a>>;

/// A store of claims and their answers.
///
/// Every peer keeps the same: the exact identity, the fingerprint, whether the owner still runs,
/// and the answer. Each does the same in the best way it has, without a limit, a lease or a clock
/// where it has none of its own.
pub(crate) trait Peer: Send + Sync + Sized + 'static {
    const NAME: &'static str;

    /// What the owner holds between claim and completion. Work takes long, so it must not be a
    /// lock or a pin of the peer.
    type Permit<'a>: Send
    where
        Self: 'a;

    type Kept: Kept + Send;

    fn new(time: Time) -> Self;

    /// Makes the caller the owner, or tells what is there; of an identity that is probably new.
    fn claim<'a>(&'a self, ask: &Ask) -> Met<Self::Permit<'a>, Self::Kept>;

    /// The same, of an identity that is probably there: peers that are faster if they only look
    /// first may do so. A favour to them, because nobody knows this in real life.
    fn meet<'a>(&'a self, ask: &Ask) -> Met<Self::Permit<'a>, Self::Kept> {
        self.claim(ask)
    }

    fn complete(&self, permit: Self::Permit<'_>, answer: Answer);

    /// Takes a record out whose time has come, for peers in which nothing ends by itself.
    fn remove(&self, id: &Id);

    /// Whether records end by themselves, by [`Peer::pass`] and [`Peer::reap`].
    const ENDS: bool = false;

    /// Lets time pass.
    fn pass(&self, _by: Duration) {}

    /// Takes out what has ended, and says how many records that were.
    fn reap(&self) -> usize {
        0
    }

    /// How many records there are, for peers that count them.
    fn keys(&self) -> Option<usize> {
        None
    }

    /// Whether duplicates can wait as threads, by [`Peer::share`].
    const WAITS: bool = false;

    /// Runs the work if nobody does, else waits for its answer.
    fn share(&self, _ask: &Ask, _work: impl FnOnce() -> Answer) -> Option<Self::Kept> {
        None
    }

    /// Whether duplicates can wait as tasks, by [`Peer::seat`].
    const SEATS: bool = false;

    /// Waits for a running owner as a task; `None` if the peer cannot, or nobody runs.
    fn seat<'a>(&'a self, _ask: &Ask) -> Option<Seat<'a, Self::Kept>> {
        None
    }
}
