//! `/vms`: virtual machines.

use api::{
    Code, Name, ObjectKind, Power, Problem, Task, Vm, VmClone, VmCreate, VmHardware, VmPatch, VmRevert, VmShutdown,
    VmSnapshot, VmSnapshotCreate, VmSnapshotPatch,
};
use axum::Json;
use axum::body::Body as Content;
use axum::extract::{Extension, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, CONTENT_TYPE, UPGRADE};
use axum::response::IntoResponse;
use hyper::upgrade::OnUpgrade;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{listed, shown};
use super::caller::Caller;
use super::extract::{Body, Id, NestedId, QueryParams};
use super::list::{Page, Paging, Tagged, Tagging};
use super::{Answer, Begun, Created, begun, created, must_end};
use crate::background;
use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::request;
use crate::vm;

/// The routes of VMs.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(vm_list, vm_create))
        .routes(routes!(vm_show, vm_patch, vm_destroy))
        .routes(routes!(vm_start))
        .routes(routes!(vm_shutdown))
        .routes(routes!(vm_pause))
        .routes(routes!(vm_resume))
        .routes(routes!(vm_suspend))
        .routes(routes!(vm_drop_memory))
        .routes(routes!(vm_snapshot))
        .routes(routes!(vm_snapshot_list))
        .routes(routes!(vm_snapshot_patch, vm_snapshot_destroy))
        .routes(routes!(vm_revert))
        .routes(routes!(vm_clone))
        .routes(routes!(vm_console))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct VmFilter {
    /// Only those with this name.
    name: Option<Name>,
    /// Only those with this name or UUID prefix (at least four digits).
    r#match: Option<String>,
    /// Only those in this power state.
    #[param(inline)]
    power: Option<Power>,
}

/// Lists the VMs by name.
#[utoipa::path(
    get, path = "/vms", tag = "vm", params(VmFilter, Tagging, Paging), responses((status = 200, body = Vec<Vm>))
)]
async fn vm_list(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<VmFilter>,
    tagged: Tagged,
    page: Page,
) -> Answer {
    let question = move |view: &repo::View<'_>| {
        let mut found = view.vms()?;
        found.retain(|vm| {
            filter.name.as_ref().is_none_or(|name| *name == vm.name)
                && filter.r#match.as_ref().is_none_or(|like| super::is_like(like, Some(&vm.name), vm.uuid))
                && filter.power.is_none_or(|power| power == vm.power)
                && vm.tags.have_all(&tagged.0)
        });
        Ok(found)
    };
    listed(&daemon, page, |vm| vm.uuid, question).await
}

/// Gets a VM.
#[utoipa::path(get, path = "/vms/{uuid}", tag = "vm", params(Id), responses((status = 200, body = Vm)))]
async fn vm_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer {
    shown(&daemon, ObjectKind::Vm, uuid).await
}

/// Creates a VM, which is halted and has no disks.
#[utoipa::path(post, path = "/vms", tag = "vm", request_body = VmCreate, responses((status = 201, body = Vm)))]
async fn vm_create(State(daemon): State<Daemon>, Body(asked): Body<VmCreate>) -> Answer<Created<Vm>> {
    let hardware = VmHardware {
        driver: asked.driver,
        memory: asked.memory.bytes(),
        vcpus: asked.vcpus.into(),
        boot: asked.boot,
        platform: asked.platform,
    };
    let new = Vm::halted(asked.name, hardware);
    let made = Vm {
        uuid: asked.uuid.unwrap_or(new.uuid),
        description: asked.description,
        tags: asked.tags,
        other_config: asked.other_config,
        autostart: asked.autostart,
        seed: asked.seed.is_some(),
        ..new
    };
    let config = daemon.config.clone();
    let made = request::change(&daemon.catalogue, 201, move |tx| {
        let mut made = made;
        vm::settle_mac(tx, made.uuid, &mut made.platform)?;
        vm::check(&config, &made)?;
        asked.uuid.map_or(Ok(()), |uuid| tx.check_uuid_free(uuid))?;
        tx.add_vm(&made)?;
        tx.set_seed(made.uuid, asked.seed.as_ref())?;
        Ok(made)
    });
    let made = made.await?;
    Ok(created("vms", made.uuid, made))
}

/// Changes a VM, its schedule of snapshots too; its hardware only while it is halted.
#[utoipa::path(
    patch, path = "/vms/{uuid}", tag = "vm", params(Id), request_body = VmPatch, responses((status = 200, body = Vm))
)]
async fn vm_patch(State(daemon): State<Daemon>, Id(uuid): Id, Body(mut patch): Body<VmPatch>) -> Answer<Json<Vm>> {
    let config = daemon.config.clone();
    let patched = request::change(&daemon.catalogue, 200, move |tx| {
        patch.platform.as_mut().map_or(Ok(()), |platform| vm::settle_mac(tx, uuid, platform))?;
        let patched = tx.patch_vm(uuid, &patch)?;
        vm::check(&config, &patched)?;
        Ok(patched)
    });
    Ok(Json(patched.await?))
}

/// Destroys a halted or suspended VM, its saved memory and its VBDs. Its VDIs stay.
#[utoipa::path(delete, path = "/vms/{uuid}", tag = "vm", params(Id), responses((status = 204)))]
async fn vm_destroy(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    let _operation = daemon.vms.begin(uuid)?;
    let removed = request::change(&daemon.catalogue, 204, move |tx| {
        let (vbds, file) = (tx.vbds(Some(uuid), None)?, tx.vm_memory(uuid)?.map(|memory| memory.file));
        tx.remove_vm(uuid)?;
        Ok((vbds, file))
    });
    let (vbds, file) = removed.await?;
    vm::forget_file(file).await;
    for vbd in vbds {
        if let Err(problem) = DiskPaths::of(&daemon.config, vbd.uuid).remove_logs() {
            tracing::warn!("{problem}");
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Starts a VM: plugs all its VBDs and runs the guest. If this fails or is cancelled, it is rolled back.
#[utoipa::path(post, path = "/vms/{uuid}/start", tag = "vm", params(Id), responses((status = 202, body = Task)))]
async fn vm_start(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(vm::start(&daemon, uuid).await?)
}

/// Shuts a VM down: presses its power button, waits until the guest has powered off, and unplugs its VBDs. With
/// `force_after` it is stopped by force after that time; with `force` it is stopped at once, as if its power were cut,
/// and other operations on it are aborted.
#[utoipa::path(
    post, path = "/vms/{uuid}/shutdown", tag = "vm", params(Id), request_body = VmShutdown,
    responses((status = 202, body = Task))
)]
async fn vm_shutdown(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VmShutdown>) -> Begun {
    must_end(asked.force_after.unwrap_or_default())?;
    begun(vm::shutdown(&daemon, uuid, asked).await?)
}

/// Pauses the guest of a VM, which stays in memory.
#[utoipa::path(post, path = "/vms/{uuid}/pause", tag = "vm", params(Id), responses((status = 202, body = Task)))]
async fn vm_pause(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(vm::pause(&daemon, uuid).await?)
}

/// Resumes the guest of a paused VM, or of a suspended one, whose disks are plugged for that.
#[utoipa::path(post, path = "/vms/{uuid}/resume", tag = "vm", params(Id), responses((status = 202, body = Task)))]
async fn vm_resume(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(vm::resume(&daemon, uuid).await?)
}

/// Saves the memory of a running or paused guest to a file, ends its machine and unplugs its VBDs. A start or resume
/// continues from there; until then the VM's hardware and disks cannot be changed. If this fails or is cancelled before
/// the memory is saved, the guest continues.
#[utoipa::path(post, path = "/vms/{uuid}/suspend", tag = "vm", params(Id), responses((status = 202, body = Task)))]
async fn vm_suspend(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(vm::suspend(&daemon, uuid).await?)
}

/// Gives up the saved memory of a suspended VM, which is halted then, as if its power had been cut.
#[utoipa::path(delete, path = "/vms/{uuid}/memory", tag = "vm", params(Id), responses((status = 200, body = Vm)))]
async fn vm_drop_memory(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<Vm>> {
    Ok(Json(vm::discard(&daemon, uuid).await?))
}

/// Takes snapshots of all writable disks of a VM at one moment, or none: what was acknowledged before the first one was
/// taken is in all of them. A running guest is paused for that moment. The task's result has the snapshot's UUID.
#[utoipa::path(
    post, path = "/vms/{uuid}/snapshot", tag = "vm", params(Id), request_body = VmSnapshotCreate,
    responses((status = 202, body = Task))
)]
async fn vm_snapshot(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VmSnapshotCreate>) -> Begun {
    begun(vm::snapshot(&daemon, uuid, asked).await?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct VmSnapshotFilter {
    /// Only those with this name.
    name: Option<Name>,
    /// Only those with this name or UUID prefix (at least four digits).
    r#match: Option<String>,
}

/// Lists the snapshots of a VM, the oldest first.
#[utoipa::path(
    get, path = "/vms/{uuid}/snapshots", tag = "vm", params(Id, VmSnapshotFilter, Paging),
    responses((status = 200, body = Vec<VmSnapshot>))
)]
async fn vm_snapshot_list(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(filter): QueryParams<VmSnapshotFilter>,
    page: Page,
) -> Answer {
    let question = move |view: &repo::View<'_>| {
        view.vm(uuid)?;
        let mut found = view.vm_snapshots(Some(uuid))?;
        found.retain(|snapshot| {
            filter.name.as_ref().is_none_or(|name| *name == snapshot.name)
                && filter.r#match.as_ref().is_none_or(|like| super::is_like(like, Some(&snapshot.name), snapshot.uuid))
        });
        Ok(found)
    };
    listed(&daemon, page, |snapshot| snapshot.uuid, question).await
}

/// Has a snapshot of a VM stay that its schedule would destroy one day.
#[utoipa::path(
    patch, path = "/vms/{uuid}/snapshots/{snapshot}", tag = "vm",
    params(("uuid" = Uuid, Path), ("snapshot" = Uuid, Path)), request_body = VmSnapshotPatch,
    responses((status = 200, body = VmSnapshot))
)]
async fn vm_snapshot_patch(
    State(daemon): State<Daemon>,
    NestedId { of, uuid }: NestedId,
    Body(patch): Body<VmSnapshotPatch>,
) -> Answer<Json<VmSnapshot>> {
    Ok(Json(request::change(&daemon.catalogue, 200, move |tx| tx.patch_vm_snapshot(of, uuid, &patch)).await?))
}

/// Destroys a snapshot of a VM, and those of its disks that are still there.
#[utoipa::path(
    delete, path = "/vms/{uuid}/snapshots/{snapshot}", tag = "vm",
    params(("uuid" = Uuid, Path), ("snapshot" = Uuid, Path)), responses((status = 202, body = Task))
)]
async fn vm_snapshot_destroy(State(daemon): State<Daemon>, NestedId { of, uuid }: NestedId) -> Begun {
    begun(vm::destroy_snapshot(&daemon, of, uuid).await?)
}

/// Reverts all disks of a halted VM to a snapshot of it, or none. Data written since then is lost. Its hardware stays.
#[utoipa::path(
    post, path = "/vms/{uuid}/revert", tag = "vm", params(Id), request_body = VmRevert,
    responses((status = 202, body = Task))
)]
async fn vm_revert(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VmRevert>) -> Begun {
    begun(vm::revert(&daemon, uuid, asked).await?)
}

/// Creates a halted VM with the hardware of another and thin clones of its disks, as they are at one moment or were
/// when a snapshot was taken. Disks that the guest can only read are shared. A network card in a bridge gets another
/// address; one at a tap interface is not copied, and the task's result has a `note`.
#[utoipa::path(
    post, path = "/vms/{uuid}/clone", tag = "vm", params(Id), request_body = VmClone,
    responses((status = 202, body = Task))
)]
async fn vm_clone(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VmClone>) -> Begun {
    begun(vm::clone(&daemon, uuid, asked).await?)
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct ConsoleOptions {
    /// How many bytes of earlier output are sent at most; all that are kept, 65536, if omitted.
    recent: Option<u32>,
}

/// Gets what a guest has written to its serial port lately. With the headers `Connection: Upgrade` and
/// `Upgrade: tapline-console` the connection becomes the console: earlier output, then what the guest writes; what is
/// sent is typed.
#[utoipa::path(
    get, path = "/vms/{uuid}/console", tag = "vm", params(Id, ConsoleOptions),
    responses(
        (
            status = 200, body = String, content_type = "application/octet-stream",
            example = json!("Debian GNU/Linux 13 web ttyS0\r\n\r\nweb login: ")
        ),
        (status = 101, description = "The connection is the console from now on")
    )
)]
async fn vm_console(
    State(daemon): State<Daemon>,
    Extension(caller): Extension<Caller>,
    Id(uuid): Id,
    QueryParams(ConsoleOptions { recent }): QueryParams<ConsoleOptions>,
    mut request: Request,
) -> Answer {
    let vm = daemon.catalogue.read(move |view| view.vm(uuid)).await?;
    let console = daemon.vms.console(&vm)?;
    let recent = recent.map_or(vm::KEPT, |recent| usize::try_from(recent).unwrap_or(vm::KEPT));
    let wanted = request.headers().get(UPGRADE);
    if wanted.is_none_or(|wanted| wanted != api::CONSOLE_PROTOCOL) {
        return Ok(([(CONTENT_TYPE, "application/octet-stream")], console.recent(recent)).into_response());
    }
    let Some(connection) = request.extensions_mut().remove::<OnUpgrade>() else {
        let what = format!("cannot open the console of VM {uuid}: the connection cannot become one");
        return Err(Problem::new(Code::Invalid, what).advise("send 'Connection: Upgrade' with HTTP/1.1").into());
    };
    let Some(seat) = console.seat() else {
        let what = format!("cannot open the console of VM '{}' ({uuid}): too many clients have it open", vm.name);
        return Err(Problem::new(Code::Overloaded, what).advise("close one of them").into());
    };
    background::spawn(async move {
        if let Err(error) = caller.serve(connection, |viewer| console.show(viewer, recent, seat)).await {
            tracing::debug!(vm = %uuid, %error, "a client of its console is gone");
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, api::CONSOLE_PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers, Content::empty()).into_response())
}
