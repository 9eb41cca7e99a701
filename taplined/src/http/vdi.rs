//! `/vdis`: virtual disk images.

use std::collections::HashSet;

use api::{
    ChangesFormat, Name, ObjectKind, Task, Vdi, VdiChanges, VdiClone, VdiCopy, VdiCreate, VdiDestroyPlan, VdiExport,
    VdiImport, VdiPatch, VdiReconcile, VdiResize, VdiRevert, VdiSnapshot, VdiState,
};
use axum::Json;
use axum::extract::State;
use axum::response::IntoResponse;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::answer::{listed, shown};
use super::extract::{Body, Id, QueryParams};
use super::list::{Page, Paging, Tagged, Tagging};
use super::{Answer, Begun, begun};
use crate::daemon::Daemon;
use crate::reconcile;
use crate::request;
use crate::vdi::begin;

/// The routes of VDIs.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(vdi_list, vdi_create))
        .routes(routes!(vdi_show, vdi_patch, vdi_destroy))
        .routes(routes!(vdi_import))
        .routes(routes!(vdi_resize))
        .routes(routes!(vdi_snapshot))
        .routes(routes!(vdi_clone))
        .routes(routes!(vdi_revert))
        .routes(routes!(vdi_copy))
        .routes(routes!(vdi_export))
        .routes(routes!(vdi_merge))
        .routes(routes!(vdi_reconcile))
        .routes(routes!(vdi_data_destroy))
        .routes(routes!(vdi_cbt_enable))
        .routes(routes!(vdi_cbt_disable))
        .routes(routes!(vdi_changes))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct VdiFilter {
    /// Only those in this repository.
    sr: Option<Uuid>,
    /// Only those that this VM has as VBDs.
    vm: Option<Uuid>,
    /// Only snapshots of this VDI.
    snapshot_of: Option<Uuid>,
    /// Only those with this name.
    name: Option<Name>,
    /// Only those with this name or UUID prefix (at least four digits).
    r#match: Option<String>,
    /// Only those in this state.
    #[param(inline)]
    state: Option<VdiState>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DestroyOptions {
    /// Only report what would be removed.
    #[serde(default)]
    dry_run: bool,
}

/// Lists the VDIs by name.
#[utoipa::path(
    get, path = "/vdis", tag = "vdi", params(VdiFilter, Tagging, Paging), responses((status = 200, body = Vec<Vdi>))
)]
async fn vdi_list(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<VdiFilter>,
    tagged: Tagged,
    page: Page,
) -> Answer {
    let question = move |view: &repo::View<'_>| {
        let mut found = view.vdis(filter.sr)?;
        let of_vm: Option<HashSet<Uuid>> = match filter.vm {
            Some(vm) => Some(view.vbds(Some(vm), None)?.into_iter().map(|vbd| vbd.vdi).collect()),
            None => None,
        };
        found.retain(|vdi| {
            filter.name.as_ref().is_none_or(|name| *name == vdi.name)
                && filter.r#match.as_ref().is_none_or(|like| super::is_like(like, Some(&vdi.name), vdi.uuid))
                && filter.state.is_none_or(|state| state == vdi.state)
                && filter.snapshot_of.is_none_or(|of| Some(of) == vdi.snapshot_of)
                && of_vm.as_ref().is_none_or(|vdis| vdis.contains(&vdi.uuid))
                && vdi.tags.have_all(&tagged.0)
        });
        Ok(found)
    };
    listed(&daemon, page, |vdi| vdi.uuid, question).await
}

/// Gets a VDI.
#[utoipa::path(get, path = "/vdis/{uuid}", tag = "vdi", params(Id), responses((status = 200, body = Vdi)))]
async fn vdi_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer {
    shown(&daemon, ObjectKind::Vdi, uuid).await
}

/// Creates an empty VDI. The task's result contains its UUID.
#[utoipa::path(post, path = "/vdis", tag = "vdi", request_body = VdiCreate, responses((status = 202, body = Task)))]
async fn vdi_create(State(daemon): State<Daemon>, Body(asked): Body<VdiCreate>) -> Begun {
    begun(begin::create(&daemon, asked).await?)
}

/// Changes the name, description, tags, strings of programs, schedule of snapshots or read-only flag of a VDI.
#[utoipa::path(
    patch, path = "/vdis/{uuid}", tag = "vdi", params(Id), request_body = VdiPatch,
    responses((status = 200, body = Vdi))
)]
async fn vdi_patch(State(daemon): State<Daemon>, Id(uuid): Id, Body(patch): Body<VdiPatch>) -> Answer<Json<Vdi>> {
    Ok(Json(request::change(&daemon.catalogue, 200, move |tx| tx.patch_vdi(uuid, &patch)).await?))
}

/// Destroys a VDI. Its file is removed unless other images are based on it; in that case it is removed or merged later.
/// With `dry_run` nothing is changed, and the response says what would be.
#[utoipa::path(
    delete, path = "/vdis/{uuid}", tag = "vdi", params(Id, DestroyOptions),
    responses((status = 202, body = Task), (status = 200, body = VdiDestroyPlan, description = "what would be removed"))
)]
async fn vdi_destroy(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(options): QueryParams<DestroyOptions>,
) -> Answer {
    if options.dry_run {
        return Ok(Json(begin::destroy_plan(&daemon, uuid).await?).into_response());
    }
    begun(begin::destroy(&daemon, uuid).await?).map(IntoResponse::into_response)
}

/// Creates a VDI from a file on the host.
#[utoipa::path(
    post, path = "/vdis/import", tag = "vdi", request_body = VdiImport, responses((status = 202, body = Task))
)]
async fn vdi_import(State(daemon): State<Daemon>, Body(asked): Body<VdiImport>) -> Begun {
    begun(begin::import(&daemon, asked).await?)
}

/// Grows a VDI, which may be plugged.
#[utoipa::path(
    post, path = "/vdis/{uuid}/resize", tag = "vdi", params(Id), request_body = VdiResize,
    responses((status = 202, body = Task))
)]
async fn vdi_resize(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiResize>) -> Begun {
    begun(begin::resize(&daemon, uuid, asked).await?)
}

/// Takes a read-only snapshot of a VDI, which may be plugged.
#[utoipa::path(
    post, path = "/vdis/{uuid}/snapshot", tag = "vdi", params(Id), request_body = VdiSnapshot,
    responses((status = 202, body = Task))
)]
async fn vdi_snapshot(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiSnapshot>) -> Begun {
    begun(begin::snapshot(&daemon, uuid, asked).await?)
}

/// Creates a writable clone of a VDI, which may be plugged.
#[utoipa::path(
    post, path = "/vdis/{uuid}/clone", tag = "vdi", params(Id), request_body = VdiClone,
    responses((status = 202, body = Task))
)]
async fn vdi_clone(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiClone>) -> Begun {
    begun(begin::clone(&daemon, uuid, asked).await?)
}

/// Reverts an unplugged VDI to one of its snapshots. Data written since then is lost.
#[utoipa::path(
    post, path = "/vdis/{uuid}/revert", tag = "vdi", params(Id), request_body = VdiRevert,
    responses((status = 202, body = Task))
)]
async fn vdi_revert(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiRevert>) -> Begun {
    begun(begin::revert(&daemon, uuid, asked).await?)
}

/// Makes a full copy of a VDI.
#[utoipa::path(
    post, path = "/vdis/{uuid}/copy", tag = "vdi", params(Id), request_body = VdiCopy,
    responses((status = 202, body = Task))
)]
async fn vdi_copy(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiCopy>) -> Begun {
    begun(begin::copy(&daemon, uuid, asked).await?)
}

/// Writes a VDI to a new file on the host.
#[utoipa::path(
    post, path = "/vdis/{uuid}/export", tag = "vdi", params(Id), request_body = VdiExport,
    responses((status = 202, body = Task))
)]
async fn vdi_export(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiExport>) -> Begun {
    begun(begin::export(&daemon, uuid, asked).await?)
}

/// Merges images of a VDI's chain that are no longer needed; the VDI may be plugged. This also happens automatically.
#[utoipa::path(post, path = "/vdis/{uuid}/merge", tag = "vdi", params(Id), responses((status = 202, body = Task)))]
async fn vdi_merge(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(begin::merge(&daemon, uuid).await?)
}

/// Resolves a diverged VDI, whose running disk and catalogue entry disagree.
#[utoipa::path(
    post, path = "/vdis/{uuid}/reconcile", tag = "vdi", params(Id), request_body = VdiReconcile,
    responses((status = 200, body = Vdi))
)]
async fn vdi_reconcile(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    Body(asked): Body<VdiReconcile>,
) -> Answer<Json<Vdi>> {
    reconcile::decide(&daemon, uuid, asked.believe).await?;
    Ok(Json(daemon.catalogue.read_for_client(move |view| view.vdi(uuid)).await?))
}

/// Destroys the data of a snapshot of a VDI whose changed blocks are recorded. The snapshot stays, in the state
/// `no-data`: the changes since can still be listed. The space of data that no other VDI needs is freed.
#[utoipa::path(
    post, path = "/vdis/{uuid}/data-destroy", tag = "vdi", params(Id), responses((status = 202, body = Task))
)]
async fn vdi_data_destroy(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(begin::data_destroy(&daemon, uuid).await?)
}

/// Records from now on which blocks of a VDI change, while it is plugged; it may be plugged now.
#[utoipa::path(post, path = "/vdis/{uuid}/cbt-enable", tag = "vdi", params(Id), responses((status = 202, body = Task)))]
async fn vdi_cbt_enable(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(begin::enable(&daemon, uuid).await?)
}

/// Stops recording which blocks of a VDI change. The maps of its snapshots stay.
#[utoipa::path(post, path = "/vdis/{uuid}/cbt-disable", tag = "vdi", params(Id), responses((status = 202, body = Task)))]
async fn vdi_cbt_disable(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(begin::disable(&daemon, uuid).await?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ChangesOptions {
    /// An earlier snapshot.
    from: Uuid,
    /// How the changed parts are listed.
    #[serde(default)]
    #[param(inline)]
    format: ChangesFormat,
}

/// Lists the parts of a VDI or a snapshot that may differ from an earlier snapshot. It names too much at most. An error
/// if not all changes are known.
#[utoipa::path(
    get, path = "/vdis/{uuid}/changes", tag = "vdi", params(Id, ChangesOptions),
    responses((status = 200, body = VdiChanges))
)]
async fn vdi_changes(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(options): QueryParams<ChangesOptions>,
) -> Answer<Json<VdiChanges>> {
    Ok(Json(begin::changed(&daemon, uuid, options.from, options.format).await?))
}
