//! The HTTP API: REST over a Unix socket, and over TLS; and the dashboard.
//!
//! The routes and their OpenAPI document come from the same declarations, with one module per noun: a handler has the
//! name of its operation. A request has been validated before a handler sees it ([`extract`]), and every refusal is a
//! [`Problem`].

mod access;
mod answer;
mod backup_target;
mod caller;
mod change;
mod contract;
mod dashboard;
mod document;
mod download;
mod etag;
mod events;
mod extract;
mod host;
mod index;
mod list;
mod listener;
mod origin;
mod screen;
mod sr;
mod sr_policy;
mod statistics;
mod task;
mod token;
mod unread;
mod upload;
mod vbd;
mod vdi;
mod vm;
mod websocket;

use std::fmt::Display;
use std::sync::Arc;

use api::{Code, Problem, Task};
use axum::Json;
use axum::http::header::{CONTENT_TYPE, HeaderName, LOCATION};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use uuid::Uuid;

use crate::daemon::Daemon;
use contract::Contract;
use document::Document;

pub use access::must_operate_vdi;
pub use answer::Answers;
pub use caller::Caller;
pub use document::text as openapi_text;
pub use listener::{Listener, LocalSocket, Signals, Unauthenticated, UnauthenticatedSlot, bind_remote, rest, room};

/// The version of the API, with which every path starts.
const ROOT: &str = "/v1";

/// A problem as a response.
#[derive(Debug)]
pub struct Refusal(pub Problem);

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Refusal {
        Refusal(problem)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.0).unwrap_or_default();
        (status, [(CONTENT_TYPE, "application/problem+json")], body).into_response()
    }
}

/// The response to a request, or its refusal.
type Answer<T = Response> = Result<T, Refusal>;

/// The response with a new object: its location and the object.
type Created<T> = (StatusCode, [(HeaderName, String); 1], Json<T>);

/// The response with a task that has begun.
type Begun = Answer<Created<Task>>;

/// The header with the location of an object (RFC 9110, 10.2.2).
fn location(list: &str, uuid: impl Display) -> (HeaderName, String) {
    (LOCATION, format!("{list}/{uuid}"))
}

fn begun(task: Task) -> Begun {
    Ok((StatusCode::ACCEPTED, [location(&format!("{ROOT}/tasks"), task.uuid)], Json(task)))
}

/// The response to a request that has created an object of a list.
fn created<T>(list: &str, uuid: Uuid, object: T) -> Created<T> {
    (StatusCode::CREATED, [location(&format!("{ROOT}/{list}"), uuid)], Json(object))
}

/// The maximum timeout for a guest, in seconds: a day.
const PATIENCE_MAX: u32 = 86400;

/// Rejects timeouts that are practically infinite.
fn must_end(seconds: u32) -> Result<(), Problem> {
    match seconds {
        0..=PATIENCE_MAX => Ok(()),
        _ => {
            Err(Problem::new(Code::Invalid, format!("a timeout must be at most {PATIENCE_MAX} seconds"))
                .field("timeout"))
        }
    }
}

/// All routes with their OpenAPI document.
fn routes() -> OpenApiRouter<Daemon> {
    let nouns = OpenApiRouter::new()
        .merge(host::routes())
        .merge(backup_target::routes())
        .merge(sr::routes())
        .merge(sr_policy::routes())
        .merge(vdi::routes())
        .merge(vbd::routes())
        .merge(vm::routes())
        .merge(screen::routes())
        .merge(task::routes())
        .merge(token::routes())
        .merge(upload::routes())
        .merge(download::routes())
        .merge(events::routes())
        .merge(statistics::routes())
        .merge(index::routes());
    OpenApiRouter::with_openapi(Document::openapi()).merge(index::root()).merge(statistics::root()).nest(ROOT, nouns)
}

/// The router for a daemon, with its middleware.
fn router(daemon: Daemon) -> axum::Router {
    let (router, document) = routes().split_for_parts();
    let contract = Arc::new(Contract::of(&document));
    let unknown = || async { Refusal(Problem::new(Code::NotFound, "no such path").advise(format!("see {ROOT}"))) };
    let router = router.merge(dashboard::routes()).fallback(unknown).method_not_allowed_fallback(wrong_method);
    let router = router.layer(from_fn_with_state(daemon.clone(), change::answer));
    let router = router.layer(from_fn_with_state(contract.clone(), contract::hold));
    let router = router.layer(from_fn_with_state((daemon.clone(), contract), access::allow));
    let router = router.layer(from_fn_with_state(daemon.clone(), origin::hold));
    router.layer(from_fn(unread::read)).with_state(daemon)
}

/// The router adds the header `Allow` (RFC 9110, 15.5.6).
async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    let what = format!("{} does not support {method}", uri.path());
    Refusal(Problem::new(Code::Method, what).advise("use a method that the header Allow lists"))
}

/// Whether `text` matches an object: its name, if it has one, or a UUID prefix of at least four digits.
fn is_like(text: &str, name: Option<&api::Name>, uuid: uuid::Uuid) -> bool {
    let digits = text.chars().filter(char::is_ascii_hexdigit).count();
    let begins = digits >= 4 && uuid.to_string().starts_with(&text.to_ascii_lowercase());
    begins || name.is_some_and(|name| name.as_str() == text)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_object_matches_by_name_or_four_uuid_digits() {
        let (name, uuid) = ("abc".parse().unwrap(), uuid::uuid!("abcd1234-0000-4000-8000-000000000000"));
        for text in ["abc", "abcd", "ABCD1", "abcd1234-0", "abcd1234-0000-4000-8000-000000000000"] {
            assert!(is_like(text, Some(&name), uuid), "{text}");
        }
        for text in ["", "ab", "Abc", "bcd1", "abcd2", "abc d"] {
            assert!(!is_like(text, Some(&name), uuid), "{text}");
        }
        assert!(is_like("abcd", None, uuid) && !is_like("abc", None, uuid) && !is_like("", None, uuid));
    }
}
