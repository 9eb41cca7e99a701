//! `/statistics`, and `/metrics` for Prometheus.

use api::{DiskStatistics, VbdHistory};
use axum::Json;
use axum::extract::State;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Answer;
use super::answer::listed_of;
use super::extract::{Id, QueryParams};
use super::list::{Page, Paging};
use crate::daemon::Daemon;
use crate::metrics;
use crate::statistics::{self, DiskFilter};

/// The routes of statistics.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(statistics_list)).routes(routes!(vbd_statistics)).routes(routes!(vbd_history))
}

/// The route that Prometheus scrapes by default.
pub fn root() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(metrics))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct StatisticsFilter {
    /// Only those of this VM.
    vm: Option<Uuid>,
    /// Only those of VDIs in this repository.
    sr: Option<Uuid>,
    /// With the latencies of all requests, which are a good part of the work.
    #[serde(default)]
    #[param(inline)]
    latencies: bool,
    /// With the layers above and beneath: guests are queried, which wakes them up.
    #[serde(default)]
    #[param(inline)]
    layers: bool,
}

/// Lists the statistics of plugged VBDs, by machine and position; `after` is the `vbd` of one.
#[utoipa::path(
    get, path = "/statistics", tag = "statistics", params(StatisticsFilter, Paging),
    responses((status = 200, body = Vec<DiskStatistics>))
)]
async fn statistics_list(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<StatisticsFilter>,
    page: Page,
) -> Answer {
    let which = DiskFilter { vm: filter.vm, sr: filter.sr, vbd: None, layers: filter.layers };
    let shown = statistics::read(&daemon, which, move |disk| disk.shown(filter.latencies)).await?;
    listed_of(&daemon, &page, shown, |disk: &DiskStatistics| disk.vbd.to_string()).await
}

/// Gets the statistics of a plugged VBD, with the latencies of all its requests, and the layers above and beneath it.
#[utoipa::path(
    get, path = "/vbds/{uuid}/statistics", tag = "statistics", params(Id),
    responses((status = 200, body = DiskStatistics))
)]
async fn vbd_statistics(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<DiskStatistics>> {
    let which = DiskFilter { vbd: Some(uuid), layers: true, ..DiskFilter::default() };
    let shown = statistics::read(&daemon, which, |disk| disk.shown(true)).await?;
    Ok(Json(shown.into_iter().next().ok_or_else(|| statistics::none_of(uuid))?))
}

/// Gets the last day of a VBD, by minute, plugged or not. Minutes without requests are left out. It survives a restart
/// of the daemon, and is lost with the VBD.
#[utoipa::path(
    get, path = "/vbds/{uuid}/history", tag = "statistics", params(Id), responses((status = 200, body = VbdHistory))
)]
async fn vbd_history(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<VbdHistory>> {
    daemon.catalogue.read_for_client(move |view| view.vbd(uuid)).await?;
    Ok(Json(daemon.history.of(uuid)))
}

/// Gets metrics of the daemon, its repositories and its disks, in the text format of OpenMetrics.
#[utoipa::path(
    get, path = "/metrics", tag = "statistics",
    responses((status = 200, body = String, content_type = "application/openmetrics-text", example = json!("# EOF")))
)]
async fn metrics(State(daemon): State<Daemon>) -> Answer<([(HeaderName, &'static str); 1], String)> {
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics::text(&daemon).await?))
}
