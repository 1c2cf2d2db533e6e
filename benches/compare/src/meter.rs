//! Reads what the operating system knows of this process, this thread and the machine: cpu, memory,
//! preemption, stops by the host of a virtual machine.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    time::{Duration, Instant},
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
    ran: u64,
    waited: u64,
    switches: i64,
    sleeps: i64,
}

/// How a thread was interrupted since the last look.
#[derive(Clone, Copy)]
pub(crate) struct Interruption {
    /// Whether the thread was taken off its core against its will.
    pub(crate) preempted: bool,
    /// For how long it wanted to run and had no core; `None` if the kernel does not say.
    pub(crate) waited: Option<Duration>,
    /// For how long it ran, if it did nothing else than that and wanting to: it did not sleep, for a
    /// lock for instance. On a virtual machine that is told of stops by its host, without those.
    pub(crate) ran: Option<Duration>,
}

impl Preemption {
    /// Of the calling thread; to be used by it only.
    pub(crate) fn of_this_thread() -> Self {
        let schedstat = File::open("/proc/thread-self/schedstat").ok();
        let mut this = Self { schedstat, ran: 0, waited: 0, switches: 0, sleeps: 0 };
        this.look();
        this
    }

    pub(crate) fn look(&mut self) -> Interruption {
        let usage = usage(UsageWho::RUSAGE_THREAD);
        let switches = usage.involuntary_context_switches();
        let sleeps = usage.voluntary_context_switches();
        let read = self.read();
        let (ran, waited) = read.unwrap_or((0, 0));
        let since = |now, before| Duration::from_nanos(now - before);
        let interruption = Interruption {
            preempted: switches > self.switches,
            waited: read.map(|_| since(waited, self.waited)),
            ran: read.filter(|_| sleeps == self.sleeps).map(|_| since(ran, self.ran)),
        };
        *self = Self { schedstat: self.schedstat.take(), ran, waited, switches, sleeps };
        interruption
    }

    /// For how long the thread ran, and for how long it wanted to.
    fn read(&self) -> Option<(u64, u64)> {
        let mut text = [0; 64];
        let len = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
        let mut fields = std::str::from_utf8(&text[..len]).ok()?.split(' ');
        let mut field = || fields.next()?.parse().ok();
        Some((field()?, field()?))
    }
}

/// How long the host of a virtual machine had its cores for others: `steal` in `/proc/stat`.
///
/// A machine that is stopped does not notice: no thread loses its core, only the clock goes on. The
/// system tells of it afterwards in steps of [`Steal::STEP`], so what is told is right on average, and
/// may be a step too much or too little each time. It is told of cores, not of threads.
pub(crate) struct Steal {
    stat: Option<File>,
    /// What was told of each core when it was last read, and when that was.
    seen: Vec<Duration>,
    read: Instant,
}

impl Steal {
    /// `USER_HZ` is 100 on every machine that this runs on.
    const STEP: Duration = Duration::from_millis(10);

    pub(crate) fn new() -> Self {
        let stat = File::open("/proc/stat").ok();
        let mut this = Self { stat, seen: Vec::new(), read: Instant::now() };
        this.look(Instant::now());
        this
    }

    /// When the last look was.
    pub(crate) fn read(&self) -> Instant {
        self.read
    }

    /// For how long a core was gone since the last look; of the one that was gone longest, because
    /// a thread may have waited for one on another core, and all are stopped at once.
    pub(crate) fn look(&mut self, now: Instant) -> Duration {
        let mut text = [0; 4096];
        let len = self.stat.as_ref().and_then(|stat| stat.read_at(&mut text, 0).ok()).unwrap_or(0);
        let seen = stolen(&String::from_utf8_lossy(&text[..len]));
        let longest = longest(&self.seen, &seen);
        self.seen = seen;
        self.read = now;
        longest
    }
}

/// The stolen time of each core, by `/proc/stat`.
fn stolen(stat: &str) -> Vec<Duration> {
    let of_core = |line: &str| {
        // `cpu` alone is the sum of all. Behind the name: user, nice, system, idle, iowait, irq,
        // softirq, steal.
        let fields = line.strip_prefix("cpu").filter(|rest| !rest.starts_with(' '))?;
        let steps = fields.split_ascii_whitespace().nth(8)?.parse::<u32>().ok()?;
        Some(Steal::STEP * steps)
    };
    stat.lines().filter_map(of_core).collect()
}

fn longest(before: &[Duration], now: &[Duration]) -> Duration {
    let grown = now.iter().zip(before).map(|(now, before)| now.saturating_sub(*before));
    grown.max().unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "\
cpu  34046 41790 15699 1544801 572 0 174 73 0 0
cpu0 16934 20906 7450 772975 86 0 58 32 0 0
cpu1 17112 20884 8249 771825 486 0 115 40 5 6
intr 1 2 3 4 5 6 7 8 9
cpufreq
";

    #[test]
    fn what_a_thread_ran_is_told_unless_it_slept() {
        let mut preemption = Preemption::of_this_thread();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(20) {}
        let ran = preemption.look().ran.expect("it did not sleep");
        assert!(ran > Duration::ZERO && ran <= start.elapsed());
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(preemption.look().ran, None);
    }

    #[test]
    fn stolen_time_is_read_of_each_core_and_not_of_their_sum() {
        let cores = [320, 400].map(Duration::from_millis);
        assert_eq!(stolen(STAT), cores);
        // An old kernel does not say, and this one does.
        assert_eq!(stolen("cpu 1 2 3 4\ncpu0 1 2 3 4\n"), []);
        assert!(!Steal::new().seen.is_empty());
    }

    #[test]
    fn the_core_that_was_gone_longest_counts_and_no_core_twice() {
        let ms = Duration::from_millis;
        let before = stolen(STAT);
        assert_eq!(longest(&before, &before), ms(0));
        assert_eq!(longest(&before, &[ms(350), ms(420)]), ms(30));
        // A core has come, or a count has gone back as that of waiting for disks may.
        assert_eq!(longest(&before[..1], &[ms(310), ms(420)]), ms(0));
    }
}
