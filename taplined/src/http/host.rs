//! `/host`.

use std::time::Duration;

use api::{Backup, BackupReason, Difference, Host, HostDrain, HostReconcile, Task};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::listed_here;
use super::extract::{Body, QueryParams};
use super::list::{Page, Paging};
use super::{Answer, Begun, begun, must_end};
use crate::daemon::Daemon;
use crate::differences;
use crate::drain;
use crate::reconcile::Heal;

/// The routes of the host.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(host_show))
        .routes(routes!(host_drain))
        .routes(routes!(host_reconcile))
        .routes(routes!(host_backups, host_backup))
}

/// Gets the host and its daemon.
#[utoipa::path(get, path = "/host", tag = "host", responses((status = 200, body = Host)))]
async fn host_show(State(daemon): State<Daemon>) -> Answer<Json<Host>> {
    Ok(Json(daemon.show_host().await?))
}

/// Unplugs all VBDs in bounded time, before the host shuts down. Merely stopping the daemon leaves disks running.
#[utoipa::path(
    post, path = "/host/drain", tag = "host", request_body = HostDrain, responses((status = 202, body = Task))
)]
async fn host_drain(State(daemon): State<Daemon>, Body(asked): Body<HostDrain>) -> Begun {
    must_end(asked.timeout)?;
    let patience = Duration::from_secs(asked.timeout.into());
    begun(drain::drain(&daemon, patience).await?)
}

/// Compares running disks, and files and inventories of attached repositories, with the catalogue; returns the
/// differences. Where it is certain what happened, the catalogue is updated from a running disk; repositories are only
/// compared: a scan records their files.
#[utoipa::path(
    post, path = "/host/reconcile", tag = "host", request_body = HostReconcile,
    responses((status = 200, body = Vec<Difference>))
)]
async fn host_reconcile(
    State(daemon): State<Daemon>,
    Body(asked): Body<HostReconcile>,
) -> Answer<Json<Vec<Difference>>> {
    let heal = if asked.dry_run { Heal::No } else { Heal::Yes };
    Ok(Json(differences::all(&daemon, heal).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct BackupFilter {
    /// Only those that were made for this reason.
    #[param(inline)]
    reason: Option<BackupReason>,
}

/// Lists the backups of the catalogue, the newest first; `after` is the `file` of one. Restoring one is not part of the
/// API: use `taplined --restore`.
#[utoipa::path(
    get, path = "/host/backups", tag = "host", params(BackupFilter, Paging),
    responses((status = 200, body = Vec<Backup>))
)]
async fn host_backups(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<BackupFilter>,
    page: Page,
) -> Answer {
    let mut backups = daemon.care.backups(&daemon).await?;
    backups.retain(|backup| filter.reason.is_none_or(|reason| reason == backup.reason));
    listed_here(&page, backups, |backup| backup.file.clone())
}

/// Creates a backup of the catalogue now.
#[utoipa::path(post, path = "/host/backups", tag = "host", responses((status = 201, body = Backup)))]
async fn host_backup(State(daemon): State<Daemon>) -> Answer<(StatusCode, Json<Backup>)> {
    Ok((StatusCode::CREATED, Json(daemon.care.back_up(&daemon, BackupReason::Asked).await?)))
}
