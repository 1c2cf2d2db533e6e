//! How a tier comes to be: its settings, what is asked of the server, and the tables by version.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, Connection as _, PgConnection, PgPool, Row as _, postgres::PgConnectOptions,
};

use super::{PostgresTier, Shared, call, listen::Listener};
use crate::{
    sync::Arc,
    tier::{Durability, TierError},
};

/// The versions of the schema: the file of each is run once, in order.
const VERSIONS: &[&str] = &[include_str!("1.sql")];

/// The oldest server that has all that the schema names: numbers of transactions that do not wrap.
const OLDEST: i64 = 130_000;

/// The settings of a [`PostgresTier`], from [`PostgresTier::builder`].
#[derive(Clone, Debug)]
pub struct PostgresBuilder {
    schema: String,
    inline: bool,
    lock_limit: Duration,
    durability: Durability,
    listener: Option<PgConnectOptions>,
}

impl Default for PostgresBuilder {
    fn default() -> Self {
        Self {
            schema: "oncekey".to_owned(),
            inline: false,
            // A business transaction that commits takes milliseconds. Less than the ten seconds
            // that a duplicate waits by default, and more than the second after which Postgres
            // looks for deadlocks.
            lock_limit: Duration::from_secs(2),
            durability: Durability::default(),
            listener: None,
        }
    }
}

impl PostgresBuilder {
    /// The schema of the tables and functions, by default `oncekey`: a lower-case letter or `_`,
    /// then letters, digits and `_`, at most 40. Services whose identities must not meet have one
    /// each.
    #[must_use]
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// For a pool that reaches the server through a pooler in transaction mode, such as PgBouncer:
    /// nothing is prepared, and arguments stand in the text of the statements. Whatever logs
    /// statements, the server on an error or the driver on a slow one, logs identities and
    /// outcomes then; `docs/tiers/postgres.md` says how to turn that off.
    #[must_use]
    pub fn through_pooler(mut self) -> Self {
        self.inline = true;
        self
    }

    /// How long a verb waits for another transaction that has the record in its hands, at most; by
    /// default 2 seconds. From a millisecond to 24 days; what is beyond is clamped. A claim that has
    /// to wait does so twice, the first time for at most 50 milliseconds. It must be
    /// shorter than what a store in front of the tier gives an answer
    /// ([`TieredBuilder::answer_within`](crate::tier::TieredBuilder::answer_within)), or that takes
    /// the tier for unavailable.
    #[must_use]
    pub fn lock_limit(mut self, limit: Duration) -> Self {
        self.lock_limit = limit;
        self
    }

    /// What an acknowledged step must survive, by default a loss of power. The server's settings are
    /// looked at when the tier connects: without `synchronous_commit` it survives nothing, and is
    /// refused; without `fsync` or `full_page_writes` it survives the end of any process, the
    /// server's own included, but no loss of power.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Waits for other nodes by notifications, on one connection that stays open. It must lead to
    /// the server itself: a pooler in transaction mode loses them. Without this, whoever waits
    /// looks from time to time.
    #[must_use]
    pub fn listen(mut self, direct: PgConnectOptions) -> Self {
        self.listener = Some(direct);
        self
    }

    /// Looks at the server, makes the tables or brings them to this version, and is ready.
    ///
    /// Processes may start at the same moment: one makes the tables, the others wait for it. It
    /// must be called within a runtime of tokio.
    ///
    /// # Errors
    ///
    /// [`TierError::Unavailable`] if the server cannot be reached. [`TierError::Unusable`], with a
    /// text that says what to do, if it is too old, a standby or read-only, less durable than asked
    /// ([`durability`](Self::durability)), if the role may not make the tables, or if they are of a
    /// newer version of this crate.
    pub async fn connect(self, pool: PgPool) -> Result<PostgresTier, TierError> {
        let schema = self.schema.as_str();
        if !is_name(schema) {
            return Err(TierError::unusable(format!(
                "{schema:?} is no name for a schema: use at most 40 lower-case letters, digits \
                 and `_`, a letter first"
            )));
        }
        let mut connection = pool.acquire().await.map_err(call::failed)?;
        self.look_at_the_server(&mut connection).await?;
        let mut version = version(&mut connection, schema).await.map_err(call::failed)?;
        if version < VERSIONS.len() {
            version = migrate(&mut connection, schema).await.map_err(|error| {
                TierError::unusable(format!(
                    "the tables cannot be made: {error}. Let an administrator run `CREATE SCHEMA \
                     {schema} AUTHORIZATION` the role of this program"
                ))
            })?;
        }
        if version > VERSIONS.len() {
            return Err(TierError::unusable(format!(
                "the tables are of version {version}, but this program knows {}: they were made \
                 by a newer version of Oncekey. Use that one here too",
                VERSIONS.len()
            )));
        }
        self.look_at_the_tables(&mut connection).await?;
        drop(connection);
        let listener = match self.listener {
            Some(options) => {
                let channel = format!("{}.settled", self.schema);
                Some(Listener::start(options, channel).await.map_err(call::failed)?)
            }
            None => None,
        };
        let (inline, lock_limit) = (self.inline, self.lock_limit);
        let writer = call::Writer { schema: self.schema, inline, lock_limit };
        Ok(PostgresTier { shared: Arc::new(Shared { pool, writer, listener }) })
    }

    async fn look_at_the_server(&self, connection: &mut PgConnection) -> Result<(), TierError> {
        let sql = "SELECT current_setting('server_version_num')::bigint AS version, \
             current_setting('server_version') AS named, \
             pg_is_in_recovery() AS is_standby, \
             current_setting('transaction_read_only')::boolean AS is_read_only, \
             current_setting('synchronous_commit') AS commit, \
             current_setting('fsync')::boolean AS fsync, \
             current_setting('full_page_writes')::boolean AS pages, \
             current_setting('bytea_output') AS bytes";
        let row = sqlx::raw_sql(sql).fetch_one(connection).await.map_err(call::failed)?;
        let is = |column| row.try_get::<bool, _>(column).map_err(call::failed);
        let text = |column| row.try_get::<String, _>(column).map_err(call::failed);
        let version: i64 = row.try_get("version").map_err(call::failed)?;
        let fault = if version < OLDEST {
            format!("the server is Postgres {}: use 13 or later", text("named")?)
        } else if is("is_standby")? {
            "the server is a standby and takes no writes: connect to the primary".into()
        } else if is("is_read_only")? {
            "transactions are read-only here: set default_transaction_read_only = off for the \
             role, or connect to the primary"
                .into()
        } else if text("commit")? == "off" {
            "synchronous_commit is off, so a crash loses what was acknowledged: set it to on, for \
             the role of this program at least"
                .into()
        } else if self.durability == Durability::PowerLoss && !(is("fsync")? && is("pages")?) {
            "fsync or full_page_writes is off, so a loss of power loses or damages what was \
             acknowledged: turn them on, or ask for Durability::KilledProcess"
                .into()
        } else if self.inline && text("bytes")? != "hex" {
            "bytea_output is not hex: set it to hex for the role of this program".into()
        } else {
            return Ok(());
        };
        Err(TierError::unusable(fault))
    }

    async fn look_at_the_tables(&self, connection: &mut PgConnection) -> Result<(), TierError> {
        let schema = &self.schema;
        let sql = AssertSqlSafe(format!(
            "SELECT relname::text FROM pg_class WHERE relpersistence <> 'p' AND relkind = 'r' \
             AND relnamespace = '{schema}'::regnamespace AND relname LIKE 'idempotency%'"
        ));
        let row = sqlx::raw_sql(sql).fetch_optional(connection).await.map_err(call::failed)?;
        let Some(row) = row else { return Ok(()) };
        let table: String = row.try_get(0).map_err(call::failed)?;
        Err(TierError::unusable(format!(
            "a crash of the server empties the table {table}: ALTER TABLE {schema}.{table} SET \
             LOGGED"
        )))
    }
}

fn is_name(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    name.bytes().all(|byte| is_letter(byte) || byte.is_ascii_digit())
        && name.bytes().next().is_some_and(is_letter)
        && name.len() <= 40
}

/// The version of the tables, 0 if there are none.
async fn version(connection: &mut PgConnection, schema: &str) -> Result<usize, sqlx::Error> {
    let table = format!("{schema}.idempotency_schema");
    let there = AssertSqlSafe(format!("SELECT to_regclass('{table}') IS NOT NULL"));
    if !sqlx::raw_sql(there).fetch_one(&mut *connection).await?.try_get::<bool, _>(0)? {
        return Ok(0);
    }
    let highest = AssertSqlSafe(format!("SELECT coalesce(max(version), 0) FROM {table}"));
    let highest: i32 = sqlx::raw_sql(highest).fetch_one(connection).await?.try_get(0)?;
    Ok(usize::try_from(highest).unwrap_or(0))
}

/// Runs what is missing, all or nothing, and tells the version that is there then.
async fn migrate(connection: &mut PgConnection, schema: &str) -> Result<usize, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    // Until the commit. Another process that starts now waits here, and then finds it done.
    let alone =
        format!("SELECT pg_advisory_xact_lock(hashtextextended('oncekey migrates {schema}', 0))");
    sqlx::raw_sql(AssertSqlSafe(alone)).execute(&mut *transaction).await?;
    // Not IF NOT EXISTS, which needs the right to create one that is there.
    let there = AssertSqlSafe(format!("SELECT to_regnamespace('{schema}') IS NOT NULL"));
    if !sqlx::raw_sql(there).fetch_one(&mut *transaction).await?.try_get::<bool, _>(0)? {
        let create = AssertSqlSafe(format!("CREATE SCHEMA {schema}"));
        sqlx::raw_sql(create).execute(&mut *transaction).await?;
    }
    let version = version(&mut transaction, schema).await?;
    for file in VERSIONS.iter().skip(version) {
        let sql = AssertSqlSafe(file.replace("oncekey.", &format!("{schema}.")));
        sqlx::raw_sql(sql).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    Ok(version.max(VERSIONS.len()))
}
