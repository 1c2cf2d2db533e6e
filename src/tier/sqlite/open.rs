//! What must be true of a database file before the tier works in it, and how it becomes so.

use std::path::PathBuf;

use sqlx::{
    ConnectOptions, Connection, Row, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteSynchronous},
};

use super::fault::Fault;
use crate::tier::Durability;

/// Each makes one version of the tables from the one before it.
const MIGRATIONS: [&str; 1] = [include_str!("schema_1.sql")];

pub(super) async fn connect(options: &SqliteConnectOptions) -> Result<SqliteConnection, Fault> {
    Ok(options.connect().await?)
}

/// Where the database of a connection lies, and its [`rank`]. The path of one in memory is empty.
pub(super) async fn described(connection: &mut SqliteConnection) -> Result<(PathBuf, i64), Fault> {
    let describe = "SELECT file, synchronous FROM pragma_database_list, pragma_synchronous
                    WHERE name = 'main'";
    let row = sqlx::query(describe).fetch_one(connection).await?;
    let path = row.try_get::<Option<String>, _>(0)?.unwrap_or_default();
    Ok((PathBuf::from(path), row.try_get(1)?))
}

/// In WAL mode readers and one writer do not wait for each other, and a commit is one `fsync`. The
/// file keeps the mode.
pub(super) async fn use_wal(connection: &mut SqliteConnection) -> Result<(), Fault> {
    let row = sqlx::query("PRAGMA journal_mode = WAL").fetch_one(connection).await?;
    match row.try_get::<String, _>(0)? {
        mode if mode.eq_ignore_ascii_case("wal") => Ok(()),
        mode => Err(Fault::lasting(format!(
            "the database stays in journal mode `{mode}`, but the tier needs WAL: does its file \
             system, or its VFS, lack shared memory?"
        ))),
    }
}

/// Makes the tables, or brings them up to this version. Answers the stamp.
pub(super) async fn migrate(connection: &mut SqliteConnection) -> Result<u64, Fault> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    let ours = "SELECT count(*) FROM sqlite_schema WHERE name = 'idempotency_schema'";
    let exists = sqlx::query(ours).fetch_one(&mut *transaction).await?.try_get::<i64, _>(0)? > 0;
    let known = MIGRATIONS.len();
    let version = if exists { one_row(&mut transaction, "version").await? } else { 0 };
    let done = usize::try_from(version).ok().filter(|version| *version <= known);
    let Some(done) = done else {
        return Err(Fault::lasting(format!(
            "its tables are of version {version}, but this program knows {known}: they were made by \
             a newer version of Oncekey"
        )));
    };
    for migration in &MIGRATIONS[done..] {
        sqlx::raw_sql(*migration).execute(&mut *transaction).await?;
    }
    // A database that cannot be written lets a transaction begin, and be committed if it is empty.
    sqlx::query("UPDATE idempotency_schema SET stamp = stamp").execute(&mut *transaction).await?;
    let stamp = one_row(&mut transaction, "stamp").await?;
    transaction.commit().await?;
    Ok(stamp.cast_unsigned())
}

async fn one_row(connection: &mut SqliteConnection, column: &str) -> Result<i64, Fault> {
    let row = sqlx::query("SELECT version, stamp FROM idempotency_schema")
        .fetch_optional(connection)
        .await?;
    let row = row.ok_or_else(|| Fault::lasting("the table `idempotency_schema` is empty"))?;
    Ok(row.try_get(column)?)
}

/// A connection with the options of the user's pool, while one in WAL mode is open. If they set
/// another mode, SQLite refuses to change it: then the pool could make no connection either.
pub(super) async fn connect_as_pool(
    options: &SqliteConnectOptions,
) -> Result<SqliteConnection, Fault> {
    let connection = connect(options).await;
    connection.map_err(|fault| {
        let text = fault.during("the pool's options are not usable, do they set a journal mode?");
        Fault::lasting(text.to_string())
    })
}

pub(super) fn synchronous(durability: Durability) -> SqliteSynchronous {
    match durability {
        Durability::PowerLoss => SqliteSynchronous::Full,
        Durability::KilledProcess => SqliteSynchronous::Normal,
    }
}

/// What `PRAGMA synchronous` says of it: more is safer.
pub(super) fn rank(durability: Durability) -> i64 {
    match durability {
        Durability::PowerLoss => 2,
        Durability::KilledProcess => 1,
    }
}
