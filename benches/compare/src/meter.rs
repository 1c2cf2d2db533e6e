//! Reads what the operating system knows of this process and thread: cpu, memory, preemption.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    time::Duration,
};

use memmap2::{Advice, MmapMut};
use nix::sys::resource::{Usage, UsageWho, getrusage};

fn usage(who: UsageWho) -> Usage {
    getrusage(who).expect("getrusage knows itself")
}

fn cpu(usage: &Usage) -> Duration {
    let micros = |time: nix::sys::time::TimeVal| {
        Duration::new(time.tv_sec().cast_unsigned(), time.tv_usec() as u32 * 1_000)
    };
    micros(usage.user_time()) + micros(usage.system_time())
}

/// The cpu time of all threads of the process, ended ones too.
pub(crate) fn process_cpu() -> Duration {
    cpu(&usage(UsageWho::RUSAGE_SELF))
}

/// The cpu time of this thread.
pub(crate) fn thread_cpu() -> Duration {
    cpu(&usage(UsageWho::RUSAGE_THREAD))
}

/// Touches as much memory and gives it back to the system.
///
/// A virtual machine's host may have to find each page that the guest has not used for a while, at
/// a cost of a hundred times what the guest itself does for a new page, and differently from pass to
/// pass. Afterwards a peer pays what it would pay on a machine of its own.
pub(crate) fn touch_memory(bytes: usize) {
    let mut memory = MmapMut::map_anon(bytes).expect("so much memory");
    // If the system has no large pages, small ones do as well.
    let _ = memory.advise(Advice::HugePage);
    memory.chunks_mut(4096).for_each(|page| page[0] = 1);
}

/// Bytes of this process that are in memory. From `smaps_rollup`, which walks the pages: the counts
/// of `statm` lag behind by some hundred KiB, more than an empty store has.
pub(crate) fn resident() -> usize {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").expect("Linux 4.14 or later");
    let line = rollup.lines().find_map(|line| line.strip_prefix("Rss:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kib.expect("a line `Rss: ... kB`") * 1024
}

/// Whether this thread lost its core, and for how long.
///
/// Reading costs a microsecond or two, so it is read at the start of a chunk of operations and
/// after an operation that was slow: a short one was not interrupted by another thread.
pub(crate) struct Preemption {
    /// Cpu time, time on the run queue without a core, slices; of this thread. Not every kernel
    /// has it.
    schedstat: Option<File>,
    waited: u64,
    switches: i64,
}

/// How a thread was interrupted since the last look.
#[derive(Clone, Copy)]
pub(crate) struct Interruption {
    /// Whether the thread was taken off its core against its will.
    pub(crate) preempted: bool,
    /// For how long it wanted to run and had no core; `None` if the kernel does not say.
    pub(crate) waited: Option<Duration>,
}

impl Preemption {
    /// Of the calling thread; to be used by it only.
    pub(crate) fn of_this_thread() -> Self {
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        let mut this = Self { schedstat, waited: 0, switches: 0 };
        this.look();
        this
    }

    pub(crate) fn look(&mut self) -> Interruption {
        let switches = usage(UsageWho::RUSAGE_THREAD).involuntary_context_switches();
        let waited = self.read_waited();
        let interruption = Interruption {
            preempted: switches > self.switches,
            waited: waited.map(|now| Duration::from_nanos(now - self.waited)),
        };
        self.switches = switches;
        self.waited = waited.unwrap_or(0);
        interruption
    }

    fn read_waited(&self) -> Option<u64> {
        let mut text = [0; 64];
        let len = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text[..len]).ok()?.split(' ').nth(1)?.parse().ok()
    }
}
