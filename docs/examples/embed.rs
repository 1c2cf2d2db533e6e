//! The store alone: no HTTP, no runtime, no features.
//!
//! ```text
//! cargo run --example embed
//! ```
//!
//! Eight threads are told to make the same charge, as a careless dispatcher would. One of them makes
//! it, the others wait for it, and all have the same receipt at the end.

use std::{
    error::Error,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
    time::Duration,
};

use oncekey::{Claim, Fingerprint, Identity, Outcome, Settled, Store};

type Failure = Box<dyn Error + Send + Sync>;

/// How often money has moved.
static CHARGES: AtomicUsize = AtomicUsize::new(0);

fn main() -> Result<(), Failure> {
    // Room for 100,000 keys at a time, each for a day from its completion on.
    let store = Store::builder()
        .retention(Duration::from_secs(24 * 60 * 60))
        .max_keys(100_000)
        .max_bytes(64 << 20)
        .build()?;

    let receipts: Vec<_> = thread::scope(|scope| {
        let charge = || pay(&store, "acct_42", "order-7", b"{\"amount_cents\":1200}");
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(charge)).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")?).collect()
    });
    let receipts: Vec<Outcome> = receipts.into_iter().collect::<Result<_, Failure>>()?;
    assert!(receipts.iter().all(|receipt| receipt == &receipts[0]));
    println!("{} callers, {} charge", receipts.len(), CHARGES.load(Relaxed));

    // The same key with another body is another intent by mistake, and is told so.
    let edited = pay(&store, "acct_42", "order-7", b"{\"amount_cents\":9900}");
    println!("another body: {}", edited.err().ok_or("it was charged")?);

    // Another account's key of the same name is another key.
    pay(&store, "acct_43", "order-7", b"{\"amount_cents\":1200}")?;
    println!("another account: {} charges in all", CHARGES.load(Relaxed));
    Ok(())
}

fn pay(store: &Store, account: &str, key: &str, body: &[u8]) -> Result<Outcome, Failure> {
    let id = Identity::new(account, "charge", key)?;
    let permit = match store.claim(&id, Fingerprint::request("POST", "/charges", body))? {
        Claim::Won(permit) => permit,
        Claim::Replay(replay) => return Ok(replay.into_outcome()),
        Claim::InFlight(pending) => match pending.wait_timeout(Duration::from_secs(10))? {
            Settled::Completed(replay) => return Ok(replay.into_outcome()),
            // The owner found that nothing could be done, and this caller is the next.
            Settled::Yours(permit) => permit,
            other => return Err(format!("not now: {other:?}").into()),
        },
        Claim::Mismatch => return Err("the key was used for another request".into()),
        Claim::Held => return Err("nobody knows whether it was done: ask an operator".into()),
        Claim::NotKept => return Err("it was done, but the answer was not kept".into()),
    };
    // From here on this caller owns the key. `?` would drop the permit and hold the key, which is
    // right only once money may have moved; before that say `permit.release()`.
    let number = CHARGES.fetch_add(1, Relaxed) + 1;
    let outcome = Outcome::new(201).body(format!("{{\"id\":\"ch_{number}\"}}"));
    permit.complete(outcome.clone())?;
    Ok(outcome)
}
