//! One call of one function: how it is written, how it is tried again, how its answer is read.
//!
//! A call is written in one of two forms. With its arguments apart from the text it is prepared
//! once for each connection, and from then on is one round trip. Through a pooler that hands
//! connections on after each transaction, a prepared statement may be on another connection by the
//! time it is used; there the arguments stand in the text: one round trip, and nothing is prepared.
//! Bytes are then written in hexadecimal, which no setting of a server reads in another way.

use std::{fmt::Write as _, time::Duration};

use bytes::Bytes;
use sqlx::{
    AssertSqlSafe, Decode, PgConnection, PgPool, Postgres, Row as _, Type, postgres::PgRow,
};

use super::borrow::Borrowed;
use crate::{
    Fingerprint, Identity, Outcome, Scheme, Token,
    tier::{Claimed, Found, Landed, NewClaim, Recalls, State, TierError, record::millis},
};

/// What is longer is clamped: a thousand years, in milliseconds. The calendar of Postgres is longer.
const LONGEST: u64 = 1000 * 365 * 24 * 60 * 60 * 1000;

/// How often a call is tried that the server has refused because of others (serialization failures
/// and deadlocks). Each refusal means that another transaction got on.
const TRIES: u32 = 10;

/// How calls are written.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    pub(super) schema: String,
    /// In the text, for a pooler.
    pub(super) inline: bool,
    pub(super) lock_limit: Duration,
}

enum Argument<'a> {
    Bytes(Option<&'a [u8]>),
    Owned(Vec<u8>),
    Number(Option<i64>),
    Word(&'static str),
}

/// A call that was not made yet.
pub(super) struct Call<'a> {
    inline: bool,
    text: String,
    /// What stands behind the arguments.
    end: &'static str,
    arguments: Vec<Argument<'a>>,
}

impl Writer {
    pub(super) fn call<'a>(&self, function: &str) -> Call<'a> {
        self.start("SELECT", function, ")")
    }

    /// A call of a function that answers with rows, of which `columns` are read.
    pub(super) fn rows<'a>(&self, columns: &str, function: &str) -> Call<'a> {
        self.start(&format!("SELECT {columns} FROM"), function, ") AS r")
    }

    fn start<'a>(&self, begin: &str, function: &str, end: &'static str) -> Call<'a> {
        let text = format!("{begin} {}.idempotency_{function}(", self.schema);
        Call { inline: self.inline, text, end, arguments: Vec::with_capacity(12) }
    }

    /// A claim, or a takeover of `seen`.
    pub(super) fn claim<'a>(
        &self,
        function: &str,
        id: Identity<'a>,
        seen: Option<Token>,
        claim: &NewClaim,
    ) -> Call<'a> {
        let call = self.call(function).identity(id);
        let call = match seen {
            Some(seen) => call.token(seen),
            None => call,
        };
        call.token(claim.token)
            .owned(claim.fingerprint.scheme().id().to_vec())
            .owned(claim.fingerprint.digest().to_vec())
            .span(claim.max_run)
            .span(claim.retention)
            .limit(self)
    }

    /// A completion, as a transaction of its own.
    pub(super) fn complete<'a>(
        &self,
        id: Identity<'a>,
        token: Token,
        kept: Kept<'a>,
        retention: Duration,
    ) -> Call<'a> {
        self.call("complete").identity(id).token(token).kept(kept).span(retention).limit(self)
    }

    /// A verb that needs the token: "act", or "act_in" for a transaction of the caller's. `kept` is a status, header lines and a body, or the bytes of a
    /// checkpoint in place of the body.
    pub(super) fn act<'a>(
        &self,
        function: &str,
        verb: &'static str,
        id: Identity<'a>,
        token: Token,
        kept: Kept<'a>,
        retention: Duration,
    ) -> Call<'a> {
        let call = self.call(function).word(verb).identity(id).token(token);
        call.kept(kept).span(retention).limit(self)
    }

    /// A verb of an operator.
    pub(super) fn operate<'a>(
        &self,
        verb: &'static str,
        id: Identity<'a>,
        kept: Kept<'a>,
        retention: Duration,
    ) -> Call<'a> {
        self.call("operate").word(verb).identity(id).kept(kept).span(retention).limit(self)
    }
}

/// What a call leaves in a record.
#[derive(Clone, Copy, Default)]
pub(super) struct Kept<'a> {
    status: Option<u16>,
    headers: Option<&'a [u8]>,
    body: Option<&'a [u8]>,
}

impl<'a> Kept<'a> {
    pub(super) fn outcome(outcome: Option<&'a Outcome>) -> Self {
        let status = outcome.map(Outcome::status);
        let headers = outcome.map(|outcome| &outcome.head()[..]);
        Self { status, headers, body: outcome.map(|outcome| &outcome.bytes()[..]) }
    }

    pub(super) fn checkpoint(bytes: &'a [u8]) -> Self {
        Self { body: Some(bytes), ..Self::default() }
    }
}

impl<'a> Call<'a> {
    fn with(mut self, argument: Argument<'a>) -> Self {
        if !self.arguments.is_empty() {
            self.text.push_str(", ");
        }
        // Writing to a string does not fail.
        let _ = match (&argument, self.inline) {
            (_, false) => write!(self.text, "${}", self.arguments.len() + 1),
            (Argument::Bytes(None) | Argument::Number(None), true) => write!(self.text, "NULL"),
            (Argument::Bytes(Some(bytes)), true) => hexadecimal(&mut self.text, bytes),
            (Argument::Owned(bytes), true) => hexadecimal(&mut self.text, bytes),
            (Argument::Number(Some(number)), true) => write!(self.text, "'{number}'"),
            // Ours, each of them: letters and spaces.
            (Argument::Word(word), true) => write!(self.text, "'{word}'"),
        };
        self.arguments.push(argument);
        self
    }

    pub(super) fn word(self, word: &'static str) -> Self {
        self.with(Argument::Word(word))
    }

    pub(super) fn identity(self, id: Identity<'a>) -> Self {
        [id.account(), id.endpoint(), id.key()]
            .into_iter()
            .fold(self, |call, part| call.with(Argument::Bytes(Some(part))))
    }

    pub(super) fn owned(self, bytes: Vec<u8>) -> Self {
        self.with(Argument::Owned(bytes))
    }

    /// As Postgres has no unsigned numbers, half of them look negative there.
    pub(super) fn number(self, number: Option<u64>) -> Self {
        self.with(Argument::Number(number.map(u64::cast_signed)))
    }

    fn token(self, token: Token) -> Self {
        self.number(Some(token.owner())).number(Some(token.number()))
    }

    fn kept(self, kept: Kept<'a>) -> Self {
        self.number(kept.status.map(u64::from))
            .with(Argument::Bytes(kept.headers))
            .with(Argument::Bytes(kept.body))
    }

    pub(super) fn span(self, span: Duration) -> Self {
        self.number(Some(millis(span).min(LONGEST)))
    }

    /// Postgres takes 0 as "no limit".
    fn limit(self, writer: &Writer) -> Self {
        self.number(Some(millis(writer.lock_limit).clamp(1, i32::MAX as u64)))
    }

    /// Makes the call as a transaction of its own, and again if others were in its way.
    pub(super) async fn by_itself(&self, pool: &PgPool) -> Result<Answered, sqlx::Error> {
        let mut tried = 1;
        loop {
            let mut borrowed = Borrowed::from(pool).await?;
            let answer = self.within(borrowed.connection()?).await;
            borrowed.give_back();
            match answer {
                Err(error) if tried < TRIES && is_refused(&error) => {
                    // The deadlock and the conflict are over by now: a pause is for a third one.
                    tokio::time::sleep(Duration::from_millis(1 << tried.min(6))).await;
                    tried += 1;
                }
                answer => return answer,
            }
        }
    }

    /// Makes the call on a connection, within the transaction that is open there, if any.
    pub(super) async fn within(
        &self,
        connection: &mut PgConnection,
    ) -> Result<Answered, sqlx::Error> {
        // All rows, so until the server says that it is done: a row comes before its commit.
        let text = AssertSqlSafe(format!("{}{}", self.text, self.end));
        let rows = if self.inline {
            sqlx::raw_sql(text).fetch_all(connection).await?
        } else {
            let mut query = sqlx::query(text);
            for argument in &self.arguments {
                query = match argument {
                    Argument::Bytes(bytes) => query.bind(*bytes),
                    Argument::Owned(bytes) => query.bind(&bytes[..]),
                    Argument::Number(number) => query.bind(*number),
                    Argument::Word(word) => query.bind(*word),
                };
            }
            query.fetch_all(connection).await?
        };
        Ok(Answered { rows })
    }
}

fn hexadecimal(text: &mut String, bytes: &[u8]) -> std::fmt::Result {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    text.reserve(20 + 2 * bytes.len());
    text.push_str("decode('");
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text.push_str("', 'hex')");
    Ok(())
}

/// What a call was answered with.
pub(super) struct Answered {
    rows: Vec<PgRow>,
}

impl Answered {
    fn cell<'r, T>(&'r self, column: &str) -> Result<T, TierError>
    where
        T: Decode<'r, Postgres> + Type<Postgres>,
    {
        let row = self.rows.first().ok_or_else(|| TierError::unusable("no row came back"))?;
        row.try_get(column).map_err(TierError::unusable)
    }

    /// The one cell of a function that answers with one.
    pub(super) fn only<'r, T>(&'r self) -> Result<T, TierError>
    where
        T: Decode<'r, Postgres> + Type<Postgres>,
    {
        let row = self.rows.first().ok_or_else(|| TierError::unusable("no row came back"))?;
        row.try_get(0).map_err(TierError::unusable)
    }

    /// What an operator's verb did.
    pub(super) fn word(&self) -> Result<&str, TierError> {
        self.only()
    }

    pub(super) fn claimed(&self, claim: &NewClaim) -> Result<Claimed, TierError> {
        let Some(answer) = self.only::<Option<Vec<u8>>>()? else {
            return Ok(Claimed::Won { checkpoint: None });
        };
        let answer = Told::read(&answer)?;
        match answer.word()? {
            "won" => {
                let checkpoint = answer.bytes(CHECKPOINT).map(Bytes::copy_from_slice);
                Ok(Claimed::Won { checkpoint })
            }
            "met" => Ok(Claimed::Met(answer.record()?)),
            "locked" => Ok(Claimed::Met(unseen(claim))),
            "owner lapsed" => Err(TierError::OwnerLapsed),
            word => unexpected(word),
        }
    }

    pub(super) fn landed(&self) -> Result<Landed, TierError> {
        let Some(answer) = self.only::<Option<Vec<u8>>>()? else { return Ok(Landed::Done) };
        let answer = Told::read(&answer)?;
        match answer.word()? {
            "lost" if answer.bytes(STATE).is_none() => Ok(Landed::Lost(None)),
            "lost" => Ok(Landed::Lost(Some(answer.record()?))),
            word => unexpected(word),
        }
    }

    /// The record that came back, if any.
    pub(super) fn found(&self) -> Result<Option<Found>, TierError> {
        if self.rows.is_empty() {
            return Ok(None);
        }
        Told::read(&self.only::<Vec<u8>>()?)?.record().map(Some)
    }

    pub(super) fn recalls(&self) -> Result<Recalls, TierError> {
        let now = self.cell::<i64>("point")?.cast_unsigned();
        let part = |row: &PgRow, column| {
            row.try_get::<Option<Vec<u8>>, _>(column).map_err(TierError::unusable)
        };
        let mut identities = Vec::new();
        for row in &self.rows {
            let parts = [part(row, "account")?, part(row, "endpoint")?, part(row, "key")?];
            if let [Some(account), Some(endpoint), Some(key)] = parts {
                identities.push([account, endpoint, key]);
            }
        }
        Ok(Recalls { now, identities })
    }
}

/// The fields of an `idempotency_answer`, in its order.
const ANSWER: usize = 0;
const SCHEME: usize = 1;
const FINGERPRINT: usize = 2;
const OWNER: usize = 3;
const NUMBER: usize = 4;
const STATE: usize = 5;
const STATUS: usize = 6;
const HEADERS: usize = 7;
const BODY: usize = 8;
const CHECKPOINT: usize = 9;
const AGE: usize = 10;
const REMAINING: usize = 11;
const FIELDS: usize = 12;

/// An `idempotency_answer` in the bytes that `record_send` makes of it: how many fields there are,
/// 4 bytes; of each its type and its length, 4 bytes each, where -1 is null; and the field.
struct Told<'a> {
    fields: [Option<&'a [u8]>; FIELDS],
}

impl<'a> Told<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, TierError> {
        Self::split(bytes).ok_or_else(damaged)
    }

    fn split(bytes: &'a [u8]) -> Option<Self> {
        let (count, mut rest) = bytes.split_first_chunk()?;
        if i32::from_be_bytes(*count) != FIELDS as i32 {
            return None;
        }
        let mut fields = [None; FIELDS];
        for field in &mut fields {
            let (_type, after) = rest.split_first_chunk::<4>()?;
            let (length, after) = after.split_first_chunk()?;
            rest = after;
            if let Ok(length) = usize::try_from(i32::from_be_bytes(*length)) {
                let (value, after) = rest.split_at_checked(length)?;
                (*field, rest) = (Some(value), after);
            }
        }
        rest.is_empty().then_some(Self { fields })
    }

    fn bytes(&self, field: usize) -> Option<&'a [u8]> {
        self.fields.get(field).copied().flatten()
    }

    fn exactly<const N: usize>(&self, field: usize) -> Result<[u8; N], TierError> {
        self.bytes(field).and_then(|bytes| bytes.try_into().ok()).ok_or_else(damaged)
    }

    /// What the function did.
    fn word(&self) -> Result<&'a str, TierError> {
        let word = self.bytes(ANSWER).and_then(|bytes| std::str::from_utf8(bytes).ok());
        word.ok_or_else(damaged)
    }

    fn record(&self) -> Result<Found, TierError> {
        let number = |field| self.exactly(field).map(u64::from_be_bytes);
        Ok(Found {
            fingerprint: Fingerprint::from_parts(
                Scheme::from_id(self.exactly(SCHEME)?),
                self.exactly(FINGERPRINT)?,
            ),
            token: Token::new(number(OWNER)?, number(NUMBER)?),
            state: match i16::from_be_bytes(self.exactly(STATE)?) {
                0 => State::InFlight,
                1 => State::Held,
                2 => State::Completed(self.outcome()?),
                3 => State::NotKept,
                4 => State::Lapsed,
                _ => return Err(damaged()),
            },
            age: Duration::from_micros(number(AGE)?),
            remaining: Duration::from_micros(number(REMAINING)?),
        })
    }

    fn outcome(&self) -> Result<Outcome, TierError> {
        let status = i32::from_be_bytes(self.exactly(STATUS)?);
        let status = u16::try_from(status).map_err(|_| damaged())?;
        let (Some(head), Some(body)) = (self.bytes(HEADERS), self.bytes(BODY)) else {
            return Err(damaged());
        };
        let (length, head) = (head.len(), Bytes::copy_from_slice(head));
        let outcome = Outcome::from_parts(status, head, Bytes::copy_from_slice(body));
        let lines = outcome.header_lines().map(|(name, value)| 6 + name.len() + value.len());
        if lines.sum::<usize>() != length {
            return Err(damaged());
        }
        Ok(outcome)
    }
}

pub(super) fn unexpected<T>(word: &str) -> Result<T, TierError> {
    Err(TierError::unusable(format!("a function of the schema answered {word:?}")))
}

/// What a claim that ran into another open transaction is told: a record that cannot be seen, so
/// with the claim's own fingerprint and the token of nobody.
pub(super) fn unseen(claim: &NewClaim) -> Found {
    Found {
        fingerprint: claim.fingerprint,
        token: Token::new(0, 0),
        state: State::InFlight,
        age: Duration::ZERO,
        remaining: Duration::ZERO,
    }
}

fn damaged() -> TierError {
    TierError::unusable(
        "a row of idempotency_keys holds what this program has not written: it was changed by \
         hand, or by a newer version of Oncekey",
    )
}

fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(String::from)
}

/// Whether the server has undone the call because of what others did.
fn is_refused(error: &sqlx::Error) -> bool {
    matches!(code(error).as_deref(), Some("40001" | "40P01"))
}

/// Whether the call has waited too long for another transaction.
pub(super) fn is_locked_out(error: &sqlx::Error) -> bool {
    code(error).as_deref() == Some("55P03")
}

/// What an error of the driver means for the caller.
pub(super) fn failed(error: sqlx::Error) -> TierError {
    let advice = match code(&error).as_deref() {
        Some("55P03") => {
            return TierError::Locked(Box::new(error));
        }
        Some("26000" | "42P05") => {
            "a pooler hands connections on after each transaction: set `through_pooler`"
        }
        Some("42501") => "the role needs USAGE on the schema and all rights on its tables",
        Some("3F000" | "42P01" | "42883" | "42704") => {
            "the tables or functions are not there: they are made by `connect`"
        }
        Some("53100") => "the server's disk is full",
        Some(code) if code.starts_with("28") || code == "3D000" => {
            "the server does not let this role into this database"
        }
        Some(code) if ["0A", "22", "23", "42"].contains(&&code[..code.len().min(2)]) => {
            "the server does not do what the schema asks of it"
        }
        Some(_) => return TierError::unavailable(error),
        None => match &error {
            sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => {
                return TierError::unavailable(error);
            }
            sqlx::Error::Configuration(_) | sqlx::Error::Tls(_) => "see the pool's settings",
            sqlx::Error::Protocol(_) => return TierError::unavailable(error),
            _ => "the driver could not read what came back",
        },
    };
    TierError::unusable(format!("{advice}: {error}"))
}
