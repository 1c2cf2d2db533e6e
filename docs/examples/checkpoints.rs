//! A charge made of three foreign calls that survives a crash between any two of them.
//!
//! ```text
//! cargo run --example checkpoints --features embedded
//! ```
//!
//! After each call the worker leaves a checkpoint with its key. Whoever takes the key over after a
//! crash begins behind the last one. The example runs itself as a child that crashes at each place in
//! turn, then once more without a crash, and looks at what the "foreign services" were told: a file
//! with a line for each call.
//!
//! A crash may come after a call and before its checkpoint: then that call is made once more. So each
//! call carries a key of its own, made of the intent's key and the step's name, by which the foreign
//! service knows it again, as this one here does.

use std::{
    error::Error,
    fs::{self, OpenOptions},
    io::Write as _,
    path::Path,
    process::Command,
};

use oncekey::{
    Fingerprint, Identity, Lapse, Outcome, Store,
    tier::{EmbeddedTier, Tiered, TieredClaim, TieredPermit},
};

const STEPS: [&str; 3] = ["reserve", "capture", "book"];

/// Where the child crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Crash {
    Never,
    /// Behind the call of this step, before its checkpoint.
    BeforeCheckpoint(usize),
    /// Behind its checkpoint.
    AfterCheckpoint(usize),
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [directory, place, step] = &arguments[..] {
        let step = step.parse()?;
        let crash = match place.as_str() {
            "before" => Crash::BeforeCheckpoint(step),
            "after" => Crash::AfterCheckpoint(step),
            _ => Crash::Never,
        };
        return charge(Path::new(directory), crash).await;
    }
    let directory = std::env::temp_dir().join(format!("oncekey-steps-{}", std::process::id()));
    let child = |place: &str, step: usize| {
        let mut child = Command::new(std::env::current_exe()?);
        child.arg(&directory).arg(place).arg(step.to_string()).status()
    };
    for (step, stopped) in STEPS.iter().enumerate() {
        for place in ["before", "after"] {
            fs::create_dir_all(&directory)?;
            assert!(!child(place, step)?.success(), "it was to crash");
            assert!(child("never", 0)?.success(), "the next one goes on");
            let told = fs::read_to_string(directory.join("calls"))?;
            let made = |name: &str| told.lines().filter(|line| *line == name).count();
            for (n, name) in STEPS.iter().enumerate() {
                // Asked again only for the one call that may or may not have been made.
                let again = usize::from(place == "before" && n == step);
                assert_eq!(made(&format!("made {name}")), 1, "{told}");
                assert_eq!(made(&format!("known {name}")), again, "{told}");
            }
            println!("crashed {place} the checkpoint of {stopped}: each call was made once");
            fs::remove_dir_all(&directory)?;
        }
    }
    Ok(())
}

/// What a worker does with a message.
async fn charge(directory: &Path, crash: Crash) -> Result<(), Box<dyn Error>> {
    let tier = EmbeddedTier::open(directory.join("keys"))?;
    // Taking over is right here: the work goes on where it stopped.
    let store = Tiered::open(Store::builder().build()?, tier, Lapse::TakeOver).await?;
    let id = Identity::new("acct_42", "charge", "invoice-7")?;
    let fingerprint = Fingerprint::request("POST", "/charge", b"{\"invoice\":7}");
    match store.claim(&id, fingerprint).await? {
        TieredClaim::Won(permit) => run(directory, permit, crash).await,
        TieredClaim::Replay(_) => Ok(()),
        other => Err(format!("not now: {other:?}").into()),
    }
}

async fn run(
    directory: &Path,
    mut permit: TieredPermit,
    crash: Crash,
) -> Result<(), Box<dyn Error>> {
    // How many steps are done.
    let done = permit.take_checkpoint().and_then(|bytes| bytes.first().copied()).unwrap_or(0);
    for (n, step) in STEPS.iter().enumerate().skip(usize::from(done)) {
        call(directory, step)?;
        if crash == Crash::BeforeCheckpoint(n) {
            std::process::abort();
        }
        if !permit.checkpoint(vec![n as u8 + 1]).await? {
            return Err("somebody else goes on with it".into());
        }
        if crash == Crash::AfterCheckpoint(n) {
            std::process::abort();
        }
    }
    permit.complete(Outcome::new(200).body("charged")).await?;
    Ok(())
}

/// A foreign service that knows its keys: a step's name stands for `invoice-7/step`.
fn call(directory: &Path, step: &str) -> Result<(), Box<dyn Error>> {
    let file = directory.join("calls");
    let known = fs::read_to_string(&file).unwrap_or_default();
    let was_made = known.lines().any(|line| line == format!("made {step}"));
    let mut file = OpenOptions::new().create(true).append(true).open(file)?;
    writeln!(file, "{} {step}", if was_made { "known" } else { "made" })?;
    Ok(())
}
