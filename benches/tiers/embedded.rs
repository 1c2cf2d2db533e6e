//! The embedded tier, at both of its levels.

use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    time::{Duration, Instant},
};

use oncekey::tier::{Durability, EmbeddedTier, Tier as _};

use crate::load::{DAY, Directory, Settings, look, pair, pass, report};

pub async fn measure(settings: &Settings) {
    println!("syncs of one file         {:>9.0} a second", syncs());
    for (name, level) in [
        ("embedded, killed process", Durability::KilledProcess),
        ("embedded, power loss", Durability::PowerLoss),
    ] {
        let directory = Directory::new();
        let tier = EmbeddedTier::builder(directory.path().join("tier")).durability(level);
        let tier = tier.open().unwrap();
        tier.beat(1, DAY).await.unwrap();
        let of_pairs = tier.clone();
        let pairs = move |number| {
            let tier = of_pairs.clone();
            async move { pair(&tier, number).await }
        };
        let written = pass(settings, 0, pairs).await;
        report(name, "pairs", &written);
        let looks = move |number| {
            let tier = tier.clone();
            async move { look(&tier, number, written.done).await }
        };
        report(name, "look-ups", &pass(settings, 0, looks).await);
    }
}

/// What the disk gives: a block that is overwritten and synced, again and again.
fn syncs() -> f64 {
    let directory = Directory::new();
    let mut file = fs::File::create(directory.path().join("block")).unwrap();
    let (begun, mut syncs) = (Instant::now(), 0);
    while begun.elapsed() < Duration::from_secs(1) {
        file.seek(SeekFrom::Start(0)).unwrap();
        file.write_all(&[7; 4_096]).unwrap();
        file.sync_data().unwrap();
        syncs += 1;
    }
    f64::from(syncs) / begun.elapsed().as_secs_f64()
}
