//! Drains bodies that were not read before the response was known: a request is often refused by its headers alone.
//!
//! A connection with an unread body is closed after the response, and a client that is still sending then sees a
//! reset connection instead of the response.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};

use super::listener::REQUEST_TIMEOUT;

/// Maximum number of body bytes to drain; our own clients never send more.
const UNREAD_MAX: usize = 64 << 20;

/// Handles a request, and drains its body before the response is sent.
pub async fn read(request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    let body = Shared(Arc::new(Mutex::new(body)));
    let response = next.run(Request::from_parts(parts, Body::new(body.clone()))).await;
    // A client that stops midway gets its response after this timeout.
    tokio::time::timeout(REQUEST_TIMEOUT, body.rest(UNREAD_MAX)).await.unwrap_or_default();
    response
}

/// A body that is read in two places, one after the other.
#[derive(Clone, Debug)]
struct Shared(Arc<Mutex<Body>>);

impl Shared {
    fn with<T>(&self, then: impl FnOnce(&mut Body) -> T) -> T {
        then(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads and drops up to about `max` bytes of the rest.
    async fn rest(&self, max: usize) {
        let mut len = 0_usize;
        while len <= max && !self.with(|body| body.is_end_stream()) {
            let frame = poll_fn(|context| self.with(|body| Pin::new(body).poll_frame(context))).await;
            let Some(Ok(frame)) = frame else { return };
            len = len.saturating_add(frame.data_ref().map_or(0, Bytes::len));
        }
    }
}

impl HttpBody for Shared {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.with(|body| Pin::new(body).poll_frame(context))
    }

    fn is_end_stream(&self) -> bool {
        self.with(|body| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.with(|body| body.size_hint())
    }
}
