//! Files that are cut off or garbled.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;

use super::*;
use crate::common::Dice;

const KEYS: u64 = 12;

fn body(number: u64) -> Outcome {
    outcome(&format!("{number}:").repeat(200 + 100 * number as usize))
}

fn copy(from: &Place) -> Place {
    let place = Place::new();
    for suffix in ["", "-wal", "-shm"] {
        fs::copy(from.beside(suffix), place.beside(suffix)).unwrap();
    }
    place
}

/// Opens a copy that was damaged and looks at all that was in it.
async fn is_whole_or_an_error(place: &Place, how: &str) -> bool {
    let pool = SqlitePoolOptions::new().connect_lazy_with(place.options());
    let Ok(tier) = SqliteTier::open(pool.clone()).await else { return false };
    let mut is_whole = true;
    for number in 0..KEYS {
        match tier.look_up(id(&format!("k{number}"))).await {
            Ok(Some(Found { state: State::Completed(found), .. })) => {
                assert_eq!(found, body(number), "{how}: other bytes");
            }
            Ok(_) => {}
            Err(_) => is_whole = false,
        }
    }
    let _ = tier.beat(OWNER, LEASE).await;
    is_whole &= tier.claim(id("new"), claim(99)).await.is_ok();
    is_whole &= tier.reap(10).await.is_ok();
    tier.close().await;
    pool.close().await;
    is_whole
}

#[tokio::test(flavor = "multi_thread")]
async fn t7_cut_and_garbled_files_are_whole_or_an_error() {
    let _watchdog = watchdog();
    let place = Place::new();
    let tier = place.open().await;
    for number in 0..KEYS {
        let key = format!("k{number}");
        won(&tier, &key, number).await;
        let body = body(number);
        let _ = tier.complete(id(&key), token(number), Some(&body), DAY).await.unwrap();
        if number == KEYS / 2 {
            // Half of it stands in the database, half in the log.
            let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
            sqlx::query(checkpoint).execute(&place.pool().await).await.unwrap();
        }
    }
    let mut dice = Dice::new(5);
    let (mut whole, mut errors) = (0, 0);
    for round in 0..90 {
        let damaged = copy(&place);
        let suffix = ["", "-wal", "-shm"][round % 3];
        let mut bytes = fs::read(damaged.beside(suffix)).unwrap();
        let at = dice.roll(bytes.len() as u64) as usize;
        let how = match dice.roll(4) {
            0 => {
                bytes.truncate(at);
                "cut"
            }
            1 => {
                bytes[at..].iter_mut().for_each(|byte| *byte = dice.roll(256) as u8);
                "garbled from there on"
            }
            2 => {
                let end = bytes.len().min(at + 4096);
                bytes[at..end].fill(0);
                "a page of zeros"
            }
            _ => {
                bytes[at] ^= 1 << dice.roll(8);
                "a bit"
            }
        };
        fs::write(damaged.beside(suffix), bytes).unwrap();
        let how = format!("round {round}, app.db{suffix} at {at}: {how}");
        let end = AssertUnwindSafe(is_whole_or_an_error(&damaged, &how)).catch_unwind().await;
        match end {
            Ok(true) => whole += 1,
            Ok(false) => errors += 1,
            Err(panic) => {
                eprintln!("{how}");
                std::panic::resume_unwind(panic)
            }
        }
    }
    assert!(whole > 5 && errors > 5, "{whole} whole, {errors} errors");
}

#[tokio::test]
async fn r16_an_outcome_that_the_disk_has_changed_is_never_replayed() {
    let _watchdog = watchdog();
    let place = Place::new();
    let tier = place.open().await;
    won(&tier, "k", 1).await;
    let kept = outcome("a").header("b", "c");
    let _ = tier.complete(id("k"), token(1), Some(&kept), DAY).await.unwrap();
    let pool = place.pool().await;
    for change in ["body = x'62'", "status = 200", "headers = x'00'", "status = NULL"] {
        let mut tx = pool.begin().await.unwrap();
        let change = format!("UPDATE idempotency_keys SET {change}");
        let change = sqlx::query(sqlx::AssertSqlSafe(change));
        change.execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        assert_unusable(tier.look_up(id("k")).await, "damaged");
        assert_unusable(tier.claim(id("k"), claim(2)).await, "damaged");
    }
}
