//! What the peers have to do. One file for each work; each pass of a peer runs in a process of its
//! own, so that no peer inherits the memory, the threads or the heat of another.

mod empty;
mod hot;
mod new;
mod replay;
mod resident;
mod single;
mod steady;
mod storm;
mod wake;

use crate::{
    ask::{Answer, Ask},
    meter,
    peer::{Met, Peer, Time},
    peers::{self, Contestant},
    sample::Sample,
};

/// The numbers of threads: alone, one on each core of a small machine, many more than cores.
const THREADS: [usize; 3] = [1, 2, 16];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Claim and complete new keys, from an empty store.
    New,
    /// The same, each operation timed by itself.
    Single,
    /// New keys come, the oldest end, the number stays.
    Steady,
    /// Losing claims on one key whose owner runs.
    Hot,
    /// Answers of 200 bytes handed back.
    Replay,
    /// Claims while very many records end at once.
    Storm,
    /// Memory of completed keys.
    Resident,
    /// Memory of a store without keys.
    Empty,
    /// Waking 100 waiters.
    Wake,
}

impl Work {
    pub(crate) const ALL: [Self; 9] = [
        Self::New,
        Self::Single,
        Self::Steady,
        Self::Hot,
        Self::Replay,
        Self::Storm,
        Self::Resident,
        Self::Empty,
        Self::Wake,
    ];

    /// As it is named on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Single => "single",
            Self::Steady => "steady",
            Self::Hot => "hot",
            Self::Replay => "replay",
            Self::Storm => "storm",
            Self::Resident => "resident",
            Self::Empty => "empty",
            Self::Wake => "wake",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|work| work.name() == name)
    }

    /// The numbers of threads that need a process each: memory that one fill has touched would
    /// make the next one faster. The others do all in one process, `0`.
    pub(crate) fn variants(self) -> &'static [usize] {
        match self {
            Self::New | Self::Single => &THREADS,
            _ => &[0],
        }
    }

    /// Whether `peer` takes part.
    pub(crate) fn has(self, peer: &Contestant, quick: bool) -> bool {
        match self {
            // It would take half of the time of a quick run, and no figure of the bar is about it.
            Self::Single | Self::Steady if quick && peer.name == "moka" => false,
            Self::New => true,
            Self::Wake => peer.waits || peer.seats,
            // The others would have to keep a list of what to take out.
            Self::Storm => ["oncekey", "first core", "dashmap"].contains(&peer.name),
            _ => peer.name != peers::NOTHING,
        }
    }

    /// How many passes there are, if nobody says otherwise. Memory does not vary from pass to pass,
    /// and filling a store with ten million keys takes long.
    pub(crate) fn passes(self) -> usize {
        match self {
            Self::Resident => 1,
            _ => 5,
        }
    }

    /// Of the time of a run, the part for this work, in hundredths.
    pub(crate) fn share(self, quick: bool) -> u32 {
        match self {
            Self::New if quick => 27,
            Self::New => 24,
            Self::Single if quick => 18,
            Self::Single => 24,
            Self::Steady if quick => 17,
            Self::Steady => 18,
            Self::Hot => 4,
            Self::Replay if quick => 14,
            Self::Replay => 14,
            Self::Storm => 4,
            Self::Resident => 8,
            Self::Empty => 2,
            Self::Wake => 2,
        }
    }
}

/// Does one pass of `work` in this process.
pub(crate) fn pass<P: Peer>(work: Work, quick: bool, threads: usize) -> Vec<Sample> {
    if matches!(work, Work::New | Work::Single) {
        meter::touch_memory(if quick { 256 << 20 } else { 2 << 30 });
    }
    match work {
        Work::New => new::pass::<P>(quick, threads),
        Work::Single => single::pass::<P>(quick, threads),
        Work::Steady => steady::pass::<P>(quick),
        Work::Hot => hot::pass::<P>(quick),
        Work::Replay => replay::pass::<P>(quick),
        Work::Storm => storm::pass::<P>(quick),
        Work::Resident => resident::pass::<P>(quick),
        Work::Empty => empty::pass::<P>(),
        Work::Wake => wake::pass::<P>(quick),
    }
}

/// A peer that is never taken apart: the process ends anyway, and millions of frees take long.
fn leaked<P: Peer>(time: Time) -> &'static P {
    Box::leak(Box::new(P::new(time)))
}

/// Claims and completes one new key.
fn run_once<P: Peer>(peer: &P, ask: &Ask, answer: Answer) {
    match peer.claim(ask) {
        Met::Won(permit) => peer.complete(permit, answer),
        _ => panic!("{}: a new key was not won", P::NAME),
    }
}

/// The keys that fall to one of several threads, of those below `keys`.
fn part(keys: u64, thread: usize, threads: usize) -> std::ops::Range<u64> {
    let (thread, threads) = (thread as u64, threads as u64);
    keys * thread / threads..keys * (thread + 1) / threads
}
