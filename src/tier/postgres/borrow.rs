//! A connection of the pool, for one call.
//!
//! Ground rules: a server or a firewall may go without a word, and then a connection is silent for ever.
//! So who gives up in the middle of a call closes his connection, and one that comes back to the pool is
//! asked for [`PATIENCE`] whether it is still there. The pool itself asks without a limit and keeps the
//! place meanwhile (sqlx 0.9, its issue 4349): with as many of those as it has connections nobody gets
//! one any more.

use std::time::Duration;

use sqlx::{PgConnection, PgPool, Postgres, pool::PoolConnection};
use tokio::time::timeout;

/// How long a connection may take to answer that it is still there.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Borrowed {
    /// Until it is given back.
    connection: Option<PoolConnection<Postgres>>,
}

impl Borrowed {
    pub(super) async fn from(pool: &PgPool) -> Result<Self, sqlx::Error> {
        Ok(Self { connection: Some(pool.acquire().await?) })
    }

    pub(super) fn connection(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        self.connection.as_deref_mut().ok_or(sqlx::Error::PoolClosed)
    }

    /// After a call that has ended.
    pub(super) fn give_back(mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        tokio::spawn(async move {
            // One that says nothing is dropped with the future that asks it, and its place is free.
            let _ = timeout(PATIENCE, connection.return_to_pool()).await;
        });
    }
}

impl Drop for Borrowed {
    /// In the middle of a call: nobody knows what the connection would say next.
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.close_on_drop();
        }
    }
}
