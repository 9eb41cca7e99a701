//! The HTTP API: REST over a Unix socket, and over TLS.
//!
//! The routes and their OpenAPI document come from the same declarations, with one module per noun. A request has been
//! validated before a handler sees it ([`extract`]), and every refusal is a [`Problem`].

mod answer;
mod asker;
mod events;
mod extract;
mod host;
mod idempotency;
mod listener;
mod sr;
mod task;
mod token;
mod vbd;
mod vdi;
mod vm;

use api::{Code, Problem, Task};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{OpenApi as OpenApiDocument, RefOr, Required};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;

use crate::daemon::Daemon;

pub use answer::Answers;
pub use listener::{Listener, Signals, check};

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

/// A task that has begun.
type Begun = Result<(StatusCode, Json<Task>), Refusal>;

fn begun(task: Task) -> Begun {
    Ok((StatusCode::ACCEPTED, Json(task)))
}

/// The maximum timeout for a guest, in seconds: a day, longer than anybody waits.
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

/// The parts of the document that are not declared by handlers.
#[derive(OpenApi)]
#[openapi(modifiers(&Bearer), security((), ("token" = [])), info(
    title = "Tapline",
    description = "Storage repositories, disks and VMs of one host. Long-running operations return a task.",
    license(name = "Apache-2.0")
))]
struct Document;

/// Authentication of requests over TCP; the Unix socket needs none.
struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut OpenApiDocument) {
        let text =
            "The secret of a token; required over TCP only. On the Unix socket, the kernel identifies the caller.";
        let scheme = Http::builder().scheme(HttpAuthScheme::Bearer).description(Some(text)).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

/// All routes with their document.
fn routes() -> OpenApiRouter<Daemon> {
    let nouns = OpenApiRouter::new()
        .merge(host::routes())
        .merge(sr::routes())
        .merge(vdi::routes())
        .merge(vbd::routes())
        .merge(vm::routes())
        .merge(task::routes())
        .merge(token::routes())
        .merge(events::routes());
    OpenApiRouter::with_openapi(Document::openapi()).nest("/v1", nouns)
}

/// The routes for a daemon.
fn router(daemon: Daemon) -> axum::Router {
    let (router, _) = routes().split_for_parts();
    let unknown = || async { Refusal(Problem::new(Code::NotFound, "no such path").advise("see docs/openapi.json")) };
    let wrong = || async {
        let problem =
            Problem::new(Code::Malformed, "the path does not support this method").advise("see docs/openapi.json");
        (StatusCode::METHOD_NOT_ALLOWED, Json(problem))
    };
    let router = router.fallback(unknown).method_not_allowed_fallback(wrong);
    router.layer(axum::middleware::from_fn_with_state(daemon.clone(), idempotency::answer)).with_state(daemon)
}

/// Marks bodies optional if an object without fields is valid ([`extract`]).
fn relax_bodies(document: &mut OpenApiDocument) {
    let value = serde_json::to_value(&*document).unwrap_or_default();
    let has_required = |reference: &str| {
        let schema = reference.strip_prefix('#').and_then(|pointer| value.pointer(pointer));
        schema.is_none_or(|schema| schema.get("required").is_some())
    };
    for item in document.paths.paths.values_mut() {
        let operations = [&mut item.post, &mut item.patch, &mut item.delete].into_iter().flatten();
        for body in operations.filter_map(|operation| operation.request_body.as_mut()) {
            let schemas = body.content.values().filter_map(|content| content.schema.as_ref());
            let mut references = schemas.map(|schema| match schema {
                RefOr::Ref(reference) => reference.ref_location.as_str(),
                RefOr::T(_) => "",
            });
            if !references.any(has_required) {
                body.required = Some(Required::False);
            }
        }
    }
}

/// The OpenAPI document, as committed in the repository.
pub fn openapi_text() -> Result<String, Problem> {
    let (_, mut document) = routes().split_for_parts();
    relax_bodies(&mut document);
    let text = document.to_pretty_json().map_err(|error| Problem::failed("encode the OpenAPI document", error))?;
    Ok(format!("{text}\n"))
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

    #[test]
    fn the_committed_document_is_the_one_of_the_routes() {
        let committed = include_str!("../../docs/openapi.json");
        assert!(openapi_text().unwrap() == committed, "run: cargo run -p taplined -- --openapi > docs/openapi.json");
    }

    #[test]
    fn bodies_without_required_fields_are_optional_and_all_references_exist() {
        let document: serde_json::Value = serde_json::from_str(&openapi_text().unwrap()).unwrap();
        let body = |path: &str| document["paths"][path]["post"]["requestBody"]["required"].as_bool().unwrap();
        assert!(!body("/v1/host/drain") && !body("/v1/vbds/{uuid}/unplug") && body("/v1/srs"));
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
            assert!(document.pointer(reference).is_some(), "{reference}");
        }
    }
}
