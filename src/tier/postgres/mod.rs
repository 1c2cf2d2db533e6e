//! A tier in Postgres, across nodes.
//!
//! Ground rules: each verb is one call of one function of `1.sql`, which has the ground rules of
//! its own; what stands here is how a call is written, retried and read. Nothing here keeps state
//! of a record, and nothing relies on two statements meeting the same connection.

mod borrow;
mod call;
mod connect;
mod listen;

use std::{fmt, future::Future, pin::Pin, time::Duration};

use bytes::Bytes;
use sqlx::{PgConnection, PgPool};

pub use connect::PostgresBuilder;

use crate::{
    Identity, Outcome, Token,
    sync::Arc,
    tier::{
        Answer, Claimed, Completion, Forgotten, Found, Landed, NewClaim, Recalls, Resolved, Tier,
        TierError, Transaction,
    },
};
use call::{Answered, Call, Kept, Writer};
use listen::Listener;

/// A [`Tier`] in Postgres (13 or later), for any number of processes on one database.
///
/// `docs/tiers/postgres.md` says what it needs of the server, what it costs, and how it is run:
/// poolers, partitions, vacuum, failover. All clones are one.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use oncekey::tier::PostgresTier;
/// use sqlx::postgres::PgPoolOptions;
///
/// let pool = PgPoolOptions::new()
///     // A question to the server before each of ours would double the round trips.
///     .test_before_acquire(false)
///     .connect("postgres://app@localhost/app")
///     .await?;
/// let tier = PostgresTier::connect(pool).await?;
/// # Ok(())
/// # }
/// ```
///
/// # Completion in a transaction of the user's own
///
/// With [`complete_in`](Self::complete_in) the rows that the work has written and its outcome
/// become visible together, or neither does (T6):
///
/// ```no_run
/// # async fn example(
/// #     tier: oncekey::tier::PostgresTier, pool: sqlx::PgPool, id: oncekey::Identity<'_>,
/// #     token: oncekey::Token,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use oncekey::{Outcome, tier::Landed};
///
/// let day = Duration::from_secs(24 * 60 * 60);
/// let mut transaction = pool.begin().await?;
/// sqlx::query("INSERT INTO ledger (amount) VALUES (7)").execute(&mut *transaction).await?;
/// let outcome = Outcome::new(201).body("charged");
/// match tier.complete_in(&mut transaction, id, token, Some(&outcome), day).await? {
///     Landed::Done => transaction.commit().await?,
///     // Somebody else owns it by now: nothing of this may stay.
///     Landed::Lost(_) => transaction.rollback().await?,
/// }
/// # Ok(())
/// # }
/// ```
///
/// If the answer to the commit is lost, nobody knows yet. Any verb with the token settles it,
/// because it waits for a transaction that is still open: [`Tier::release`] is [`Landed::Done`] if
/// the transaction was rolled back, and [`Landed::Lost`] with the completed record if it was not.
#[derive(Clone)]
pub struct PostgresTier {
    shared: Arc<Shared>,
}

struct Shared {
    pool: PgPool,
    writer: Writer,
    listener: Option<Listener>,
}

impl PostgresTier {
    /// The tier on the database of `pool`, with all settings at their defaults. See
    /// [`PostgresBuilder::connect`].
    ///
    /// # Errors
    ///
    /// As [`PostgresBuilder::connect`].
    pub async fn connect(pool: PgPool) -> Result<Self, TierError> {
        Self::builder().connect(pool).await
    }

    /// The settings of a tier.
    pub fn builder() -> PostgresBuilder {
        PostgresBuilder::default()
    }

    /// A transaction of the caller's own on this tier's database, for
    /// [`TieredPermit::complete_in`](crate::tier::TieredPermit::complete_in).
    pub fn within<'a>(&'a self, transaction: &'a mut PgConnection) -> PostgresTransaction<'a> {
        PostgresTransaction { tier: self, connection: transaction }
    }

    /// [`Tier::complete`] in a transaction of the caller's own: the outcome becomes visible when
    /// that commits, and not at all if it is rolled back.
    ///
    /// On [`Landed::Lost`] the transaction is usable, and must be rolled back: another owner, or an
    /// operator, has settled this identity.
    ///
    /// From here to the commit the record is locked. Other nodes see it in flight; a verb that
    /// would change it waits, at most for the limit of that tier
    /// ([`PostgresBuilder::lock_limit`]). So commit soon.
    ///
    /// # Errors
    ///
    /// [`TierError::Locked`] or [`TierError::Unavailable`], and then the transaction cannot be used
    /// any more, as after any error in Postgres. Under `REPEATABLE READ` and `SERIALIZABLE` that may be a serialization
    /// failure: run the whole transaction again.
    pub async fn complete_in(
        &self,
        transaction: &mut PgConnection,
        id: Identity<'_>,
        token: Token,
        outcome: Option<&Outcome>,
        retention: Duration,
    ) -> Result<Landed, TierError> {
        let kept = Kept::outcome(outcome);
        let call = self.shared.writer.act("act_in", "complete", id, token, kept, retention);
        call.within(transaction).await.map_err(call::failed)?.landed()
    }

    /// [`Tier::claim`] in a transaction of the caller's own: the claim is there for others when
    /// that commits, and never was if it is rolled back. Whatever it meets, the transaction stays
    /// usable.
    ///
    /// For work that lies in this database alone, it saves the round trip of a claim of its own:
    /// claim, write, [`complete_in`](Self::complete_in), commit. It is exempt from T1, because the
    /// claim is not in the tier before the work runs, and from waiting: a duplicate elsewhere waits
    /// for this transaction, on a connection of its own and at most for the limit of that tier
    /// ([`PostgresBuilder::lock_limit`]), and is then told that the identity is in flight, by
    /// nobody ([`Token::new`]`(0, 0)`) and with its own fingerprint, because what is not committed
    /// cannot be seen. The same holds for this call if it comes second.
    ///
    /// # Errors
    ///
    /// [`TierError::Locked`] or [`TierError::Unavailable`], and then the transaction cannot be used
    /// any more. Under
    /// `REPEATABLE READ` and `SERIALIZABLE` a claim against one that was committed since this
    /// transaction began is a serialization failure: run the whole transaction again.
    /// [`TierError::OwnerLapsed`] as in [`Tier::claim`]; that leaves the transaction usable.
    pub async fn claim_in(
        &self,
        transaction: &mut PgConnection,
        id: Identity<'_>,
        claim: NewClaim,
    ) -> Result<Claimed, TierError> {
        let call = self.shared.writer.claim("claim_in", id, None, &claim);
        call.within(transaction).await.map_err(call::failed)?.claimed(&claim)
    }

    async fn ask(&self, call: Call<'_>) -> Result<Answered, TierError> {
        call.by_itself(&self.shared.pool).await.map_err(call::failed)
    }

    /// A claim or a takeover. One that has waited for its limit has met somebody's open
    /// transaction.
    async fn make(&self, call: Call<'_>, claim: NewClaim) -> Result<Claimed, TierError> {
        match call.by_itself(&self.shared.pool).await {
            Ok(answered) => answered.claimed(&claim),
            Err(error) if call::is_locked_out(&error) => Ok(Claimed::Met(call::unseen(&claim))),
            Err(error) => Err(call::failed(error)),
        }
    }
}

impl fmt::Debug for PostgresTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { writer, listener, .. } = &*self.shared;
        f.debug_struct("PostgresTier")
            .field("writer", writer)
            .field("listener", listener)
            .finish_non_exhaustive()
    }
}

/// A [`Transaction`] of a user's own, on the database of a tier. Made by [`PostgresTier::within`].
#[derive(Debug)]
pub struct PostgresTransaction<'a> {
    tier: &'a PostgresTier,
    connection: &'a mut PgConnection,
}

impl Transaction for PostgresTransaction<'_> {
    fn complete<'a>(&'a mut self, completion: Completion<'a>) -> Answer<'a, Landed> {
        let Completion { id, token, outcome, retention } = completion;
        Box::pin(self.tier.complete_in(self.connection, id, token, outcome, retention))
    }
}

impl Tier for PostgresTier {
    fn beat(&self, owner: u64, lease: Duration) -> Answer<'_, ()> {
        let call = self.shared.writer.call("beat").number(Some(owner)).span(lease);
        Box::pin(async move { self.ask(call).await.map(drop) })
    }

    fn claim<'a>(&'a self, id: Identity<'a>, claim: NewClaim) -> Answer<'a, Claimed> {
        Box::pin(async move {
            let writer = &self.shared.writer;
            match writer.claim("claim", id, None, &claim).by_itself(&self.shared.pool).await {
                Ok(answered) => answered.claimed(&claim),
                // Somebody has the record in hands: look at it without waiting.
                Err(error) if call::is_locked_out(&error) => {
                    self.make(writer.claim("met", id, None, &claim), claim).await
                }
                Err(error) => Err(call::failed(error)),
            }
        })
    }

    fn take_over<'a>(
        &'a self,
        id: Identity<'a>,
        seen: Token,
        claim: NewClaim,
    ) -> Answer<'a, Claimed> {
        Box::pin(self.make(self.shared.writer.claim("take_over", id, Some(seen), &claim), claim))
    }

    fn complete<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        let kept = Kept::outcome(outcome);
        let call = self.shared.writer.complete(id, token, kept, retention);
        Box::pin(async move { self.ask(call).await?.landed() })
    }

    fn release<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        let call = self.shared.writer.act(
            "act",
            "release",
            id,
            token,
            Kept::default(),
            Duration::default(),
        );
        Box::pin(async move { self.ask(call).await?.landed() })
    }

    fn hold<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        retention: Duration,
    ) -> Answer<'a, Landed> {
        let call = self.shared.writer.act("act", "hold", id, token, Kept::default(), retention);
        Box::pin(async move { self.ask(call).await?.landed() })
    }

    fn lapse<'a>(&'a self, id: Identity<'a>, token: Token) -> Answer<'a, Landed> {
        let (kept, retention) = (Kept::default(), Duration::default());
        let call = self.shared.writer.act("act", "lapse", id, token, kept, retention);
        Box::pin(async move { self.ask(call).await?.landed() })
    }

    fn checkpoint<'a>(
        &'a self,
        id: Identity<'a>,
        token: Token,
        bytes: Bytes,
    ) -> Answer<'a, Landed> {
        Box::pin(async move {
            let kept = Kept::checkpoint(&bytes);
            let call =
                self.shared.writer.act("act", "checkpoint", id, token, kept, Duration::default());
            self.ask(call).await?.landed()
        })
    }

    fn look_up<'a>(&'a self, id: Identity<'a>) -> Answer<'a, Option<Found>> {
        let call = self.shared.writer.rows("record_send(r)", "look_up").identity(id);
        Box::pin(async move { self.ask(call).await?.found() })
    }

    fn forget<'a>(&'a self, id: Identity<'a>, forced: bool) -> Answer<'a, Forgotten> {
        let verb = if forced { "force" } else { "forget" };
        let call = self.shared.writer.operate(verb, id, Kept::default(), Duration::default());
        Box::pin(async move {
            let answered = self.ask(call).await?;
            match answered.word()? {
                "done" => Ok(Forgotten::Gone),
                "absent" => Ok(Forgotten::Absent),
                "in flight" => Ok(Forgotten::Busy),
                word => call::unexpected(word),
            }
        })
    }

    fn resolve<'a>(
        &'a self,
        id: Identity<'a>,
        outcome: Option<&'a Outcome>,
        retention: Duration,
    ) -> Answer<'a, Resolved> {
        let call = self.shared.writer.operate("resolve", id, Kept::outcome(outcome), retention);
        Box::pin(async move {
            let answered = self.ask(call).await?;
            match answered.word()? {
                "done" => Ok(Resolved::Done),
                "absent" => Ok(Resolved::Absent),
                "in flight" => Ok(Resolved::InFlight),
                "completed" => Ok(Resolved::Completed),
                word => call::unexpected(word),
            }
        })
    }

    fn reap(&self, most: usize) -> Answer<'_, usize> {
        let call = self.shared.writer.call("reap").number(Some(most.min(i32::MAX as usize) as u64));
        Box::pin(async move {
            let reaped: i64 = self.ask(call).await?.only()?;
            Ok(usize::try_from(reaped).unwrap_or(0))
        })
    }

    fn recalls(&self, since: Option<u64>) -> Answer<'_, Recalls> {
        let call = self.shared.writer.rows("*", "recalled").number(since);
        Box::pin(async move { self.ask(call).await?.recalls() })
    }

    fn settled<'a>(&'a self, id: Identity<'a>) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            let Some(listener) = &self.shared.listener else {
                return std::future::pending().await;
            };
            let name = listen::name(id);
            let waiting = listener.wait(name);
            // Before the server is asked: what is notified from then on counts.
            let notified = waiting.notify.notified();
            let name = name.to_be_bytes().to_vec();
            let call = self.shared.writer.call("watch").identity(id).owned(name);
            match self.ask(call).await.and_then(|answered| answered.only()) {
                Ok(false) => {}
                // If it could not be asked for, the caller's next look finds out why.
                Ok(true) | Err(_) => notified.await,
            }
        })
    }
}
