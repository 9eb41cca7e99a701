//! The API over HTTP: REST at a Unix socket.
//!
//! The routes and their OpenAPI document come from the same declarations, one module a noun. What is asked has been checked
//! when a handler sees it ([`extract`]), and everything that is refused is refused as a [`Problem`].

mod answer;
mod events;
mod extract;
mod host;
mod listener;
mod sr;
mod task;
mod vbd;
mod vdi;
mod vm;

use api::{Code, Problem, Task};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

use crate::daemon::Daemon;

pub use answer::Answers;
pub use listener::{Listener, Stop, group_id};

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
        (status, Json(self.0)).into_response()
    }
}

/// A task that was begun.
type Begun = Result<(StatusCode, Json<Task>), Refusal>;

fn begun(task: Task) -> Begun {
    Ok((StatusCode::ACCEPTED, Json(task)))
}

/// The document beside what the handlers say.
#[derive(OpenApi)]
#[openapi(info(
    title = "Tapline",
    description = "Storage repositories, disks and machines of one host. Verbs that take time answer with a task.",
    license(name = "Apache-2.0")
))]
struct Document;

/// All routes with their document.
fn routes() -> OpenApiRouter<Daemon> {
    let nouns = OpenApiRouter::new()
        .merge(host::routes())
        .merge(sr::routes())
        .merge(vdi::routes())
        .merge(vbd::routes())
        .merge(vm::routes())
        .merge(task::routes())
        .merge(events::routes());
    OpenApiRouter::with_openapi(Document::openapi()).nest("/v1", nouns)
}

/// The routes for a daemon.
fn router(daemon: Daemon) -> axum::Router {
    let (router, _) = routes().split_for_parts();
    let unknown =
        || async { Refusal(Problem::new(Code::NotFound, "there is no such path").advise("see docs/openapi.json")) };
    let wrong = || async {
        let problem = Problem::new(Code::Malformed, "the path has no such method").advise("see docs/openapi.json");
        (StatusCode::METHOD_NOT_ALLOWED, Json(problem))
    };
    router.fallback(unknown).method_not_allowed_fallback(wrong).with_state(daemon)
}

/// The OpenAPI document, as it is committed.
pub fn openapi_text() -> Result<String, Problem> {
    let (_, document) = routes().split_for_parts();
    let text = document.to_pretty_json().map_err(|error| Problem::failed("show the OpenAPI document", error))?;
    Ok(format!("{text}\n"))
}

/// Whether an object is meant by `text`: its name, if it has one, or the beginning of its UUID, of four digits at least.
fn is_like(text: &str, name: Option<&api::Name>, uuid: uuid::Uuid) -> bool {
    let digits = text.chars().filter(char::is_ascii_hexdigit).count();
    let begins = digits >= 4 && uuid.to_string().starts_with(&text.to_ascii_lowercase());
    begins || name.is_some_and(|name| name.as_str() == text)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_object_is_meant_by_its_name_or_four_digits_of_its_uuid() {
        let (name, uuid) = ("abc".parse().unwrap(), uuid::uuid!("abcd1234-0000-4000-8000-000000000000"));
        for text in ["abc", "abcd", "ABCD1", "abcd1234-0", "abcd1234-0000-4000-8000-000000000000"] {
            assert!(is_like(text, Some(&name), uuid), "{text}");
        }
        for text in ["", "ab", "Abc", "bcd1", "abcd2", "abc d"] {
            assert!(!is_like(text, Some(&name), uuid), "{text}");
        }
        assert!(is_like("abcd", None, uuid) && !is_like("abc", None, uuid) && !is_like("", None, uuid));
    }

    #[test]
    fn the_committed_document_is_the_one_of_the_routes() {
        let committed = include_str!("../../docs/openapi.json");
        assert!(openapi_text().unwrap() == committed, "run: cargo run -p taplined -- --openapi > docs/openapi.json");
    }
}
