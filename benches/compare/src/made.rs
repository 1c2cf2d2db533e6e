//! How the numbers of a run were made: when, of what, on which machine.

use std::{fs, process::Command, time::Duration};

use serde::{Deserialize, Serialize};

use crate::alloc;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Made {
    /// The day, UTC.
    pub(crate) date: String,
    /// What was built, with a word if it is not what was committed.
    pub(crate) commit: String,
    pub(crate) rustc: String,
    pub(crate) quick: bool,
    pub(crate) allocator: String,
    pub(crate) cores: usize,
    pub(crate) cpu: String,
    /// Of the last level, as the system tells it.
    pub(crate) cache: String,
    pub(crate) memory_gib: f64,
    pub(crate) kernel: String,
    /// The system's setting for large pages.
    pub(crate) large_pages: String,
    pub(crate) seconds: u64,
    /// What was left out, in part or as a whole, for lack of time.
    pub(crate) left_out: Vec<String>,
}

const UNKNOWN: &str = "unknown";

impl Made {
    /// Now, by this program, on this machine.
    pub(crate) fn here(quick: bool) -> Self {
        Self {
            date: says("date", &["-u", "+%Y-%m-%d"]),
            commit: says("git", &["describe", "--always", "--dirty=, with changes", "--exclude=*"]),
            rustc: says("rustc", &["--version"]),
            quick,
            allocator: alloc::NAME.into(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            cpu: field("/proc/cpuinfo", "model name"),
            cache: field("/proc/cpuinfo", "cache size"),
            memory_gib: memory_gib(),
            kernel: line("/proc/sys/kernel/osrelease"),
            large_pages: large_pages(),
            seconds: 0,
            left_out: Vec::new(),
        }
    }

    pub(crate) fn took(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

/// What a program prints about this directory.
fn says(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    let output = command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let said = output.ok().filter(|output| output.status.success());
    said.and_then(|output| String::from_utf8(output.stdout).ok())
        .map_or_else(|| UNKNOWN.into(), |text| text.trim().into())
}

fn line(file: &str) -> String {
    fs::read_to_string(file).map_or_else(|_| UNKNOWN.into(), |text| text.trim().into())
}

/// What a file of lines `name: value` says first of `name`.
fn field(file: &str, name: &str) -> String {
    let text = line(file);
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let found = fields.find(|(found, _)| found.trim() == name);
    found.map_or_else(|| UNKNOWN.into(), |(_, value)| value.trim().into())
}

fn memory_gib() -> f64 {
    let kib = field("/proc/meminfo", "MemTotal");
    let kib = kib.trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0);
    (kib / (1 << 20) as f64 * 10.0).round() / 10.0
}

/// The one of the choices that is in brackets.
fn large_pages() -> String {
    let choices = line("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = choices.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or_else(|| UNKNOWN.into(), |(chosen, _)| chosen.into())
}

const LOCK: &str = include_str!("../../../Cargo.lock");

/// The version of a crate that this program is built with.
pub(crate) fn version(name: &str) -> Option<&'static str> {
    fn of_package(name: &str) -> impl Iterator<Item = &'static str> {
        let head = format!("name = \"{name}\"\n");
        LOCK.split("[[package]]\n").filter(move |package| package.starts_with(&head))
    }
    // Where the lock file has several versions, a dependency is listed with its own.
    let listed = of_package("compare").next()?.lines().find_map(|line| {
        let (found, version) =
            line.trim().strip_prefix('"')?.strip_suffix("\",")?.split_once(' ')?;
        (found == name).then_some(version)
    });
    let only = || of_package(name).next()?.split_once("version = \"")?.1.split_once('"');
    listed.or_else(|| only().map(|(version, _)| version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_the_lock_file() {
        let is_version = |text: &str| text.split('.').count() >= 3;
        for name in ["dashmap", "moka", "papaya", "quick_cache", "scc"] {
            assert!(version(name).is_some_and(is_version), "{name}: {:?}", version(name));
        }
        // The lock file has others too.
        assert!(version("hashbrown").unwrap().starts_with("0.17."));
        assert_eq!(version("nothing of that name"), None);
    }
}
