//! What axum knows of a request, and [`Attempt`], [`Keep`] and [`Release`] in its signatures.

use std::convert::Infallible;

use axum::{
    extract::{FromRequestParts, MatchedPath, OptionalFromRequestParts, OriginalUri},
    response::{IntoResponseParts, ResponseParts},
};
use http::{Extensions, StatusCode, Uri, request::Parts};

use crate::http::{Attempt, Keep, Release};

/// The template of the route, if it is known: it is not to a layer around the whole router.
pub(crate) fn template(extensions: &Extensions) -> Option<&str> {
    extensions.get::<MatchedPath>().map(MatchedPath::as_str)
}

/// The URI as the client sent it; a nested router cuts off what it has matched.
pub(crate) fn original_uri(extensions: &Extensions) -> Option<&Uri> {
    extensions.get::<OriginalUri>().map(|uri| &uri.0)
}

/// Rejects (500) where no layer has claimed the request: a route that asks for it without a layer
/// is a mistake of the server. Take `Option<Attempt>` where the key is optional.
impl<S: Sync> FromRequestParts<S> for Attempt {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts
            .extensions
            .get::<Self>()
            .cloned()
            .ok_or((StatusCode::INTERNAL_SERVER_ERROR, "no IdempotencyLayer claimed this request: put one on the route, or take Option<Attempt>"))
    }
}

/// `None` where no layer has claimed the request.
impl<S: Sync> OptionalFromRequestParts<S> for Attempt {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}

/// `(StatusCode::CONFLICT, Keep, "body")` keeps this response.
impl IntoResponseParts for Keep {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        response.extensions_mut().insert(self);
        Ok(response)
    }
}

/// `(StatusCode::OK, Release, "body")` releases on this response.
impl IntoResponseParts for Release {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        response.extensions_mut().insert(self);
        Ok(response)
    }
}

/// Rejects (500) where no layer with a tier behind its store has claimed the request.
#[cfg(feature = "tier")]
impl<S: Sync> FromRequestParts<S> for crate::http::InTransaction {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        parts.extensions.get::<Self>().cloned().ok_or((
            StatusCode::INTERNAL_SERVER_ERROR,
            "no IdempotencyLayer with a tier claimed this request: build the layer on a Tiered",
        ))
    }
}
