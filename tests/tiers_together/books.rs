//! The user's own database where the tier lies in one: its transactions.

use sqlx::{AssertSqlSafe, Postgres, Row as _, Sqlite, Transaction};

use super::*;

pub(crate) enum Books {
    /// The tier is in no database.
    None,
    Sqlite(SqliteTier, SqlitePool),
    Postgres(PostgresTier, sqlx::PgPool),
}

/// A transaction of the user's own. It writes.
pub(crate) enum Open {
    Sqlite(SqliteTier, Transaction<'static, Sqlite>),
    Postgres(PostgresTier, Transaction<'static, Postgres>),
}

impl Books {
    pub(crate) async fn begin(&self) -> Option<Open> {
        Some(match self {
            Self::None => return None,
            Self::Sqlite(tier, pool) => {
                Open::Sqlite(tier.clone(), pool.begin_with("BEGIN IMMEDIATE").await.unwrap())
            }
            Self::Postgres(tier, pool) => Open::Postgres(tier.clone(), pool.begin().await.unwrap()),
        })
    }

    /// The number that a query answers.
    pub(crate) async fn count(&self, query: &str) -> i64 {
        let query = AssertSqlSafe(query);
        match self {
            Self::None => panic!("no database"),
            Self::Sqlite(_, pool) => sqlx::query(query).fetch_one(pool).await.unwrap().get(0),
            Self::Postgres(_, pool) => sqlx::query(query).fetch_one(pool).await.unwrap().get(0),
        }
    }
}

impl Open {
    pub(crate) async fn execute(&mut self, statement: &str) {
        let statement = AssertSqlSafe(statement);
        match self {
            Self::Sqlite(_, tx) => drop(sqlx::query(statement).execute(&mut **tx).await.unwrap()),
            Self::Postgres(_, tx) => drop(sqlx::query(statement).execute(&mut **tx).await.unwrap()),
        }
    }

    pub(crate) async fn complete(&mut self, key: &str, token: Token, with: &Outcome) -> Landed {
        let landed = match self {
            Self::Sqlite(tier, tx) => tier.complete_in(tx, id(key), token, Some(with), LONG).await,
            Self::Postgres(tier, tx) => {
                tier.complete_in(tx, id(key), token, Some(with), LONG).await
            }
        };
        landed.unwrap()
    }

    pub(crate) async fn end(self, commits: bool) {
        match (self, commits) {
            (Self::Sqlite(_, tx), true) => tx.commit().await.unwrap(),
            (Self::Sqlite(_, tx), false) => tx.rollback().await.unwrap(),
            (Self::Postgres(_, tx), true) => tx.commit().await.unwrap(),
            (Self::Postgres(_, tx), false) => tx.rollback().await.unwrap(),
        }
    }
}
