//! `/backup-targets`: directories and buckets that disks are backed up to, and the backups on them.

use api::{
    BackupPrune, BackupRemove, BackupTarget, BackupTargetAdd, DiskBackup, Name, Task, VdiBackup, VdiRestore,
    VdiRestoreInPlace, VmBackup, VmRestore, VmRestoreInPlace,
};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::answer::listed_here;
use super::extract::{Body, Id, QueryParams};
use super::list::{Page, Paging};
use super::{Answer, Begun, Created, begun, created};
use crate::backup;
use crate::daemon::Daemon;
use crate::request;

/// The routes of backup targets, and those of backups of VDIs.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(backup_target_list, backup_target_add))
        .routes(routes!(backup_target_show, backup_target_remove))
        .routes(routes!(backup_target_backups))
        .routes(routes!(backup_target_restore))
        .routes(routes!(backup_target_verify))
        .routes(routes!(backup_target_remove_backups))
        .routes(routes!(backup_target_prune))
        .routes(routes!(backup_target_restore_vm))
        .routes(routes!(vdi_backup))
        .routes(routes!(vm_backup))
        .routes(routes!(vdi_restore_in_place))
        .routes(routes!(vm_restore_in_place))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct TargetFilter {
    /// Only the one with this name.
    name: Option<Name>,
    /// Only those with this name or UUID prefix (at least four digits).
    r#match: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct BackupFilter {
    /// Only backups of this VDI of this host, and of its snapshots.
    vdi: Option<Uuid>,
}

/// Lists the backup targets by name.
#[utoipa::path(
    get, path = "/backup-targets", tag = "backup", params(TargetFilter, Paging),
    responses((status = 200, body = Vec<BackupTarget>))
)]
async fn backup_target_list(
    State(daemon): State<Daemon>,
    QueryParams(filter): QueryParams<TargetFilter>,
    page: Page,
) -> Answer {
    let mut targets = daemon.catalogue.read_for_client(|view| view.backup_targets()).await?;
    targets.retain(|target| {
        filter.name.as_ref().is_none_or(|name| *name == target.name)
            && filter.r#match.as_ref().is_none_or(|like| super::is_like(like, Some(&target.name), target.uuid))
    });
    listed_here(&page, targets, |target| target.uuid.to_string())
}

/// Gets a backup target.
#[utoipa::path(
    get, path = "/backup-targets/{uuid}", tag = "backup", params(Id), responses((status = 200, body = BackupTarget))
)]
async fn backup_target_show(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<BackupTarget>> {
    Ok(Json(daemon.catalogue.read_for_client(move |view| view.backup_target(uuid)).await?))
}

/// Registers the backup target in a directory of the host or in a bucket. Nothing is written there.
#[utoipa::path(
    post, path = "/backup-targets", tag = "backup", request_body = BackupTargetAdd,
    responses((status = 201, body = BackupTarget))
)]
async fn backup_target_add(
    State(daemon): State<Daemon>,
    Body(asked): Body<BackupTargetAdd>,
) -> Answer<Created<BackupTarget>> {
    let target = backup::add(&daemon, asked).await?;
    Ok(created("backup-targets", target.uuid, target))
}

/// Forgets a backup target. The backups on it stay, and it can be registered again.
#[utoipa::path(delete, path = "/backup-targets/{uuid}", tag = "backup", params(Id), responses((status = 204)))]
async fn backup_target_remove(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<StatusCode> {
    request::change(&daemon.catalogue, 204, move |tx| tx.remove_backup_target(uuid)).await?;
    backup::sweep(&daemon).await;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the backups on a target, the oldest first.
#[utoipa::path(
    get, path = "/backup-targets/{uuid}/backups", tag = "backup", params(Id, BackupFilter, Paging),
    responses((status = 200, body = Vec<DiskBackup>))
)]
async fn backup_target_backups(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(filter): QueryParams<BackupFilter>,
    page: Page,
) -> Answer {
    let backups = backup::backups(&daemon, uuid, filter.vdi).await?;
    listed_here(&page, backups, |backup| backup.id.to_string())
}

/// Restores a backup to a new VDI. The task's result contains its UUID.
#[utoipa::path(
    post, path = "/backup-targets/{uuid}/restore", tag = "backup", params(Id), request_body = VdiRestore,
    responses((status = 202, body = Task))
)]
async fn backup_target_restore(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiRestore>) -> Begun {
    begun(backup::restore(&daemon, uuid, asked).await?)
}

/// Restores a backup of a VM to a new VM, halted, with new disks. The task's result contains its UUID.
#[utoipa::path(
    post, path = "/backup-targets/{uuid}/restore-vm", tag = "backup", params(Id), request_body = VmRestore,
    responses((status = 202, body = Task))
)]
async fn backup_target_restore_vm(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VmRestore>) -> Begun {
    begun(backup::restore_vm(&daemon, uuid, asked).await?)
}

/// Reads and proves everything on a target. The task fails if a backup has lost something.
#[utoipa::path(
    post, path = "/backup-targets/{uuid}/verify", tag = "backup", params(Id), responses((status = 202, body = Task))
)]
async fn backup_target_verify(State(daemon): State<Daemon>, Id(uuid): Id) -> Begun {
    begun(backup::verify(&daemon, uuid).await?)
}

/// Removes backups, and frees the space that no other backup needs.
#[utoipa::path(
    post, path = "/backup-targets/{uuid}/remove-backups", tag = "backup", params(Id), request_body = BackupRemove,
    responses((status = 202, body = Task))
)]
async fn backup_target_remove_backups(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    Body(asked): Body<BackupRemove>,
) -> Begun {
    begun(backup::remove(&daemon, uuid, asked).await?)
}

/// Removes the backups that are superfluous by a rule, and frees space. Another host may use the target meanwhile.
#[utoipa::path(
    post, path = "/backup-targets/{uuid}/prune", tag = "backup", params(Id), request_body = BackupPrune,
    responses((status = 202, body = Task))
)]
async fn backup_target_prune(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<BackupPrune>) -> Begun {
    begun(backup::prune(&daemon, uuid, asked).await?)
}

/// Backs up a VDI, which may be plugged, to a target. The task's result contains the ID of the backup.
#[utoipa::path(
    post, path = "/vdis/{uuid}/backup", tag = "backup", params(Id), request_body = VdiBackup,
    responses((status = 202, body = Task))
)]
async fn vdi_backup(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VdiBackup>) -> Begun {
    begun(backup::back_up(&daemon, uuid, asked).await?)
}

/// Backs up all disks of a VM at one moment, and what the VM is. The task's result contains the IDs of the backups.
#[utoipa::path(
    post, path = "/vms/{uuid}/backup", tag = "backup", params(Id), request_body = VmBackup,
    responses((status = 202, body = Task))
)]
async fn vm_backup(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VmBackup>) -> Begun {
    begun(backup::back_up_vm(&daemon, uuid, asked).await?)
}

/// Replaces the contents of a VDI that is not plugged by those of a backup of it. It gets the size and the sector size
/// of the backup, and is otherwise the same: its snapshots, VBDs and schedules stay. Data written since is lost.
#[utoipa::path(
    post, path = "/vdis/{uuid}/restore", tag = "backup", params(Id), request_body = VdiRestoreInPlace,
    responses((status = 202, body = Task))
)]
async fn vdi_restore_in_place(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    Body(asked): Body<VdiRestoreInPlace>,
) -> Begun {
    begun(backup::restore_in_place(&daemon, uuid, asked).await?)
}

/// Replaces the contents of all disks that a halted VM can write by those of a backup of it, or of none. Data written
/// since is lost. Its hardware stays. Refused if a disk was added to the VM, or taken from it, since the backup.
#[utoipa::path(
    post, path = "/vms/{uuid}/restore", tag = "backup", params(Id), request_body = VmRestoreInPlace,
    responses((status = 202, body = Task))
)]
async fn vm_restore_in_place(State(daemon): State<Daemon>, Id(uuid): Id, Body(asked): Body<VmRestoreInPlace>) -> Begun {
    begun(backup::restore_vm_in_place(&daemon, uuid, asked).await?)
}
