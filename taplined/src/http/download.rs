//! `/downloads`: exported disks that clients fetch.

use api::Download;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::answer::listed_here;
use super::extract::{Id, QueryParams};
use super::list::{Page, Paging};
use crate::daemon::Daemon;
use crate::download;

/// The routes of downloads.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(download_list))
        .routes(routes!(download_show, download_remove))
        .routes(routes!(download_read))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReadOffset {
    /// Where in the file the piece begins, in bytes.
    offset: u64,
}

/// Lists the downloads.
#[utoipa::path(
    get, path = "/downloads", tag = "download", params(Paging), responses((status = 200, body = Vec<Download>))
)]
async fn download_list(State(daemon): State<Daemon>, page: Page) -> Answer {
    listed_here(&page, daemon.downloads.list(), |download| download.uuid.to_string())
}

/// Gets a download.
#[utoipa::path(
    get, path = "/downloads/{uuid}", tag = "download", params(Id), responses((status = 200, body = Download))
)]
async fn download_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<Download>> {
    Ok(Json(daemon.downloads.show(uuid)?))
}

/// Reads a piece of a download: 4 MiB from `offset` on, or less at the end of the file.
#[utoipa::path(
    get, path = "/downloads/{uuid}/data", tag = "download", params(Id, ReadOffset),
    responses((status = 200, body = String, content_type = "application/octet-stream"))
)]
async fn download_read(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(at): QueryParams<ReadOffset>,
) -> Answer<([(HeaderName, &'static str); 1], Vec<u8>)> {
    let piece = download::read(&daemon, uuid, at.offset).await?;
    Ok(([(CONTENT_TYPE, "application/octet-stream")], piece))
}

/// Removes a download.
#[utoipa::path(delete, path = "/downloads/{uuid}", tag = "download", params(Id), responses((status = 204)))]
async fn download_remove(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    daemon.downloads.show(uuid)?;
    daemon.downloads.remove(uuid);
    Ok(StatusCode::NO_CONTENT)
}
