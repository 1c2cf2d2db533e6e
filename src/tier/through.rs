//! How memory and tier agree: what happens between a claim that was won in memory and the work.
//!
//! Ground rules:
//!
//! 1. The memory comes first. Whoever wins there is the one local caller that asks the tier, while
//!    all others wait in memory; a replay from memory asks nobody.
//! 2. Nothing runs before its claim is in the tier, and nobody is told of an outcome before it is
//!    there (T1). What the tier could not be told is told again until it lands or is lost.
//! 3. What the tier says of other nodes' work is put into memory for no longer than the tier keeps
//!    it; that nothing is there is never kept (T9).
//! 4. Whoever loses its claim on the way, because its future is dropped, leaves a guard that gives
//!    the identity up in memory and in the tier (T4).
//! 5. The lease is reckoned from before the heartbeat was sent (T1).
//!
//! ```text
//! won in memory --claim--> won          -> the work runs, its outcome lands, memory publishes it
//!                      '-> completed    -> into memory, and to all that wait
//!                      '-> in flight    -> a watcher keeps the permit until it is settled there
//!                      '-> lapsed       -> taken over, or held, by the setting (R10)
//!                      '-> mismatch ..  -> given up in memory, told to the caller
//! ```

use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use backon::{ExponentialBuilder, Retryable};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::{
    Answer, Claimed, Found, Landed, NewClaim, State, Tier, TierError, circuit::Circuit,
    owned::Owned, stats::Counters,
};
use crate::{
    Abandon, Completed, EntryState, Fingerprint, Identity, Lapse, Outcome, Permit, Replay, Scheme,
    Store, Token, identity::Frame,
};

/// How often a takeover or a claim is tried again that another node was faster with.
const TRIES: usize = 8;

/// How long memory answers "outcome unknown" for an identity that the tier holds, without asking.
const HELD: Duration = Duration::from_secs(1);

/// When to look again whether a claim of another has got to the tier.
const ON_ITS_WAY: Duration = Duration::from_millis(20);

/// When a claim that was not answered is looked for again, after it was not there: a connection that
/// was given up may deliver it late. Later than that it is held when its `max_run` ends.
const LATE: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];

/// The settings of a [`Tiered`](super::Tiered).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) on_lapse: Lapse,
    pub(crate) on_abandon: Abandon,
    pub(crate) lease: Duration,
    pub(crate) max_run: Duration,
    pub(crate) retention: Duration,
    pub(crate) answer_within: Duration,
    pub(crate) poll_every: Duration,
    pub(crate) fail_open: bool,
    pub(crate) max_unwritten: usize,
}

/// What all handles of a tiered store share.
pub(crate) struct Through {
    pub(crate) store: Store,
    pub(crate) tier: Arc<dyn Tier>,
    pub(crate) settings: Settings,
    /// Random for each opening (R9).
    owner: u64,
    /// The last number given to a claim.
    number: AtomicU64,
    /// Until when the tier takes this owner for alive, by this process's own reckoning.
    alive_until: Mutex<Option<Instant>>,
    pub(crate) circuit: Circuit,
    pub(crate) counters: Counters,
    /// Steps that the tier has still to be told.
    pub(crate) unwritten: AtomicUsize,
    /// Where it was opened: what is left to the background runs there, whoever leaves it.
    pub(crate) runtime: tokio::runtime::Handle,
}

/// Shows no number of a claim and no outcome.
impl fmt::Debug for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Through").field("tier", &self.tier).finish_non_exhaustive()
    }
}

/// What came of a claim that was won in memory.
#[derive(Debug)]
pub(crate) enum Entered {
    /// The caller runs the work.
    Yours(Owned),
    Replay(Replay),
    NotKept,
    Mismatch,
    Held,
    /// Another node runs it. A watcher keeps the memory's permit: claim in memory, and wait there.
    Elsewhere,
    /// The tier did not answer. Nothing runs.
    Unavailable {
        error: TierError,
        retry_after: Duration,
    },
}

/// What a mismatch that memory has told stands for.
#[derive(Debug)]
pub(crate) enum Judged {
    Mismatch,
    /// It is not known yet, or memory has changed: claim again.
    Again,
    Unavailable {
        error: TierError,
        retry_after: Duration,
    },
}

/// A step that has still to land.
#[derive(Debug)]
pub(super) enum Unwritten {
    Complete(Option<Outcome>),
    Release,
    /// A release that keeps the checkpoint for the next owner.
    Lapse,
    /// Of a claim that was not answered: it may still be on its way. With the token that it was to
    /// take over from, if any: whose checkpoint stays for the next owner.
    Withdraw(Option<Token>),
    Hold,
}

impl Unwritten {
    /// Whether what it gives up may get there later than this, which found `found`.
    fn is_early(&self, found: Option<&Found>) -> bool {
        match (self, found) {
            (Self::Withdraw(_), None) => true,
            (Self::Withdraw(seen), Some(found)) => *seen == Some(found.token),
            _ => false,
        }
    }
}

impl Through {
    pub(crate) fn new(store: Store, tier: Arc<dyn Tier>, settings: Settings) -> Self {
        Self {
            store,
            tier,
            // Owner 0 is nobody.
            owner: std::hash::BuildHasher::hash_one(
                &std::hash::RandomState::new(),
                std::process::id(),
            )
            .max(1),
            number: AtomicU64::new(crate::clock::wall_micros()),
            alive_until: Mutex::default(),
            circuit: Circuit::default(),
            counters: Counters::default(),
            unwritten: AtomicUsize::new(0),
            runtime: tokio::runtime::Handle::current(),
            settings,
        }
    }

    /// A verb of the tier, with a limit to its answer and behind the circuit (T2).
    pub(crate) async fn ask<T>(&self, answer: Answer<'_, T>) -> Result<T, TierError> {
        self.circuit.check()?;
        let within = self.settings.answer_within;
        let answer = timeout(within, answer).await.unwrap_or_else(|_| {
            Err(TierError::unavailable(format!("no answer within {within:?}")))
        });
        match &answer {
            Err(TierError::Unavailable(_) | TierError::Unusable(_)) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                self.circuit.failed();
            }
            Ok(_) | Err(TierError::OwnerLapsed | TierError::Locked(_)) => self.circuit.answered(),
        }
        answer
    }

    /// Shows the tier that this owner lives (T10).
    pub(crate) async fn beat(&self) -> Result<(), TierError> {
        let sent = Instant::now();
        let lease = self.settings.lease;
        // Not behind the circuit: it is the beat that finds out whether the tier is back.
        let beat = timeout(self.settings.answer_within, self.tier.beat(self.owner, lease)).await;
        match beat {
            Ok(Ok(())) => {
                self.circuit.answered();
                let until = sent + lease;
                let mut alive = self.alive_until.lock();
                *alive = Some(alive.map_or(until, |before| before.max(until)));
                Ok(())
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(TierError::unavailable("no answer to a heartbeat")),
        }
        .inspect_err(|_| {
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            self.circuit.failed();
        })
    }

    /// For how long nobody takes this owner for dead.
    pub(crate) fn alive_for(&self) -> Duration {
        let until = *self.alive_until.lock();
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    fn next_token(&self) -> Token {
        // By the wall clock where that is ahead, so that the numbers of nodes and of openings
        // follow each other; unique by itself.
        let now = crate::clock::wall_micros();
        let next = |last: u64| last.max(now).checked_add(1);
        let last = self
            .number
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .unwrap_or_else(|last| last);
        Token::new(self.owner, last.max(now).saturating_add(1))
    }

    /// Takes a claim that was won in memory to the tier.
    pub(crate) async fn enter(
        self: &Arc<Self>,
        permit: Permit,
        mut translate: impl FnMut(Scheme) -> Option<Fingerprint>,
    ) -> Entered {
        // The lease in memory counts as renewed as long as the permit lives. Lost already: then the
        // verb at the end says so.
        let _ = permit.attend();
        let frame = permit.identity().frame();
        let id = Identity::from_frame(&frame);
        let own = permit.fingerprint();
        let mut token = self.next_token();
        let permit = Some(permit);
        let mut entering =
            Entering { through: self, frame: &frame, token, seen: None, permit, was_asked: false };
        let claim = |token| NewClaim {
            token,
            fingerprint: own,
            max_run: self.settings.max_run,
            retention: self.settings.retention,
        };
        let mut seen: Option<Token> = None;
        for _ in 0..TRIES {
            if let Err(error) = self.circuit.check() {
                return self.shut_out(entering, error);
            }
            entering.was_asked = true;
            let sent = Instant::now();
            let answer = match seen {
                None => self.tier.claim(id, claim(token)),
                Some(seen) => self.tier.take_over(id, seen, claim(token)),
            };
            let found = match self.ask(answer).await {
                Ok(Claimed::Won { checkpoint }) => {
                    self.counters.claims.fetch_add(1, Ordering::Relaxed);
                    if seen.is_some() {
                        self.counters.taken_over.fetch_add(1, Ordering::Relaxed);
                    }
                    let (through, permit) = (Arc::clone(self), entering.permit.take());
                    let frame = frame.clone();
                    let has_checkpoint = Arc::new(AtomicBool::new(checkpoint.is_some()));
                    return Entered::Yours(Owned {
                        through,
                        frame,
                        token,
                        permit,
                        checkpoint,
                        has_checkpoint,
                        is_in_tier: true,
                    });
                }
                Ok(Claimed::Met(found)) => found,
                Err(TierError::OwnerLapsed) => {
                    if let Err(error) = self.beat().await {
                        return self.shut_out(entering, error);
                    }
                    continue;
                }
                Err(error) => return self.shut_out(entering, error),
            };
            let Some(permit) = entering.permit.take() else { break };
            // R5: before the state.
            match fits(own, found.fingerprint, &mut translate) {
                Some(true) => {}
                differs => {
                    let _ = permit.release();
                    return if differs.is_some() { Entered::Mismatch } else { Entered::Held };
                }
            }
            match found.state {
                // A claim of this very process, which lives: it is renewed before it is judged (R8).
                // Its completion may still have to be told to the tier.
                State::Lapsed if found.token.owner() == self.owner => {
                    entering.permit = Some(permit);
                    if let Err(error) = self.beat().await {
                        return self.shut_out(entering, error);
                    }
                }
                State::Lapsed if self.settings.on_lapse == Lapse::TakeOver => {
                    entering.permit = Some(permit);
                    seen = Some(found.token);
                    // A takeover has a higher number, whatever the clocks say.
                    let number = token.number().max(found.token.number().saturating_add(1));
                    self.number.fetch_max(number, Ordering::Relaxed);
                    token = Token::new(self.owner, number);
                    (entering.token, entering.seen) = (token, seen);
                }
                State::InFlight => {
                    let through = Arc::clone(self);
                    self.runtime.spawn(watch(through, permit, frame.clone(), found.token));
                    return Entered::Elsewhere;
                }
                state => {
                    return self.settle_as(permit, &frame, state, found.age, found.remaining, sent);
                }
            }
        }
        // Others were faster each time: an owner runs somewhere, or has just ended.
        self.shut_out(entering, TierError::unavailable("the identity changes hands all the time"))
    }

    /// Judges a mismatch that memory has told (R5). As long as the claim there is on its way to the
    /// tier, only the tier knows whose the identity is: it may have the other one's outcome. `since`
    /// is when the caller was told of it first.
    pub(crate) async fn judge(
        &self,
        id: Identity<'_>,
        own: Fingerprint,
        mut translate: impl FnMut(Scheme) -> Option<Fingerprint>,
        since: Instant,
    ) -> Judged {
        match self.store.look_up(&id) {
            Some(entry) if entry.state == EntryState::InFlight => {}
            Some(_) => return Judged::Mismatch,
            None => return Judged::Again,
        }
        let error = match self.ask(self.tier.look_up(id)).await {
            Ok(Some(found)) if fits(own, found.fingerprint, &mut translate) == Some(false) => {
                return Judged::Mismatch;
            }
            Ok(_) if since.elapsed() < self.settings.answer_within => {
                sleep(jittered(ON_ITS_WAY)).await;
                return Judged::Again;
            }
            // There memory alone decides: what it has may have been let in past the tier, for good.
            Ok(_) | Err(TierError::Unavailable(_)) if self.settings.fail_open => {
                return Judged::Mismatch;
            }
            Ok(_) => TierError::unavailable("another claim of the key is on its way to the tier"),
            Err(error) => error,
        };
        Judged::Unavailable { error, retry_after: self.circuit.retry_after() }
    }

    /// Puts what the tier knows into memory, for no longer than the tier keeps it.
    pub(super) fn settle_as(
        &self,
        permit: Permit,
        frame: &Frame,
        state: State,
        age: Duration,
        remaining: Duration,
        asked: Instant,
    ) -> Entered {
        let remaining = remaining.saturating_sub(asked.elapsed());
        match state {
            State::Completed(outcome) => {
                // Lost means that an operator has settled it: the outcome is right all the same.
                let _ = permit.complete_for(Some(outcome.clone()), remaining);
                self.counters.read_through.fetch_add(1, Ordering::Relaxed);
                Entered::Replay(Replay::new(outcome, age, remaining))
            }
            State::NotKept => {
                let _ = permit.complete_for(None, remaining);
                self.counters.read_through.fetch_add(1, Ordering::Relaxed);
                Entered::NotKept
            }
            State::Held | State::Lapsed | State::InFlight => {
                self.shut(permit, frame);
                Entered::Held
            }
        }
    }

    /// Tells those who wait that nobody knows, and forgets that soon: an operator may resolve it.
    pub(super) fn shut(&self, permit: Permit, frame: &Frame) {
        let _ = permit.hold();
        let (store, frame) = (self.store.clone(), frame.clone());
        self.runtime.spawn(async move {
            sleep(HELD).await;
            // In flight: claimed anew since then.
            let _ = store.forget(&Identity::from_frame(&frame));
        });
    }

    /// The tier did not answer: nothing runs, but for those who chose so (T2).
    fn shut_out(self: &Arc<Self>, mut entering: Entering<'_>, error: TierError) -> Entered {
        if self.settings.fail_open
            && matches!(error, TierError::Unavailable(_))
            && let Some(permit) = entering.permit.take()
        {
            self.counters.failed_open.fetch_add(1, Ordering::Relaxed);
            return Entered::Yours(Owned {
                through: Arc::clone(self),
                frame: entering.frame.clone(),
                token: entering.token,
                permit: Some(permit),
                checkpoint: None,
                has_checkpoint: Arc::default(),
                is_in_tier: false,
            });
        }
        drop(entering);
        Entered::Unavailable { error, retry_after: self.circuit.retry_after() }
    }

    /// Tells the tier a step again and again until it lands, is lost, or does not matter any more.
    pub(super) fn write_later(self: &Arc<Self>, frame: Frame, token: Token, step: Unwritten) {
        if self.unwritten.fetch_add(1, Ordering::Relaxed) >= self.settings.max_unwritten {
            self.unwritten.fetch_sub(1, Ordering::Relaxed);
            self.counters.given_up.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let telling = Telling { through: Arc::clone(self), is_over: false };
        self.runtime.spawn(async move {
            let mut telling = telling;
            let through = &telling.through;
            let Settings { retention, max_run, .. } = through.settings;
            let write = || async {
                let id = Identity::from_frame(&frame);
                let answer = match &step {
                    Unwritten::Complete(outcome) => {
                        through.tier.complete(id, token, outcome.as_ref(), retention)
                    }
                    Unwritten::Release | Unwritten::Withdraw(None) => {
                        through.tier.release(id, token)
                    }
                    Unwritten::Lapse | Unwritten::Withdraw(Some(_)) => {
                        through.tier.lapse(id, token)
                    }
                    Unwritten::Hold => through.tier.hold(id, token, retention),
                };
                through.ask(answer).await
            };
            // After that the record has ended by itself.
            let limit = max_run.saturating_add(retention);
            let landed = write.retry(backoff(limit)).await;
            if landed.is_ok() {
                telling.through.unwritten.fetch_sub(1, Ordering::Relaxed);
                telling.is_over = true;
            }
            let through = &telling.through;
            match landed {
                Ok(Landed::Lost(found)) if matches!(step, Unwritten::Complete(_)) => {
                    through.note_lost(found.as_ref());
                }
                Ok(Landed::Lost(found)) if step.is_early(found.as_ref()) => {
                    for pause in LATE {
                        sleep(pause).await;
                        match write.retry(backoff(limit)).await {
                            Ok(Landed::Lost(found)) if step.is_early(found.as_ref()) => {}
                            _ => break,
                        }
                    }
                }
                _ => {}
            }
        });
    }

    /// Counts a completion whose token was stale: if another has completed, the work ran twice (R9).
    pub(super) fn note_lost(&self, found: Option<&Found>) {
        self.counters.lost.fetch_add(1, Ordering::Relaxed);
        if found.is_some_and(|found| matches!(found.state, State::Completed(_) | State::NotKept)) {
            self.counters.double_runs.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// When to tell the tier again, for at most `limit`.
pub(super) fn backoff(limit: Duration) -> ExponentialBuilder {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(100))
        .with_max_delay(Duration::from_secs(30))
        .with_jitter()
        .without_max_times()
        .with_total_delay(Some(limit))
}

/// Whether the fingerprints are of one request; `None` if they cannot be compared (R4).
fn fits(
    own: Fingerprint,
    stored: Fingerprint,
    translate: &mut impl FnMut(Scheme) -> Option<Fingerprint>,
) -> Option<bool> {
    let scheme = stored.scheme();
    let own = if own.scheme() == scheme { Some(own) } else { translate(scheme) };
    own.filter(|own| own.scheme() == scheme).map(|own| own == stored)
}

/// A claim on its way to the tier. Dropped, it is given up in both (rule 4).
struct Entering<'a> {
    through: &'a Arc<Through>,
    frame: &'a Frame,
    token: Token,
    /// The token that it takes over from, if any.
    seen: Option<Token>,
    permit: Option<Permit>,
    /// Whether the tier may have the claim.
    was_asked: bool,
}

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        // First: the next local caller asks the tier itself, and waits there until this has landed.
        if self.was_asked {
            let step = Unwritten::Withdraw(self.seen);
            self.through.write_later(self.frame.clone(), self.token, step);
        }
        let _ = permit.release();
    }
}

/// A step that is told to the tier in the background. Dropped before it is over, because the runtime
/// has ended, or after all attempts, it is given up: the claim lapses with its owner (T7).
struct Telling {
    through: Arc<Through>,
    is_over: bool,
}

impl Drop for Telling {
    fn drop(&mut self) {
        if !self.is_over {
            self.through.unwritten.fetch_sub(1, Ordering::Relaxed);
            self.through.counters.given_up.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Keeps the memory's permit while another node runs the work, so that local duplicates wait in
/// memory: until it is settled there, another claim than that of `token` takes its place, which may be
/// of another request, or nobody waits here any more.
pub(super) async fn watch(through: Arc<Through>, permit: Permit, frame: Frame, token: Token) {
    let id = Identity::from_frame(&frame);
    let own = permit.fingerprint();
    let mut watched = Watched { permit: Some(permit) };
    loop {
        let pause = jittered(through.settings.poll_every);
        // Told by the tier, or not: then it is looked at all the same.
        let _ = timeout(pause, through.tier.settled(id)).await;
        let sent = Instant::now();
        let waiters = through.store.look_up(&id).map_or(0, |entry| entry.waiters);
        if waiters == 0 {
            return;
        }
        through.counters.polls.fetch_add(1, Ordering::Relaxed);
        let found = match through.ask(through.tier.look_up(id)).await {
            Ok(Some(found)) => found,
            // Given up there: one of those who wait here is the next to ask.
            Ok(None) => return,
            Err(_) => continue,
        };
        let is_over = match found.state {
            State::InFlight => found.token != token,
            State::Lapsed => through.settings.on_lapse == Lapse::TakeOver,
            _ => found.fingerprint != own,
        };
        if is_over {
            return;
        }
        if found.state != State::InFlight
            && let Some(permit) = watched.permit.take()
        {
            let Found { state, age, remaining, .. } = found;
            through.settle_as(permit, &frame, state, age, remaining, sent);
            return;
        }
    }
}

/// The permit of a watcher: whenever it ends, the next in memory asks the tier.
struct Watched {
    permit: Option<Permit>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            let _ = permit.release();
        }
    }
}

/// Between half and one and a half of `span`.
pub(crate) fn jittered(span: Duration) -> Duration {
    span.mul_f64(0.5 + fastrand::f64())
}

impl Through {
    /// The tier could not be told of a completion: memory answers as long as no other node may take
    /// the owner for dead; after that the tier is asked (T1).
    pub(super) fn publish_unwritten(
        self: &Arc<Self>,
        permit: Permit,
        frame: Frame,
        token: Token,
        outcome: Option<Outcome>,
    ) -> Completed {
        self.counters.late.fetch_add(1, Ordering::Relaxed);
        let left = self.alive_for();
        let kept = if left.is_zero() {
            let _ = match &outcome {
                Some(outcome) => permit.release_with(outcome.clone()),
                None => permit.release(),
            };
            false
        } else {
            permit.complete_for(outcome.clone(), left).is_ok_and(|completed| completed.kept)
        };
        self.write_later(frame, token, Unwritten::Complete(outcome));
        Completed { kept }
    }
}

/// Beats, reaps, and hears what was forgotten elsewhere, until the last handle is gone.
pub(crate) async fn keep(through: Weak<Through>, every: Duration) {
    let mut since = None;
    let mut next_reap = Instant::now();
    let mut next_beat = Instant::now() + every;
    loop {
        // At most two seconds, so that what was forgotten is forgotten here within five (T9).
        sleep(jittered(every.min(Duration::from_millis(1_300)))).await;
        let Some(through) = through.upgrade() else { return };
        if Instant::now() >= next_beat || through.circuit.is_open() {
            let beat = through.beat().await;
            next_beat = Instant::now() + if beat.is_ok() { every } else { Duration::ZERO };
        }
        if let Ok(recalls) = through.ask(through.tier.recalls(since)).await {
            since = Some(recalls.now);
            for [account, endpoint, key] in &recalls.identities {
                let Ok(id) = Identity::new(account, endpoint, key) else { continue };
                // In flight: it was claimed anew since then.
                let _ = through.store.forget(&id);
            }
        }
        if Instant::now() >= next_reap {
            let reaped = through.ask(through.tier.reap(1_000)).await.unwrap_or(0);
            through.counters.reaped.fetch_add(reaped as u64, Ordering::Relaxed);
            let pause = if reaped == 1_000 { Duration::ZERO } else { Duration::from_secs(10) };
            next_reap = Instant::now() + pause;
        }
    }
}
