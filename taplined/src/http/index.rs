//! The API's self-description: an index, the OpenAPI document, a page that shows it, and the types of problems. None
//! of it needs a file.

use std::collections::BTreeMap;

use api::{Code, KINDS, Kind, Problem};
use axum::Json;
use axum::extract::Path;
use axum::http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::listed_here;
use super::list::{Page, Paging};
use super::{Answer, ROOT, document};
use crate::daemon::Daemon;

/// The page that shows the document in a browser.
const DOCS: &str = include_str!("docs.html");

/// The page may run its own script, which may read from the daemon only.
const POLICY: &str =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'";

/// The collections and documents, by name.
const LINKS: [&str; 12] = [
    "host",
    "srs",
    "vdis",
    "vbds",
    "vms",
    "tasks",
    "tokens",
    "events",
    "statistics",
    "problems",
    "openapi.json",
    "docs",
];

/// The routes of the document and the types of problems.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(openapi))
        .routes(routes!(docs))
        .routes(routes!(problem_list))
        .routes(routes!(problem_show))
}

/// The route of the API itself.
pub fn root() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(index))
}

/// The index of the API.
#[derive(Debug, Serialize, ToSchema)]
#[cfg_attr(test, derive(serde::Deserialize, PartialEq))]
pub struct Index {
    /// The program that answers.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The paths of collections and documents.
    pub links: BTreeMap<String, String>,
}

/// Gets an index: the version of the daemon, and the paths of collections and documents.
#[utoipa::path(get, path = "/v1", tag = "api", responses((status = 200, body = Index)))]
async fn index() -> Json<Index> {
    let links = LINKS.iter().map(|path| (path.replace(".json", ""), format!("{ROOT}/{path}")));
    Json(Index { name: "taplined".into(), version: env!("CARGO_PKG_VERSION").into(), links: links.collect() })
}

/// Gets this document.
#[utoipa::path(
    get, path = "/openapi.json", tag = "api",
    responses(
        (status = 200, body = serde_json::Value, example = json!({ "openapi": "3.1.0", "info": { "title": "Tapline" } }))
    )
)]
async fn openapi() -> Answer<([(HeaderName, &'static str); 1], &'static str)> {
    Ok(([(CONTENT_TYPE, "application/json")], document::text()?))
}

/// Gets a page that shows this document in a browser.
#[utoipa::path(
    get, path = "/docs", tag = "api",
    responses((status = 200, body = String, content_type = "text/html", example = json!("<!doctype html>…")))
)]
async fn docs() -> ([(HeaderName, &'static str); 2], &'static str) {
    ([(CONTENT_TYPE, "text/html; charset=utf-8"), (CONTENT_SECURITY_POLICY, POLICY)], DOCS)
}

/// A type of problems.
#[derive(Debug, Serialize, ToSchema)]
#[cfg_attr(test, derive(serde::Deserialize, PartialEq))]
pub struct ProblemType {
    /// The `type` of such problems: a path of the API, that of this object.
    pub r#type: String,
    /// Their `title`.
    pub title: String,
    /// Their `status`.
    pub status: u16,
    /// What they mean.
    pub meaning: String,
    /// What to do about them in general; the `advice` of a problem says it for the case.
    pub advice: String,
}

impl From<&Kind> for ProblemType {
    fn from(kind: &Kind) -> ProblemType {
        ProblemType {
            r#type: kind.code.type_uri(),
            title: kind.title.into(),
            status: kind.status,
            meaning: kind.meaning.into(),
            advice: kind.advice.into(),
        }
    }
}

/// Lists the types of problems by status; `after` is the `type` of one.
#[utoipa::path(
    get, path = "/problems", tag = "api", params(Paging), responses((status = 200, body = Vec<ProblemType>))
)]
async fn problem_list(page: Page) -> Answer {
    listed_here(&page, KINDS.iter().map(ProblemType::from).collect(), |known| known.r#type.clone())
}

/// Gets a type of problems.
#[utoipa::path(
    get, path = "/problems/{code}", tag = "api",
    params(("code" = Code, Path, description = "The code of such problems")),
    responses((status = 200, body = ProblemType))
)]
async fn problem_show(Path(code): Path<String>) -> Answer<Json<ProblemType>> {
    let found = KINDS.iter().find(|kind| kind.word == code).map(|kind| Json(kind.into()));
    let missing = || Problem::new(Code::NotFound, format!("there is no type of problems '{code}'"));
    Ok(found.ok_or_else(|| missing().advise(format!("{ROOT}/problems lists them")))?)
}
