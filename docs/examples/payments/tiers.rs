//! Where keys and charges are kept: in memory, or in a durable store behind it.
//!
//! With a SQL database the ledger is a table of the same database, and a charge and its answer are
//! committed in one transaction: neither is there without the other.

use std::convert::Infallible;
#[cfg(feature = "tier")]
use std::fmt;
use std::str::FromStr;

use axum::extract::FromRequestParts;
use axum::http::{StatusCode, request::Parts};
#[cfg(any(feature = "sqlite", feature = "postgres"))]
use oncekey::Outcome;
use oncekey::http::Backing;
use oncekey::{Lapse, Store};

use crate::Failure;

/// `--tier`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Place {
    #[default]
    Memory,
    Embedded(String),
    Sqlite(String),
    Postgres(String),
    Redis(String),
}

impl FromStr for Place {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if text == "memory" {
            return Ok(Self::Memory);
        }
        let (kind, at) = text.split_once(':').ok_or(())?;
        let at = at.to_owned();
        Ok(match kind {
            _ if at.is_empty() => return Err(()),
            "embedded" => Self::Embedded(at),
            "sqlite" => Self::Sqlite(at),
            // What follows is the URL, but for its scheme: postgres://user@host/database.
            "postgres" => Self::Postgres(text.to_owned()),
            "redis" => Self::Redis(text.to_owned()),
            _ => return Err(()),
        })
    }
}

/// What was opened.
pub(crate) struct Opened {
    pub(crate) backing: Backing,
    pub(crate) books: Books,
    #[cfg(feature = "tier")]
    pub(crate) tiered: Option<oncekey::tier::Tiered>,
}

/// Where the ledger is.
#[derive(Clone)]
pub(crate) enum Books {
    /// With the process; it ends with it.
    Memory,
    #[cfg(feature = "sqlite")]
    Sqlite(oncekey::tier::SqliteTier, sqlx::SqlitePool),
    #[cfg(feature = "postgres")]
    Postgres(oncekey::tier::PostgresTier, sqlx::PgPool),
}

/// The key of a request, for a transaction; nothing where the store is in memory alone, or where the
/// answer is to be stored by itself.
#[derive(Default)]
pub(crate) struct Key {
    #[cfg(feature = "tier")]
    staging: Option<oncekey::http::InTransaction>,
}

impl<S: Sync> FromRequestParts<S> for Key {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let _ = &parts;
        Ok(Self {
            #[cfg(feature = "tier")]
            staging: parts.extensions.get().cloned(),
        })
    }
}

/// A charge, and what its client is told.
#[cfg_attr(not(any(feature = "sqlite", feature = "postgres")), expect(dead_code))]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) account: String,
    pub(crate) intent: String,
    pub(crate) amount_cents: i64,
    pub(crate) currency: String,
    /// Status, location, body.
    pub(crate) answer: (StatusCode, String, String),
}

/// Both databases take the same statements.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
macro_rules! enter {
    ($tier:expr, $pool:expr, $key:expr, $entry:expr) => {{
        let Entry { id, account, intent, amount_cents, currency, answer } = $entry;
        let mut tx = $pool.begin().await.map_err(text)?;
        sqlx::query("INSERT INTO charges VALUES ($1, $2, $3, $4, $5)")
            .bind(id)
            .bind(account)
            .bind(intent)
            .bind(amount_cents)
            .bind(currency)
            .execute(&mut *tx)
            .await
            .map_err(text)?;
        let Some(staging) = $key.staging else {
            tx.commit().await.map_err(text)?;
            return Ok(None);
        };
        let (status, location, body) = answer;
        let outcome = Outcome::new(status.as_u16())
            .header("location", location)
            .header("content-type", "application/json")
            .body(body);
        staging.complete(&mut $tier.within(&mut tx), outcome).await.map_err(text)?;
        tx.commit().await.map_err(text)?;
        Ok(Some(staging.committed()))
    }};
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
macro_rules! find {
    ($pool:expr, $id:expr) => {{
        let row: Option<(String, i64, String)> =
            sqlx::query_as("SELECT account, amount_cents, currency FROM charges WHERE id = $1")
                .bind($id)
                .fetch_optional($pool)
                .await
                .map_err(text)?;
        Ok(row.map(|(account, cents, currency)| {
            let id = $id;
            let json = format!(r#"{{"id":"{id}","amount_cents":{cents},"currency":"{currency}"}}"#);
            (account, json)
        }))
    }};
}

impl Books {
    /// Enters a charge and completes its key, both or neither. The status if that is what the client
    /// gets; nothing where the ledger is in memory.
    pub(crate) async fn enter(&self, key: Key, entry: Entry) -> Result<Option<StatusCode>, String> {
        let _ = (&key, &entry);
        match self {
            Self::Memory => Ok(None),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(tier, pool) => enter!(tier, pool, key, entry),
            #[cfg(feature = "postgres")]
            Self::Postgres(tier, pool) => enter!(tier, pool, key, entry),
        }
    }

    /// The account and the JSON of a charge in a database.
    pub(crate) async fn find(&self, id: &str) -> Result<Option<(String, String)>, String> {
        let _ = id;
        match self {
            Self::Memory => Ok(None),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(_, pool) => find!(pool, id),
            #[cfg(feature = "postgres")]
            Self::Postgres(_, pool) => find!(pool, id),
        }
    }
}

#[cfg(any(feature = "sqlite", feature = "postgres"))]
fn text(error: impl fmt::Display) -> String {
    error.to_string()
}

/// Opens the store at `place`.
pub(crate) async fn open(store: Store, place: &Place, lapse: Lapse) -> Result<Opened, Failure> {
    match place {
        Place::Memory => Ok(Opened {
            backing: store.into(),
            books: Books::Memory,
            #[cfg(feature = "tier")]
            tiered: None,
        }),
        #[cfg(feature = "embedded")]
        Place::Embedded(directory) => {
            let tier = oncekey::tier::EmbeddedTier::open(directory).map_err(failed)?;
            tiered(store, tier, lapse, Books::Memory).await
        }
        #[cfg(feature = "sqlite")]
        Place::Sqlite(path) => {
            let options = sqlx::sqlite::SqliteConnectOptions::new()
                .filename(path)
                .create_if_missing(true)
                .busy_timeout(std::time::Duration::from_secs(10));
            let pool = sqlx::SqlitePool::connect_with(options).await.map_err(failed)?;
            let tier = oncekey::tier::SqliteTier::open(pool.clone()).await.map_err(failed)?;
            sqlx::query(CHARGES).execute(&pool).await.map_err(failed)?;
            tiered(store, tier.clone(), lapse, Books::Sqlite(tier, pool)).await
        }
        #[cfg(feature = "postgres")]
        Place::Postgres(url) => {
            let pool = sqlx::PgPool::connect(url).await.map_err(failed)?;
            let tier = oncekey::tier::PostgresTier::connect(pool.clone()).await.map_err(failed)?;
            sqlx::query(CHARGES).execute(&pool).await.map_err(failed)?;
            tiered(store, tier.clone(), lapse, Books::Postgres(tier, pool)).await
        }
        #[cfg(feature = "redis")]
        Place::Redis(url) => {
            let tier = oncekey::tier::RedisTier::connect(url).await.map_err(failed)?;
            tiered(store, tier, lapse, Books::Memory).await
        }
        #[allow(unreachable_patterns, reason = "with all features there is a case for each")]
        other => {
            let _ = (store, lapse);
            let name = format!("{other:?}").to_lowercase();
            let name = name.split('(').next().unwrap_or_default();
            Err(Failure::Usage(format!("built without it: add --features {name}")))
        }
    }
}

/// The ledger of a SQL database.
#[cfg(any(feature = "sqlite", feature = "postgres"))]
const CHARGES: &str = "CREATE TABLE IF NOT EXISTS charges (id TEXT PRIMARY KEY, account TEXT NOT NULL, \
    intent TEXT NOT NULL, amount_cents BIGINT NOT NULL, currency TEXT NOT NULL)";

#[cfg(feature = "tier")]
async fn tiered(
    store: Store,
    tier: impl oncekey::tier::Tier,
    lapse: Lapse,
    books: Books,
) -> Result<Opened, Failure> {
    let tiered = oncekey::tier::Tiered::open(store, tier, lapse).await.map_err(failed)?;
    Ok(Opened { backing: tiered.clone().into(), books, tiered: Some(tiered) })
}

#[cfg(any(feature = "embedded", feature = "sqlite", feature = "postgres", feature = "redis"))]
fn failed(error: impl fmt::Display) -> Failure {
    Failure::Run(error.to_string())
}
