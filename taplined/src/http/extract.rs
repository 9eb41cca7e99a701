//! Parts of a request: its body, its query, the UUIDs in its path. Errors are problems that name the field.

use std::time::Duration;

use api::{Code, Problem};
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use utoipa::IntoParams;
use uuid::Uuid;

use super::Refusal;
use super::listener::REQUEST_TIMEOUT;

/// Maximum bytes of a body. The longest contains all of an object's `other_config` strings (64 of 16,384 characters),
/// each character escaped as a surrogate pair (`\ud83d\ude00`).
pub const BODY_MAX: usize = 16 << 20;

/// A JSON request body.
#[derive(Debug)]
pub struct Body<T>(pub T);

/// The UUID in the path.
#[derive(Clone, Copy, Debug, IntoParams)]
#[into_params(names("uuid"), parameter_in = Path)]
pub struct Id(pub Uuid);

/// Both UUIDs in the path of an object's part.
#[derive(Clone, Copy, Debug)]
pub struct NestedId {
    /// The object.
    pub of: Uuid,
    /// Its part.
    pub uuid: Uuid,
}

/// The query of a request.
#[derive(Debug)]
pub struct QueryParams<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, Refusal> {
        let bytes = whole(request.into_body(), REQUEST_TIMEOUT).await?;
        let _ = state;
        parse(&bytes)
    }
}

/// Reads the complete body. Without the time limit, a client that stops midway could keep its connection forever.
pub async fn whole(body: axum::body::Body, patience: Duration) -> Result<Bytes, Problem> {
    let what = match tokio::time::timeout(patience, axum::body::to_bytes(body, BODY_MAX)).await {
        Ok(Ok(bytes)) => return Ok(bytes),
        Ok(Err(_)) => format!("the request body must have at most {BODY_MAX} bytes and match its Content-Length"),
        Err(_) => format!("the request body did not arrive in {} s", patience.as_secs()),
    };
    Err(Problem::new(Code::Malformed, what))
}

/// An empty body is an object without fields.
fn parse<T: DeserializeOwned>(bytes: &Bytes) -> Result<Body<T>, Refusal> {
    let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { bytes };
    // serde would read an array as the fields in their order.
    if bytes.trim_ascii_start().starts_with(b"[") {
        return Err(Problem::new(Code::Invalid, "the request body must be a JSON object, not an array").into());
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        let code = if inner.is_data() { Code::Invalid } else { Code::Malformed };
        let problem = Problem::new(code, format!("invalid request body: {inner}"));
        // The parser calls fields that it has not read `?`.
        if matches!(path.as_str(), "." | "?") { problem } else { problem.field(path) }
    })?;
    json.end().map_err(|_| Problem::new(Code::Malformed, "there is extra data after the JSON value"))?;
    Ok(Body(value))
}

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Id, Refusal> {
        let found = Path::<Uuid>::from_request_parts(parts, state).await;
        let wrong = |_| Problem::new(Code::Invalid, "the path contains an invalid UUID").field("uuid");
        Ok(Id(found.map_err(wrong)?.0))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for NestedId {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<NestedId, Refusal> {
        let found = Path::<(Uuid, Uuid)>::from_request_parts(parts, state).await;
        let wrong = |_| Problem::new(Code::Invalid, "the path contains an invalid UUID").field("uuid");
        let Path((of, uuid)) = found.map_err(wrong)?;
        Ok(NestedId { of, uuid })
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<QueryParams<T>, Refusal> {
        let found = Query::<T>::from_request_parts(parts, state).await;
        Ok(QueryParams(found.map_err(|error| Problem::new(Code::Invalid, format!("invalid query: {error}")))?.0))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn refused(body: &'static str) -> Problem {
        parse::<api::VdiCreate>(&Bytes::from_static(body.as_bytes())).unwrap_err().0
    }

    #[test]
    fn an_invalid_body_is_refused_with_its_field() {
        assert_eq!(refused("{").code, Code::Malformed);
        assert_eq!(refused("[]").code, Code::Invalid);
        let size = refused(r#"{"sr":"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d","name":"a","size":7}"#);
        assert_eq!((size.code, size.field.as_deref()), (Code::Invalid, Some("size")));
        let unknown = refused(r#"{"sr":"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d","name":"a","size":512,"x":1}"#);
        assert_eq!((unknown.code, unknown.field.as_deref()), (Code::Invalid, Some("x")));
        let name = refused(r#"{"sr":"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d","name":"a\u0000","size":512}"#);
        assert_eq!(name.field.as_deref(), Some("name"));
        assert_eq!(refused(r#"{}{}"#).code, Code::Invalid);
    }

    #[tokio::test]
    async fn an_incomplete_body_is_refused() {
        let begun = tokio_stream::iter([Ok::<_, std::io::Error>("{\"force\":")]);
        let stream = tokio_stream::StreamExt::chain(begun, tokio_stream::pending());
        let refused = whole(axum::body::Body::from_stream(stream), Duration::ZERO).await.unwrap_err();
        assert_eq!(
            (refused.code, refused.detail.as_str()),
            (Code::Malformed, "the request body did not arrive in 0 s")
        );
    }

    #[test]
    fn an_empty_body_is_an_object_without_fields() {
        assert!(parse::<api::VbdUnplug>(&Bytes::new()).is_ok_and(|body| !body.0.force));
        let trailing = parse::<api::VbdUnplug>(&Bytes::from_static(b"{} {}")).unwrap_err().0;
        assert_eq!(trailing.code, Code::Malformed);
    }
}
