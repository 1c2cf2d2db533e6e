//! The body of an answer: as far as it was read before it counted as come, and the rest.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Buf;
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use pin_project_lite::pin_project;

pin_project! {
    /// The body of a response: the inner client's, of which some or all has been read already.
    pub struct AnswerBody<B: Body> {
        read: VecDeque<Frame<B::Data>>,
        #[pin]
        rest: Option<B>,
    }
}

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
        let kind = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
        let mut answer = Self::unread(body);
        if most == 0 || kind.starts_with(b"text/event-stream") {
            return Ok(answer);
        }
        let mut bytes = 0_u64;
        while let Some(rest) = &mut answer.rest {
            if bytes.saturating_add(rest.size_hint().lower()) > most {
                break;
            }
            match rest.frame().await.transpose()? {
                Some(frame) => {
                    bytes += frame.data_ref().map_or(0, |data| data.remaining() as u64);
                    answer.read.push_back(frame);
                }
                None => answer.rest = None,
            }
        }
        Ok(answer)
    }

    /// The bytes that are there, if the body has been read to its end.
    pub(super) fn whole(&self) -> Option<Vec<u8>> {
        self.rest.is_none().then(|| {
            {
                // A `Buf` can only be consumed or looked at chunk by chunk; these come from the network
                // in one.
                self.read.iter().filter_map(Frame::data_ref).flat_map(|data| data.chunk().to_vec())
            }
            .collect()
        })
    }
}

impl<B: Body> Body for AnswerBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        match (this.read.pop_front(), this.rest.as_pin_mut()) {
            (Some(frame), _) => Poll::Ready(Some(Ok(frame))),
            (None, Some(rest)) => rest.poll_frame(cx),
            (None, None) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.read.iter().filter_map(Frame::data_ref);
        let read: u64 = read.map(|data| data.remaining() as u64).sum();
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(read.saturating_add(rest.lower()));
        if let Some(upper) = rest.upper() {
            hint.set_upper(read.saturating_add(upper));
        }
        hint
    }
}

impl<B: Body> fmt::Debug for AnswerBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_whole = self.rest.is_none();
        f.debug_struct("AnswerBody").field("is_whole", &is_whole).finish_non_exhaustive()
    }
}
