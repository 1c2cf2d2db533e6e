//! The request body comes in: limited in size, in time, and in what all hold together (R19).
//!
//! Ground rules:
//!
//! 1. Nothing here is polled before the head of the request has passed all checks, so that a client
//!    which sent `Expect: 100-continue` is not told to go on for nothing.
//! 2. A byte that is buffered is charged to the [`Budget`] before its room is allocated, and until
//!    the last holder of the buffer, which may be the handler, has dropped it.
//! 3. A body that was refused is not cut off at once ([`linger`]): a client, or a proxy, that is still
//!    writing would meet a closed connection, and most never read the answer that came before.
//! 4. A duplicate that waits gives its own copy up for an equal one that is listed in [`Bodies`].
//!    The list holds its entries weakly: it never keeps a body alive.

use std::{
    collections::{HashMap, hash_map::Entry},
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Version, header, request::Parts};
use http_body::{Body, Frame};
use http_body_util::LengthLimitError;
use parking_lot::Mutex;

use super::{BoxError, shares::Share};

/// A first allocation, if the client does not say how much will come, or says much.
const FIRST: usize = 8 * 1024;

/// How much there may be of something at once: of bytes of all buffered bodies, or of owners.
pub(crate) struct Budget {
    max: usize,
    used: AtomicUsize,
}

impl Budget {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, used: AtomicUsize::new(0) }
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Relaxed suffices: the number guards no other memory.
    fn take(&self, bytes: usize) -> bool {
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|&sum| sum <= self.max)
            })
            .is_ok()
    }
}

/// What one buffer, or one owner, holds of the budget, and of its account's share where that is limited.
/// Dropping it gives the room back.
pub(crate) struct Charge {
    budget: Arc<Budget>,
    share: Option<Share>,
    bytes: usize,
}

impl Charge {
    /// A charge of nothing yet.
    pub(crate) fn new(budget: &Arc<Budget>, share: Option<Share>) -> Self {
        Self { budget: Arc::clone(budget), share, bytes: 0 }
    }

    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), Refused> {
        let more = bytes.saturating_sub(self.bytes);
        if self.share.as_mut().is_some_and(|share| !share.grow(more)) {
            return Err(Refused::OverShare);
        }
        if more > 0 && !self.budget.take(more) {
            if let Some(share) = &mut self.share {
                share.shrink(more);
            }
            return Err(Refused::NoRoom);
        }
        self.bytes += more;
        Ok(())
    }

    fn shrink_to(&mut self, bytes: usize) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.bytes -= surplus;
        if let Some(share) = &mut self.share {
            share.shrink(surplus);
        }
        self.budget.used.fetch_sub(surplus, Ordering::Relaxed);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// Body bytes in memory; clones share them.
#[derive(Clone)]
pub(crate) struct BodyBytes(Arc<Buffer>);

struct Buffer {
    bytes: Box<[u8]>,
    /// Dropped with the buffer: that is all it is for.
    _charge: Charge,
}

impl BodyBytes {
    /// For the handler. The charge lasts as long as any of these bytes.
    pub(crate) fn into_bytes(self) -> Bytes {
        if self.as_ref().is_empty() { Bytes::new() } else { Bytes::from_owner(self) }
    }

    /// To list them by, without keeping them. None are not listed.
    pub(crate) fn faint(&self) -> Option<Faint> {
        (!self.as_ref().is_empty()).then(|| Faint(Arc::downgrade(&self.0)))
    }
}

impl AsRef<[u8]> for BodyBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// Body bytes that somebody else may hold, or not any more.
pub(crate) struct Faint(Weak<Buffer>);

/// A request body that came in whole.
pub(crate) struct Received {
    pub(crate) bytes: BodyBytes,
    pub(crate) trailers: Option<Box<HeaderMap>>,
}

/// Why a body did not come in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    TooLarge,
    TooSlow,
    /// The budget is spent.
    NoRoom,
    /// The account's share of it is.
    OverShare,
    /// The body broke off, or was malformed.
    Broken,
}

/// Whether the head already says that the body is too large.
pub(crate) fn is_announced_too_large<B: Body>(headers: &HeaderMap, body: &B, max: usize) -> bool {
    let size = body.size_hint();
    let announced = || {
        let value = headers.get(header::CONTENT_LENGTH)?;
        value.to_str().ok()?.trim().parse().ok()
    };
    // A body that knows its size is not asked twice.
    let most = size.exact().unwrap_or_else(|| size.lower().max(announced().unwrap_or(0)));
    most > max as u64
}

/// A body on its way in.
pub(crate) struct Reading {
    bytes: Vec<u8>,
    trailers: Option<Box<HeaderMap>>,
    /// How many bytes will come, if the body knows.
    announced: Option<usize>,
    charge: Charge,
}

impl Reading {
    pub(crate) fn new(announced: Option<u64>, charge: Charge) -> Self {
        let announced = announced.and_then(|size| usize::try_from(size).ok());
        Self { bytes: Vec::new(), trailers: None, announced, charge }
    }

    /// Reads on, to the end of the body.
    pub(crate) fn poll<B>(
        &mut self,
        mut body: Pin<&mut B>,
        max: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Refused>>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        while !body.is_end_stream() {
            let Some(frame) = ready!(body.as_mut().poll_frame(cx)) else { break };
            let frame = frame.map_err(|error| why_broken(error.into()))?;
            match frame.into_data() {
                Ok(chunk) => self.take(&chunk, max)?,
                Err(frame) => self.trailers = frame.into_trailers().ok().map(Box::new),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn take(&mut self, chunk: &[u8], max: usize) -> Result<(), Refused> {
        let Self { bytes, announced, charge, .. } = self;
        let len = bytes.len().checked_add(chunk.len()).ok_or(Refused::TooLarge)?;
        if len > max {
            return Err(Refused::TooLarge);
        }
        if len > bytes.capacity() {
            let room = room(len, bytes.capacity(), *announced).min(max);
            charge.grow_to(room)?;
            bytes.reserve_exact(room - bytes.len());
        }
        bytes.extend_from_slice(chunk);
        Ok(())
    }

    /// What came.
    pub(crate) fn received(self) -> Received {
        let Self { bytes, trailers, mut charge, .. } = self;
        // Also gives back what doubling took too much.
        let bytes = bytes.into_boxed_slice();
        charge.shrink_to(bytes.len());
        Received { bytes: BodyBytes(Arc::new(Buffer { bytes, _charge: charge })), trailers }
    }
}

/// Reads on, for nobody, what is still coming of a body that was refused: `max` bytes at most, for as
/// long as a body may take, while the answer is on its way (RFC 9112, 9.6).
///
/// HTTP/2 needs none of this, where an answer does not end the connection. A client that asks before
/// it sends is not told to.
pub(crate) fn linger<E, P>(mut poll_frame: P, max: usize, limit: Duration)
where
    P: FnMut(&mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, E>>> + Send + 'static,
    E: 'static,
{
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let reading = async move {
        let mut left = max;
        while let Some(Ok(frame)) = poll_fn(&mut poll_frame).await {
            let len = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(len) {
                Some(rest) => left = rest,
                None => break,
            }
        }
    };
    drop(runtime.spawn(tokio::time::timeout(limit, reading)));
}

/// Whether nothing is to come of a refused body that anybody should [`linger`] for.
pub(crate) fn is_over<B: Body>(parts: &Parts, body: &B, max: usize) -> bool {
    body.is_end_stream()
        || parts.version >= Version::HTTP_2
        || parts.headers.contains_key(header::EXPECT)
        || body.size_hint().lower() > max as u64
}

/// How much room to make for `len` bytes: doubling, as a vector would, or what was announced. That
/// is a promise only, so it is believed up to four times of what is taken without it.
fn room(len: usize, capacity: usize, announced: Option<usize>) -> usize {
    let doubled = capacity.saturating_mul(2).max(FIRST).max(len);
    announced.filter(|&size| size >= len && size <= doubled.saturating_mul(4)).unwrap_or(doubled)
}

/// A limit that was set outside of the layer shows as an error of the body.
fn why_broken(error: BoxError) -> Refused {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error.as_ref());
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return Refused::TooLarge;
        }
        cause = error.source();
    }
    Refused::Broken
}

/// The bodies at work, by the digest of a fingerprint that covers all their bytes: equal digests
/// mean equal bytes.
#[derive(Default)]
pub(crate) struct Bodies {
    shards: [Mutex<Shard>; 16],
}

/// Keyed by ahash: each request that runs goes through it.
type Shard = HashMap<[u8; 32], Weak<Buffer>, ahash::RandomState>;

impl Bodies {
    fn shard(&self, digest: &[u8; 32]) -> &Mutex<Shard> {
        &self.shards[usize::from(digest[0] % 16)]
    }

    /// Lists a body until the guard is dropped. The latest entry of a digest stands.
    pub(crate) fn list(self: &Arc<Self>, digest: [u8; 32], body: Faint) -> Listed {
        let Faint(entry) = body;
        let listed = Listed { bodies: Arc::clone(self), digest, buffer: entry.as_ptr().addr() };
        if entry.strong_count() > 0 {
            self.shard(&digest).lock().insert(digest, entry);
        }
        listed
    }

    /// The listed body of this digest, if someone still holds it.
    pub(crate) fn find(&self, digest: &[u8; 32]) -> Option<BodyBytes> {
        self.shard(digest).lock().get(digest)?.upgrade().map(BodyBytes)
    }
}

/// Takes its entry off the list when dropped, unless another has taken the place.
pub(crate) struct Listed {
    bodies: Arc<Bodies>,
    digest: [u8; 32],
    /// Where it is: its entry keeps the place from being another's. Should another entry have taken
    /// that one's place, and the buffer of a third this one's, that one is taken off, and is not
    /// shared.
    buffer: usize,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut shard = self.bodies.shard(&self.digest).lock();
        if let Entry::Occupied(entry) = shard.entry(self.digest)
            && entry.get().as_ptr().addr() == self.buffer
        {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use http_body_util::{Full, Limited, StreamBody};

    use super::*;

    fn chunks(parts: &'static [&'static [u8]]) -> impl Body<Data = Bytes, Error = BoxError> {
        let frames = parts.iter().map(|part| Ok(Frame::data(Bytes::from_static(part))));
        StreamBody::new(futures_util::stream::iter(frames.collect::<Vec<_>>()))
    }

    fn budget(max: usize) -> Arc<Budget> {
        Arc::new(Budget::new(max))
    }

    async fn read<B>(body: B, max: usize, budget: &Arc<Budget>) -> Result<Received, Refused>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let mut reading = Reading::new(body.size_hint().exact(), Charge::new(budget, None));
        let mut body = pin!(body);
        poll_fn(|cx| reading.poll(body.as_mut(), max, cx)).await?;
        Ok(reading.received())
    }

    #[tokio::test]
    async fn r19_the_limit_itself_is_allowed_and_one_more_is_not() {
        let budget = budget(1_000_000);
        for (max, fits) in [(5, false), (6, true), (7, true)] {
            let body = chunks(&[b"abc", b"", b"def"]);
            let read = read(body, max, &budget).await;
            assert_eq!(read.is_ok(), fits);
            if let Ok(read) = read {
                assert_eq!(read.bytes.as_ref(), b"abcdef");
            }
            assert_eq!(budget.used(), 0);
        }
        let read = read(Full::new(Bytes::new()), 0, &budget).await.unwrap();
        assert!(read.bytes.as_ref().is_empty());
    }

    #[tokio::test]
    async fn r19_all_buffered_bytes_are_charged_until_the_last_holder_drops_them() {
        let budget = budget(100_000);
        let full = |len: usize| Full::new(Bytes::from(vec![1; len]));
        let first = read(full(60_000), 1 << 20, &budget).await.unwrap();
        assert_eq!(budget.used(), 60_000);
        let second = read(full(40_001), 1 << 20, &budget).await;
        assert_eq!(second.err(), Some(Refused::NoRoom));
        let of_handler = first.bytes.clone().into_bytes().slice(..1);
        drop(first);
        assert_eq!(budget.used(), 60_000);
        drop(of_handler);
        assert_eq!(budget.used(), 0);
        let whole = read(full(100_000), 1 << 20, &budget).await;
        assert!(whole.is_ok(), "a body of known size takes no more than its size");
    }

    #[tokio::test]
    async fn r19_a_body_that_breaks_off_or_stalls_holds_nothing() {
        let budget = budget(1_000_000);
        let frames = [Ok(Frame::data(Bytes::from_static(b"abc"))), Err(BoxError::from("cut"))];
        let cut = StreamBody::new(futures_util::stream::iter(frames));
        assert_eq!(read(cut, 9, &budget).await.err(), Some(Refused::Broken));

        let outer = Limited::new(chunks(&[b"abcdef"]), 5);
        assert_eq!(read(outer, 9, &budget).await.err(), Some(Refused::TooLarge));

        let endless = StreamBody::new(futures_util::stream::pending::<Result<_, BoxError>>());
        let slow = tokio::time::timeout(Duration::from_millis(1), read(endless, 9, &budget)).await;
        assert!(slow.is_err());
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn r19_equal_bodies_are_shared_while_one_is_listed() {
        let budget = budget(1_000_000);
        let body = || async { read(chunks(&[b"abc"]), 9, &budget).await };
        let (first, second) = (body().await.unwrap().bytes, body().await.unwrap().bytes);
        let bodies = Arc::new(Bodies::default());
        assert!(bodies.find(&[7; 32]).is_none());
        let listed = bodies.list([7; 32], first.faint().unwrap());
        assert!(Arc::ptr_eq(&bodies.find(&[7; 32]).unwrap().0, &first.0));

        let later = bodies.list([7; 32], second.faint().unwrap());
        drop(listed);
        assert!(Arc::ptr_eq(&bodies.find(&[7; 32]).unwrap().0, &second.0));
        drop(second);
        assert!(bodies.find(&[7; 32]).is_none(), "the list keeps nothing alive");
        drop(later);
        assert!(bodies.shards.iter().all(|shard| shard.lock().is_empty()));
    }
}
