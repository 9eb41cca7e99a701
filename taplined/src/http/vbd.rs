//! `/vbds`: virtual block devices.

use std::collections::HashSet;

use api::{
    Code, DiskLimits, DiskShare, Driver, Mode, ObjectKind, Problem, SHARE_WEIGHT, Task, Transport, Vbd, VbdCreate,
    VbdPatch, VbdState, VbdUnplug, Vbds,
};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::answer::{listed, shown};
use super::extract::{Body, Id, QueryParams};
use super::list::{Page, Paging, Tagged, Tagging};
use super::{Answer, Begun, Created, begun, created};
use crate::daemon::Daemon;
use crate::disk::limits;
use crate::disk::shares;
use crate::plug;
use crate::request;
use crate::vm::{self, Reader};

/// The default limit on a VBD's queues: more gain little, and each costs guest memory.
const QUEUES_DEFAULT_MAX: u16 = 4;

/// The routes of VBDs.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(vbd_list, vbd_create))
        .routes(routes!(vbd_show, vbd_patch, vbd_destroy))
        .routes(routes!(vbd_plug))
        .routes(routes!(vbd_unplug))
        .routes(routes!(vbd_upgrade))
        .routes(routes!(vbd_limit))
        .routes(routes!(vbd_share))
        .routes(routes!(vbd_plug_many))
        .routes(routes!(vbd_unplug_many))
        .routes(routes!(vbd_connect))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct VbdFilter {
    /// Only those of VDIs in this repository.
    sr: Option<Uuid>,
    /// Only those of this VM.
    vm: Option<Uuid>,
    /// Only those of this VDI.
    vdi: Option<Uuid>,
    /// Only those with this UUID prefix (at least four digits).
    r#match: Option<String>,
    /// Only those in this state.
    #[param(inline)]
    state: Option<VbdState>,
}

/// Lists the VBDs by VM and position.
#[utoipa::path(
    get, path = "/vbds", tag = "vbd", params(VbdFilter, Tagging, Paging), responses((status = 200, body = Vec<Vbd>))
)]
async fn vbd_list(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<VbdFilter>,
    tagged: Tagged,
    page: Page,
) -> Answer {
    let question = move |view: &repo::View<'_>| {
        let mut vbds = view.vbds(filter.vm, filter.vdi)?;
        let of_sr: Option<HashSet<Uuid>> = match filter.sr {
            Some(sr) => Some(view.vdis(Some(sr))?.into_iter().map(|vdi| vdi.uuid).collect()),
            None => None,
        };
        vbds.retain(|vbd| {
            filter.r#match.as_ref().is_none_or(|like| super::is_like(like, None, vbd.uuid))
                && filter.state.is_none_or(|state| state == vbd.state)
                && of_sr.as_ref().is_none_or(|vdis| vdis.contains(&vbd.vdi))
                && vbd.tags.have_all(&tagged.0)
        });
        Ok(vbds)
    };
    listed(&daemon, page, |vbd| vbd.uuid, question).await
}

/// Gets a VBD.
#[utoipa::path(get, path = "/vbds/{uuid}", tag = "vbd", params(Id), responses((status = 200, body = Vbd)))]
async fn vbd_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer {
    shown(&daemon, ObjectKind::Vbd, uuid).await
}

/// Creates a VBD, which is not plugged yet.
#[utoipa::path(post, path = "/vbds", tag = "vbd", request_body = VbdCreate, responses((status = 201, body = Vbd)))]
async fn vbd_create(State(daemon): State<Daemon>, Body(asked): Body<VbdCreate>) -> Answer<Created<Vbd>> {
    let made = request::change(&daemon.catalogue, 201, move |tx| {
        asked.uuid.map_or(Ok(()), |uuid| tx.check_uuid_free(uuid))?;
        let vbd = made_of(asked, tx)?;
        tx.add_vbd(&vbd)?;
        Ok(vbd)
    });
    let made = made.await?;
    Ok(created("vbds", made.uuid, made))
}

/// The requested VBD, with defaults filled in.
fn made_of(asked: VbdCreate, view: &repo::View<'_>) -> Result<Vbd, Problem> {
    let vdi = view.vdi(asked.vdi).map_err(|problem| problem.field("vdi"))?;
    let vm = asked.vm.map(|vm| view.vm(vm)).transpose().map_err(|problem| problem.field("vm"))?;
    let position = match (asked.position, &vm) {
        (Some(position), _) => position,
        (None, Some(vm)) => view.free_position(vm.uuid)?,
        (None, None) => 0,
    };
    let driver = vm.as_ref().map(|vm| vm.driver);
    if let (Some(Driver::Qemu), Some(Transport::Nbd)) = (driver, asked.transport) {
        let what = "VMs with the qemu driver use vhost-user disks, not NBD";
        return Err(Problem::new(Code::Unsupported, what).field("transport").advise("omit the transport"));
    }
    let transport = asked.transport.unwrap_or(driver.map_or(Transport::VhostUser, Driver::transport));
    let vcpus = vm.as_ref().map_or(1, |vm| u16::try_from(vm.vcpus).unwrap_or(u16::MAX));
    let queues = if transport == Transport::Nbd { 1 } else { vcpus.clamp(1, QUEUES_DEFAULT_MAX) };
    let new = Vbd::unplugged(asked.vdi, transport);
    Ok(Vbd {
        uuid: asked.uuid.unwrap_or(new.uuid),
        vm: asked.vm,
        position,
        mode: asked.mode.unwrap_or(if vdi.read_only { Mode::ReadOnly } else { Mode::ReadWrite }),
        bootable: asked.bootable.unwrap_or(vm.is_some() && position == 0),
        queues: asked.queues.unwrap_or(queues),
        autostart: asked.autostart,
        limits: limits::checked(asked.limits)?,
        share_weight: asked.share_weight.map_or(Ok(SHARE_WEIGHT), weight)?,
        tags: asked.tags,
        other_config: asked.other_config,
        ..new
    })
}

/// Changes the tags and strings of programs of a VBD, and whether one that belongs to no VM is plugged when the host
/// boots.
#[utoipa::path(
    patch, path = "/vbds/{uuid}", tag = "vbd", params(Id), request_body = VbdPatch,
    responses((status = 200, body = Vbd))
)]
async fn vbd_patch(State(daemon): State<Daemon>, Id(uuid): Id, Body(patch): Body<VbdPatch>) -> Answer<Json<Vbd>> {
    Ok(Json(request::change(&daemon.catalogue, 200, move |tx| tx.patch_vbd(uuid, &patch)).await?))
}

/// Removes a VBD, which must be unplugged.
#[utoipa::path(delete, path = "/vbds/{uuid}", tag = "vbd", params(Id), responses((status = 204)))]
async fn vbd_destroy(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    request::change(&daemon.catalogue, 204, move |tx| tx.remove_vbd(uuid)).await?;
    plug::remove_logs(&daemon, uuid);
    Ok(StatusCode::NO_CONTENT)
}

/// Plugs a VBD: its VDI is served at a socket.
#[utoipa::path(post, path = "/vbds/{uuid}/plug", tag = "vbd", params(Id), responses((status = 202, body = Task)))]
async fn vbd_plug(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(plug::plug(&daemon, uuid).await?)
}

/// Unplugs a VBD when its guest has released it, or at once with force. Also cancels a plug in progress.
#[utoipa::path(
    post, path = "/vbds/{uuid}/unplug", tag = "vbd", params(Id), request_body = VbdUnplug,
    responses((status = 202, body = Task))
)]
async fn vbd_unplug(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VbdUnplug>) -> Begun {
    begun(plug::unplug(&daemon, uuid, asked.force).await?)
}

/// Replaces the process that serves a plugged VBD with the installed program. Its guest keeps running; its requests
/// wait for a moment. If the upgrade fails, the old process continues.
#[utoipa::path(post, path = "/vbds/{uuid}/upgrade", tag = "vbd", params(Id), responses((status = 202, body = Task)))]
async fn vbd_upgrade(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(plug::upgrade(&daemon, uuid).await?)
}

/// Limits the requests and bytes per second of the disk of a VBD. The body has all of its limits: an omitted one is
/// removed, and an empty object removes all. A plugged disk is limited at once: requests that wait for a limit that is
/// removed or raised continue. The limits stay when the VBD is unplugged and plugged again.
#[utoipa::path(
    post, path = "/vbds/{uuid}/limit", tag = "vbd", params(Id), request_body = DiskLimits,
    responses((status = 200, body = Vbd))
)]
async fn vbd_limit(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<DiskLimits>) -> Answer<Json<Vbd>> {
    let limits = limits::checked(Some(asked)).map_err(|problem| Problem { field: None, ..problem })?;
    let limited = request::change(&daemon.catalogue, 200, move |tx| tx.set_vbd_limits(uuid, limits.as_ref())).await?;
    if limited.state == VbdState::Plugged {
        plug::limit(&daemon, uuid).await?;
    }
    Ok(Json(limited))
}

/// Sets the weight of the disk of a VBD among the disks that share its storage, at once if it is plugged. While the
/// storage is saturated, disks share it in proportion to their weights. With `plug.shares = false` the weight is
/// recorded, and the problem tells that it is not in force.
#[utoipa::path(
    post, path = "/vbds/{uuid}/share", tag = "vbd", params(Id), request_body = DiskShare,
    responses((status = 200, body = Vbd))
)]
async fn vbd_share(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<DiskShare>) -> Answer<Json<Vbd>> {
    let weight = shares::checked_weight(asked.weight).map_err(|problem| problem.field("weight"))?;
    let shared = request::change(&daemon.catalogue, 200, move |tx| tx.set_vbd_share_weight(uuid, weight)).await?;
    if shared.state == VbdState::Plugged || !daemon.config.plug.shares {
        plug::share(&daemon, uuid).await?;
    }
    Ok(Json(shared))
}

fn weight(asked: u32) -> Result<u32, Problem> {
    shares::checked_weight(asked).map_err(|problem| problem.field("share_weight"))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct ConnectFor {
    /// The machine monitor or manager to configure.
    #[param(inline)]
    r#for: Reader,
}

/// The configuration to paste for a machine that is managed elsewhere, so that it gets this VBD. For QEMU, libvirt and
/// Cloud Hypervisor the VBD must be plugged; for xl, which serves the image itself, it must not.
#[utoipa::path(
    get, path = "/vbds/{uuid}/connect", tag = "vbd", params(Id, ConnectFor),
    responses((status = 200, body = String, content_type = "text/plain"))
)]
async fn vbd_connect(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(asked): QueryParams<ConnectFor>,
) -> Answer<String> {
    Ok(vm::connect(&daemon, uuid, asked.r#for).await?)
}

/// Plugs several VBDs: those listed, or all unplugged ones of a VM. Each reports its own failure.
#[utoipa::path(post, path = "/vbds/plug", tag = "vbd", request_body = Vbds, responses((status = 202, body = Task)))]
async fn vbd_plug_many(State(daemon): State<Daemon>, Body(asked): Body<Vbds>) -> Begun {
    let vbds = named(&daemon, &asked, |state| state == VbdState::Unplugged).await?;
    begun(plug::plug_many(&daemon, vbds).await?)
}

/// Unplugs several VBDs: those listed, or all plugged ones of a VM.
#[utoipa::path(post, path = "/vbds/unplug", tag = "vbd", request_body = Vbds, responses((status = 202, body = Task)))]
async fn vbd_unplug_many(State(daemon): State<Daemon>, Body(asked): Body<Vbds>) -> Begun {
    let vbds = named(&daemon, &asked, |state| state != VbdState::Unplugged).await?;
    begun(plug::unplug_many(&daemon, vbds, asked.force).await?)
}

/// The listed VBDs, all of which must exist; or those of a VM that are in a wanted state.
async fn named(daemon: &Daemon, asked: &Vbds, wanted: fn(VbdState) -> bool) -> Result<Vec<Uuid>, Problem> {
    let (vm, mut vbds) = match (asked.vm, asked.vbds.clone()) {
        (Some(vm), None) => (Some(vm), Vec::new()),
        (None, Some(vbds)) => (None, vbds),
        _ => {
            let what = "give either a VM or VBDs, not both";
            return Err(Problem::new(Code::Invalid, what).field("vbds"));
        }
    };
    let read = daemon.catalogue.read(move |view| {
        let Some(vm) = vm else {
            vbds.sort();
            vbds.dedup();
            vbds.iter().try_for_each(|vbd| view.vbd(*vbd).map(drop))?;
            return Ok(vbds);
        };
        view.vm(vm)?;
        let all = view.vbds(Some(vm), None)?;
        Ok(all.into_iter().filter(|vbd| wanted(vbd.state)).map(|vbd| vbd.uuid).collect())
    });
    read.await
}
