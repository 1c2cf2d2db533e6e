//! The body of an answer: as far as it was read before it counted as come, and the rest.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf, Bytes};
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use pin_project_lite::pin_project;

pin_project! {
    /// The body of a response of [`Intents`](super::Intents): the inner client's, of which some or all
    /// has been read already, up to [`max_answer`](super::IntentLayer::max_answer). It comes in the
    /// same frames, trailers included. Read it as any other, for instance with `http_body_util::BodyExt`.
    ///
    /// Its errors are those of the inner body, where that breaks off behind what was read. Then
    /// nothing is tried again; ask once more under the key of the [`Report`](super::Report).
    pub struct AnswerBody<B> {
        read: VecDeque<Frame<Bytes>>,
        #[pin]
        rest: Option<B>,
    }
}

/// What a frame takes in memory beside its bytes, so that a million empty ones are not for nothing.
const FRAME: u64 = size_of::<Frame<Bytes>>() as u64;

impl<B: Body> AnswerBody<B> {
    /// Nothing of it is read.
    pub(super) fn unread(body: B) -> Self {
        Self { read: VecDeque::new(), rest: Some(body) }
    }

    /// Reads `body` to its end, if that comes within `most` bytes, else as far as that. An event
    /// stream has no end that is worth waiting for.
    pub(super) async fn read(body: B, headers: &HeaderMap, most: u64) -> Result<Self, B::Error>
    where
        B: Unpin,
    {
        let mut answer = Self::unread(body);
        if most == 0 || is_event_stream(headers) {
            return Ok(answer);
        }
        let mut taken = 0_u64;
        while let Some(rest) = &mut answer.rest {
            if taken.saturating_add(rest.size_hint().lower()) > most {
                break;
            }
            match rest.frame().await.transpose()? {
                Some(frame) => {
                    let frame = in_one_piece(frame);
                    taken += FRAME + frame.data_ref().map_or(0, |data| data.len() as u64);
                    answer.read.push_back(frame);
                }
                None => answer.rest = None,
            }
        }
        Ok(answer)
    }

    /// The bytes that are there, if the body has been read to its end.
    pub(super) fn whole(&self) -> Option<Vec<u8>> {
        let bytes = || self.read.iter().filter_map(Frame::data_ref).flatten().copied();
        self.rest.is_none().then(|| bytes().collect())
    }
}

/// Whether the media type is `text/event-stream`, whatever its case and its parameters (RFC 9110, 8.3.1).
fn is_event_stream(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let kind = value.split(|byte| *byte == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

/// A `Buf` can only be consumed, or looked at chunk by chunk. Where it is [`Bytes`], as reqwest's and
/// hyper's are, nothing is copied.
fn in_one_piece<D: Buf>(frame: Frame<D>) -> Frame<Bytes> {
    frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))
}

impl<B: Body> Body for AnswerBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        match (this.read.pop_front(), this.rest.as_pin_mut()) {
            (Some(frame), _) => Poll::Ready(Some(Ok(frame))),
            (None, Some(rest)) => {
                rest.poll_frame(cx).map(|next| next.map(|frame| frame.map(in_one_piece)))
            }
            (None, None) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.read.iter().filter_map(Frame::data_ref);
        let read: u64 = read.map(|data| data.len() as u64).sum();
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(read.saturating_add(rest.lower()));
        if let Some(upper) = rest.upper() {
            hint.set_upper(read.saturating_add(upper));
        }
        hint
    }
}

impl<B> fmt::Debug for AnswerBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_whole = self.rest.is_none();
        f.debug_struct("AnswerBody").field("is_whole", &is_whole).finish_non_exhaustive()
    }
}
