//! Values instead of bytes: a codec, whose name and version stand in each record.

use std::{fmt, future::Future};

use serde_core::{Serialize, de::DeserializeOwned};

use super::{Job, Ran, RunError, Verdict, Worker, owner::Ending, verdict::Cause};
use crate::{Fingerprint, Identity, Outcome};

/// The header line of an outcome that names its codec.
const LINE: &str = "oncekey-codec";

/// The status of an outcome that stands for a value.
const STATUS: u16 = 200;

/// How values become the bytes that are kept, and come back from them. `serde_core` has the traits of
/// serde; `serde` hands on the same ones.
///
/// ```
/// use oncekey::worker::{Cause, Codec};
/// use serde_json::Value;
///
/// /// JSON with indentation, for records that people read.
/// struct Pretty;
///
/// impl Codec for Pretty {
///     fn name(&self) -> &str {
///         "pretty-json"
///     }
///     fn version(&self) -> u32 {
///         1
///     }
///     fn encode<T: serde_core::Serialize>(&self, value: &T) -> Result<Vec<u8>, Cause> {
///         serde_json::to_vec_pretty(value).map_err(|error| Cause::from(Box::from(error)))
///     }
///     fn decode<T: serde_core::de::DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Cause> {
///         serde_json::from_slice(bytes).map_err(|error| Cause::from(Box::from(error)))
///     }
/// }
/// ```
pub trait Codec {
    /// What stands in each record: another name is another codec.
    fn name(&self) -> &str;

    /// Raise it when records of before cannot be read any more, or would be read wrongly: because the
    /// format has changed, or the values' type.
    fn version(&self) -> u32;

    /// The bytes of `value`.
    ///
    /// # Errors
    ///
    /// Why there are none.
    fn encode<T: Serialize>(&self, value: &T) -> Result<Vec<u8>, Cause>;

    /// The value of `bytes`, which [`encode`](Self::encode) has made.
    ///
    /// # Errors
    ///
    /// Why there is none.
    fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Cause>;
}

/// JSON by `serde_json`. Its version is that of the values' type: 1, or what is said.
///
/// ```
/// use oncekey::worker::{Codec, Json};
///
/// assert_eq!((Json::default().name(), Json::default().version()), ("json", 1));
/// assert_eq!(Json::version_of(2).version(), 2); // the type has changed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Json {
    version: u32,
}

impl Json {
    /// JSON of values whose type is at `version`.
    pub const fn version_of(version: u32) -> Self {
        Self { version }
    }
}

impl Default for Json {
    fn default() -> Self {
        Self::version_of(1)
    }
}

impl Codec for Json {
    fn name(&self) -> &str {
        "json"
    }

    fn version(&self) -> u32 {
        self.version
    }

    fn encode<T: Serialize>(&self, value: &T) -> Result<Vec<u8>, Cause> {
        serde_json::to_vec(value).map_err(cause)
    }

    fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Cause> {
        serde_json::from_slice(bytes).map_err(cause)
    }
}

fn cause(error: serde_json::Error) -> Cause {
    Cause::from(Box::<dyn std::error::Error + Send + Sync>::from(error))
}

/// Why a value could not be read from its record, or written. The work is done in any case.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CodecError {
    /// The record was written by another codec, or another version of it.
    Foreign {
        /// Name and version in the record, such as `json/1`; `None` if it names none.
        found: Option<String>,
        /// What was to read it.
        expected: String,
    },
    /// The bytes are not those of such a value.
    Decode(Cause),
    /// The value has no bytes. The key was completed as "not kept".
    Encode(Cause),
}

impl fmt::Display for CodecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign { found: Some(found), expected } => write!(
                f,
                "the record was written by codec `{found}`, and this worker reads `{expected}`: let a \
                 worker of that version read it, or wait until its retention ends"
            ),
            Self::Foreign { found: None, expected } => write!(
                f,
                "the record names no codec, and this worker reads `{expected}`: it was completed with \
                 bytes, by a worker or a layer without types"
            ),
            Self::Decode(cause) => write!(
                f,
                "the record cannot be read as this type: {cause}; raise the codec's version when the \
                 type changes"
            ),
            Self::Encode(cause) => {
                write!(f, "the work is done, but its value cannot be written: {cause}")
            }
        }
    }
}

impl std::error::Error for CodecError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Foreign { .. } => None,
            Self::Decode(cause) | Self::Encode(cause) => Some(&**cause),
        }
    }
}

/// A [`Worker`] whose work gives values. Made by [`Worker::typed`].
#[derive(Clone, Debug)]
pub struct Typed<C> {
    worker: Worker,
    codec: C,
}

impl Worker {
    /// The same with values in the place of bytes, by a codec whose name and version stand in each
    /// record. `T` may be anything of serde.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use oncekey::{Fingerprint, Identity, Store};
    /// use oncekey::worker::{CodecError, Json, RunError, Verdict, Worker};
    ///
    /// let worker = Worker::from(Store::builder().build()?).typed(Json::default());
    /// let id = Identity::new("acct_42", "charge", "invoice-7")?;
    /// let fp = Fingerprint::request("", "charge", b"1200 usd");
    ///
    /// let charge = |id: &str| Verdict::Done((id.to_owned(), 1200_u64));
    /// let first = worker.run(&id, fp, |_| async { charge("ch_1") }).await?;
    /// let again = worker.run(&id, fp, |_| async { charge("ch_2") }).await?;
    /// assert_eq!(again.outcome, first.outcome);
    ///
    /// // A later version of the program does not misread what an earlier one has left.
    /// let later = Worker::from(worker.worker().clone()).typed(Json::version_of(2));
    /// let read = later.run(&id, fp, |_| async { charge("ch_3") }).await;
    /// assert!(matches!(read, Err(RunError::Codec(CodecError::Foreign { .. }))));
    /// # Ok(())
    /// # }
    /// ```
    pub fn typed<C: Codec>(self, codec: C) -> Typed<C> {
        Typed { worker: self, codec }
    }
}

impl<C: Codec> Typed<C> {
    /// The worker beneath, which speaks of bytes.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// As [`Worker::run`], with a value. One that cannot be written is done all the same: its key is
    /// completed as "not kept".
    ///
    /// # Errors
    ///
    /// As for [`Worker::run`], and [`RunError::Codec`] if the value cannot be written or, of an earlier
    /// attempt, not be read.
    pub async fn run<T, F, Fut>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran<T>, RunError>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce(Job) -> Fut,
        Fut: Future<Output = Verdict<T>>,
    {
        let mut owner = match self.worker.own(id, fingerprint).await {
            Ok(owner) => owner,
            Err(told) => return self.read(told?),
        };
        let said = work(owner.begin()).await;
        let (ending, failed) = self.ending(said);
        self.told(owner.settle(ending).done().await, failed)
    }

    /// As [`Worker::run_blocking`], with a value.
    ///
    /// # Errors
    ///
    /// As for [`run`](Self::run).
    ///
    /// # Panics
    ///
    /// As [`Worker::run_blocking`].
    pub fn run_blocking<T, F>(
        &self,
        id: &Identity<'_>,
        fingerprint: Fingerprint,
        work: F,
    ) -> Result<Ran<T>, RunError>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce(Job) -> Verdict<T>,
    {
        let _entered = self.worker.enter();
        let mut owner = match self.worker.own_blocking(id, fingerprint) {
            Ok(owner) => owner,
            Err(told) => return self.read(told?),
        };
        let (ending, failed) = self.ending(work(owner.begin()));
        self.told(self.worker.await_blocking(owner.settle(ending)), failed)
    }

    /// The outcome that stands for `value`: what [`Job::complete_in`] is given.
    ///
    /// # Errors
    ///
    /// [`CodecError::Encode`]: roll back.
    pub fn outcome<T: Serialize>(&self, value: &T) -> Result<Outcome, CodecError> {
        let bytes = self.codec.encode(value).map_err(CodecError::Encode)?;
        Ok(Outcome::new(STATUS).header(LINE, self.stamp()).body(bytes))
    }

    /// The value that `outcome` stands for.
    ///
    /// # Errors
    ///
    /// [`CodecError`] if another codec or version has written it, or its bytes are of no such value.
    pub fn value<T: DeserializeOwned>(&self, outcome: &Outcome) -> Result<T, CodecError> {
        let named = outcome.header_lines().find(|(name, _)| *name == LINE.as_bytes());
        let expected = self.stamp();
        if named.is_none_or(|(_, found)| found != expected.as_bytes()) {
            let found = named.map(|(_, found)| String::from_utf8_lossy(found).into_owned());
            return Err(CodecError::Foreign { found, expected });
        }
        self.codec.decode(outcome.bytes()).map_err(CodecError::Decode)
    }

    fn stamp(&self) -> String {
        format!("{}/{}", self.codec.name(), self.codec.version())
    }

    fn read<T: DeserializeOwned>(&self, ran: Ran) -> Result<Ran<T>, RunError> {
        let value = self.value(&ran.outcome).map_err(RunError::Codec)?;
        Ok(ran.map(value))
    }

    /// How the key ends, and why the value has no bytes.
    fn ending<T: Serialize>(&self, said: Verdict<T>) -> (Ending, Option<CodecError>) {
        let said = match said {
            Verdict::Done(value) => match self.outcome(&value) {
                Ok(outcome) => Verdict::Done(outcome),
                Err(error) => return (Ending::NotKept, Some(error)),
            },
            Verdict::Committed => Verdict::Committed,
            Verdict::Retry(cause) => Verdict::Retry(cause),
            Verdict::Unknown(cause) => Verdict::Unknown(cause),
        };
        (Ending::Said(said), None)
    }

    /// The first caller reads its value too: it is what all others get.
    fn told<T: DeserializeOwned>(
        &self,
        told: Result<Ran, RunError>,
        failed: Option<CodecError>,
    ) -> Result<Ran<T>, RunError> {
        match (told, failed) {
            (Err(RunError::NotKept), Some(error)) => Err(RunError::Codec(error)),
            (told, _) => self.read(told?),
        }
    }
}
