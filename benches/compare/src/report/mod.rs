//! The results as a page of documentation with drawings: `benchmarks.md` and `plots/*.svg`.
//!
//! Of the page it writes what stands between two marks; all other words on it were written by hand
//! and are kept.

mod page;
mod plot;
mod spec;

use std::{fs, io, path::Path};

use crate::{
    made::Made,
    peers::{self, NOTHING},
    results::Results,
};

use spec::SECTIONS;

const BEGIN: &str = "<!-- begin: written by `compare --report` -->\n";
const END: &str = "<!-- end: written by `compare --report` -->\n";

/// Whether the report shows this peer: it shows what a reader could take instead.
pub(crate) fn shows(peer: &str) -> bool {
    ![NOTHING, "first core"].contains(&peer)
}

fn shown() -> impl Iterator<Item = &'static str> {
    peers::ALL.iter().map(|peer| peer.name).filter(|peer| shows(peer))
}

/// Writes the page and its drawings into `dir`.
pub(crate) fn write(made: &Made, results: &Results, dir: &Path) -> io::Result<()> {
    let plots = dir.join("plots");
    fs::create_dir_all(&plots)?;
    let mut sections = Vec::new();
    for section in &SECTIONS {
        let file = plots.join(format!("{}.svg", section.name));
        // A drawing of an earlier run would not belong to the page.
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if section.panels.iter().any(|panel| panel.is_measured(results)) {
            fs::write(&file, plot::svg(section, results)?)?;
            sections.push(section);
        }
    }
    let page = dir.join("benchmarks.md");
    let before = match fs::read_to_string(&page) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            format!("# Benchmarks\n\n{BEGIN}{END}")
        }
        before => before?,
    };
    fs::write(&page, put_between(&before, &page::text(made, results, &sections))?)
}

/// `page` with `text` between the marks.
fn put_between(page: &str, text: &str) -> io::Result<String> {
    let parts = page.split_once(BEGIN).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(END)?;
        Some((before, after))
    });
    let no_marks =
        || io::Error::other("benchmarks.md has lost the marks `<!-- begin` and `<!-- end`");
    let (before, after) = parts.ok_or_else(no_marks)?;
    Ok(format!("{before}{BEGIN}\n{text}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use crate::{peers::OURS, sample::Sample};

    use super::{
        spec::{Line, Place},
        *,
    };

    fn all_places() -> impl Iterator<Item = &'static Place> {
        let panels = SECTIONS.iter().flat_map(|section| section.panels);
        panels.flat_map(|panel| panel.lines).flat_map(|line: &Line| line.places)
    }

    #[test]
    fn words_written_by_hand_are_kept_and_nothing_of_an_earlier_run_is() {
        let dir = std::env::temp_dir().join(format!("compare-report-{}", std::process::id()));
        let mut results = Results::default();
        for Place { work, threads, metric, .. } in all_places() {
            for (pass, value) in [(0, 900.0), (1, 1_100.0), (2, 1_000.0)] {
                results.add(pass, OURS, Sample::new(work, *threads, *metric, value));
                results.add(pass, "moka", Sample::new(work, *threads, *metric, value * 7.0));
            }
        }
        let made = Made { commit: "one".into(), ..Made::here(false) };
        write(&made, &results, &dir).unwrap();
        let page = dir.join("benchmarks.md");
        let first = fs::read_to_string(&page).unwrap();
        assert!(first.contains("commit one"), "{first}");
        assert!(first.contains("| **oncekey** | 1.00 (0.91 to 1.11) |"), "{first}");
        for section in &SECTIONS {
            let name = section.name;
            let svg = fs::read_to_string(dir.join(format!("plots/{name}.svg"))).unwrap();
            assert!(svg.contains("moka") && svg.contains(section.title), "{name}");
            assert!(first.contains(&format!("](plots/{name}.svg)")), "{name}");
        }

        fs::write(&page, format!("above\n{first}below\n")).unwrap();
        let mut fewer = Results::default();
        let hot = |value| Sample::new("hot", 2, crate::sample::Metric::CpuNs, value);
        fewer.add(0, OURS, hot(80.0));
        write(&Made { commit: "two".into(), ..made }, &fewer, &dir).unwrap();
        let second = fs::read_to_string(&page).unwrap();
        assert!(second.starts_with("above\n") && second.ends_with("below\n"), "{second}");
        assert!(second.contains("commit two") && !second.contains("commit one"), "{second}");
        assert!(second.contains("plots/hot.svg") && !second.contains("plots/latency.svg"));
        assert!(!dir.join("plots/latency.svg").exists() && dir.join("plots/hot.svg").exists());

        fs::write(&page, "all by hand").unwrap();
        assert!(write(&Made::here(false), &fewer, &dir).is_err());
        assert_eq!(fs::read_to_string(&page).unwrap(), "all by hand");
        fs::remove_dir_all(dir).unwrap();
    }
}
