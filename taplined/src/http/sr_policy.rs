//! `/srs/…/calibrate` and `/srs/…/policy`: transfer sizes that suit a repository's storage.

use api::{Code, Problem, SrCalibrate, SrCalibrated, SrCalibration, Task};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::extract::{Body, Id};
use super::sr::{begin, claim};
use super::{Answer, Begun};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::{calibrate, plug, request};

/// The routes of calibration.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new().routes(routes!(sr_calibrate)).routes(routes!(sr_policy, sr_policy_forget))
}

/// Measures which sizes of transfers suit a repository's storage, and has its disks follow that from then on, where
/// `split` and `merge` of the repository are `auto`. It writes to a file of its own, of 256 MiB, which is gone
/// afterwards; no disk of the repository may be in use, and one that comes into use ends it. The task's result has the
/// fields of an `SrCalibrated`.
#[utoipa::path(
    post, path = "/srs/{uuid}/calibrate", tag = "sr", params(Id), request_body = SrCalibrate,
    responses((status = 202, body = Task))
)]
async fn sr_calibrate(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<SrCalibrate>) -> Begun {
    let claim = claim(&daemon, uuid, "calibrated").await?;
    let checked = asked.clone();
    daemon.catalogue.read(move |view| calibrate::check(view, uuid, &checked)).await?;
    let at_work = daemon.clone();
    let work = move |mut context: Context| async move {
        let _claim = claim;
        let policy = calibrate::calibrate(&at_work, uuid, asked, &mut context).await?;
        serde_json::to_value(SrCalibrated { uuid, policy })
            .map_err(|error| Problem::failed("encode the calibration's result", error))
    };
    begin(&daemon, uuid, "sr-calibrate", work).await
}

/// Gets what a calibration of a repository's storage has found, with all that was measured.
#[utoipa::path(
    get, path = "/srs/{uuid}/policy", tag = "sr", params(Id), responses((status = 200, body = SrCalibration))
)]
async fn sr_policy(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<SrCalibration>> {
    let found = daemon.catalogue.read(move |view| view.sr_calibration(uuid)).await?;
    let none = || {
        let what = format!("the repository {uuid} was not calibrated");
        Problem::new(Code::NotFound, what).advise("measure its storage with 'tapline sr calibrate'")
    };
    Ok(Json(found.ok_or_else(none)?))
}

/// Forgets what a calibration of a repository's storage has found. Its disks leave their transfers as they are from
/// then on, where `split` and `merge` of the repository are `auto`.
#[utoipa::path(delete, path = "/srs/{uuid}/policy", tag = "sr", params(Id), responses((status = 204)))]
async fn sr_policy_forget(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    request::change(&daemon.catalogue, 204, move |tx| tx.set_sr_calibration(uuid, None)).await?;
    plug::shape_all(&daemon, uuid).await;
    Ok(StatusCode::NO_CONTENT)
}
