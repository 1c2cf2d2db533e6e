//! The words and tables of the report.

use crate::{
    made::{self, Made},
    peers::OURS,
    results::Results,
};

use super::{
    shown,
    spec::{Panel, Section},
};

pub(super) fn text(made: &Made, results: &Results, sections: &[&Section]) -> String {
    let mut text = how(made);
    for section in sections {
        let Section { name, title, text: words, panels, .. } = section;
        text += &format!("\n### {title}\n\n{words}\n\n![{title}](plots/{name}.svg)\n");
        for panel in panels.iter().filter(|panel| panel.is_measured(results)) {
            text += &table(panel, results);
        }
    }
    text
}

fn how(made: &Made) -> String {
    let Made { date, commit, rustc, allocator, cores, cpu, cache, memory_gib, kernel, .. } = made;
    let Made { large_pages, quick, left_out, .. } = made;
    let minutes = match made.seconds.div_ceil(60) {
        1 => "a minute".into(),
        minutes => format!("{minutes} minutes"),
    };
    let versions: Vec<String> = shown()
        .filter_map(|peer| {
            let name = if peer == "64 x Mutex" { "hashbrown" } else { peer };
            made::version(name).map(|version| format!("{name} {version}"))
        })
        .collect();
    let versions = versions.join(", ");
    let size = if *quick {
        "A **quick** run with small sizes: the numbers stated as sizes below do not hold for it. "
    } else {
        ""
    };
    let left_out = if left_out.is_empty() {
        String::new()
    } else {
        format!(" There was no time for all of: {}.", left_out.join(", "))
    };
    format!(
        "\
{size}Measured on {date}, commit {commit}, in {minutes}.

| | |
|---|---|
| machine | {cpu}, {cores} cores, {cache} of cache, {memory_gib} GiB of memory |
| system | Linux {kernel}, large pages: {large_pages}, allocator: {allocator} |
| compiler | {rustc}, release |
| stores | {versions}; 64 x Mutex is 64 mutexes (parking_lot) around hashbrown |

<!-- not run: 25 minutes on a machine that does nothing else; `--quick` takes one -->
```sh
cargo run --release -p compare -- --report docs --json >target/compare.json
```

The report alone, from what was measured before:

<!-- not run: needs that file -->
```sh
cargo run --release -p compare -- --from target/compare.json --report docs
```

Method: all stores keep the same (identity, fingerprint, whether the owner runs, answer), each in the
best way it has; the file of each in `benches/compare/src/peers` says how. Passes of the stores take
turns, each in a process of its own, which has touched and given back 2 GiB before it fills a store. Shown
is the median of the passes and, in brackets and as thin lines, the lowest and the highest: that is the noise. What lies closer together
than that is not told apart. Without brackets it was one pass.{left_out}

From the time of a single operation that was slow is subtracted, for every store alike, what says nothing about
a store. If its thread did not sleep, what counts is for how long it ran (`schedstat`), which on a virtual machine
is without the stops by its host. If it slept, for instance because it waited for a lock, what is subtracted is for
how long it wanted a core and had none or, if that is longer, for how long the host had one of the machine's cores
for others meanwhile (steal in `/proc/stat`). Steal is told in steps of 10 ms, and what was read last before the
operation may be 5 ms old; so such an operation may have a step too much or too little taken off. That the thread
for whose lock it waited had no core is not subtracted.
"
    )
}

fn table(panel: &Panel, results: &Results) -> String {
    let Panel { title, across, unit, lines, .. } = panel;
    let mut text = String::new();
    for line in *lines {
        let measured = |peer| line.places.iter().find_map(|place| place.of(results, peer));
        let Some(passes) = shown().filter_map(measured).map(|row| row.passes()).max() else {
            continue;
        };
        let passes = if passes == 1 { "1 pass".into() } else { format!("{passes} passes") };
        let name = if line.name.is_empty() { String::new() } else { format!(", {}", line.name) };
        let places: Vec<_> = line
            .places
            .iter()
            .filter(|place| shown().any(|peer| place.of(results, peer).is_some()))
            .collect();
        let heads: Vec<_> = places.iter().map(|place| place.name).collect();
        text += &format!("\n{title}{name}; {}, by {across} ({passes}):\n\n", unit.name());
        text += &format!("| | {} |\n|---|{}\n", heads.join(" | "), "---|".repeat(heads.len()));
        for peer in shown().filter(|peer| measured(peer).is_some()) {
            let name = if peer == OURS { format!("**{peer}**") } else { peer.into() };
            let cell = |place: &&super::spec::Place| {
                let Some(row) = place.of(results, peer) else { return "-".into() };
                let shown = unit.shown(row);
                let median = unit.text(shown.median);
                if row.passes() == 1 {
                    return median;
                }
                format!("{median} ({})", unit.range(shown.low, shown.high))
            };
            let cells: Vec<String> = places.iter().map(cell).collect();
            text += &format!("| {name} | {} |\n", cells.join(" | "));
        }
    }
    text
}
