//! `/uploads`: files that clients send, to be imported.

use api::{Upload, UploadCreate};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::listed_here;
use super::extract::{Body, Id, QueryParams, whole};
use super::list::{Page, Paging};
use super::listener::REQUEST_TIMEOUT;
use super::{Answer, Created, Refusal, created};
use crate::daemon::Daemon;
use crate::upload;

/// The routes of uploads.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(upload_list, upload_create))
        .routes(routes!(upload_show, upload_remove))
        .routes(routes!(upload_append))
}

/// A piece of a file.
struct Piece(Bytes);

impl<S: Send + Sync> FromRequest<S> for Piece {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Piece, Refusal> {
        Ok(Piece(whole(request.into_body(), REQUEST_TIMEOUT).await?))
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct AppendOffset {
    /// Where in the file the piece begins, in bytes: where the last one has ended.
    offset: u64,
    /// Whether the file ends with this piece, which may be empty.
    #[serde(default)]
    last: bool,
}

/// Lists the uploads.
#[utoipa::path(get, path = "/uploads", tag = "upload", params(Paging), responses((status = 200, body = Vec<Upload>)))]
async fn upload_list(State(daemon): State<Daemon>, page: Page) -> Answer {
    listed_here(&page, daemon.uploads.list(), |upload| upload.uuid.to_string())
}

/// Gets an upload, and how much of it has arrived.
#[utoipa::path(get, path = "/uploads/{uuid}", tag = "upload", params(Id), responses((status = 200, body = Upload)))]
async fn upload_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<Upload>> {
    Ok(Json(daemon.uploads.show(uuid)?))
}

/// Creates an upload. Its pieces are appended, and it is then imported (`vdi_import`). It ends one hour after its last
/// piece, and with the daemon.
#[utoipa::path(
    post, path = "/uploads", tag = "upload", request_body = UploadCreate, responses((status = 201, body = Upload))
)]
async fn upload_create(State(daemon): State<Daemon>, Body(asked): Body<UploadCreate>) -> Answer<Created<Upload>> {
    let made = upload::create(&daemon, asked).await?;
    Ok(created("uploads", made.uuid, made))
}

/// Appends a piece of at most 16 MiB to an upload. When the answer is lost, get the upload: it says where to continue.
#[utoipa::path(
    post, path = "/uploads/{uuid}/append", tag = "upload", params(Id, AppendOffset),
    request_body(content = String, content_type = "application/octet-stream"), responses((status = 200, body = Upload))
)]
async fn upload_append(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(at): QueryParams<AppendOffset>,
    Piece(piece): Piece,
) -> Answer<Json<Upload>> {
    Ok(Json(upload::append(&daemon, uuid, at.offset, at.last, piece).await?))
}

/// Removes an upload.
#[utoipa::path(delete, path = "/uploads/{uuid}", tag = "upload", params(Id), responses((status = 204)))]
async fn upload_remove(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    daemon.uploads.show(uuid)?;
    daemon.uploads.remove(uuid);
    Ok(StatusCode::NO_CONTENT)
}
