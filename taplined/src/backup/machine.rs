//! `vm-backup`: all disks of a VM at one moment, and what the machine is, on a backup target.
//!
//! The steps are those of [`super::vdi`], with the job `vm-snapshot`, and a copy for each disk. Each backup has the
//! machine in its properties, with the moment and all of its disks. A machine can be restored when all of these are
//! there, so an unfinished backup of a machine does not count. If a copy fails, those before it are removed. So none of
//! the snapshots becomes a base before all are copied.

use std::collections::HashSet;
use std::ffi::OsString;

use api::{About, BackupId, BackupTarget, ObjectKind, Problem, Task, Transfer, Vdi, Vm, VmBackup, VmSnapshot};
use repo::catalogue::NewTask;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use uuid::Uuid;

use super::program::At;
use super::restore::Shown;
use super::snapshot::Temporary;
use super::vdi::{Extent, Made, Source, keep};
use super::{Machine, MachineDisk, target};
use crate::clock;
use crate::daemon::Daemon;
use crate::fault;
use crate::request;
use crate::task::Context;
use crate::vm;

const VERB: &str = "vm-backup";

/// A disk of the machine, and what is read of it.
type Pair = (Vdi, Uuid);

/// Starts a `vm-backup` task.
pub async fn back_up(daemon: &Daemon, vm: Uuid, asked: VmBackup) -> Result<Task, Problem> {
    let condition = request::condition();
    let found = daemon.catalogue.read(move |view| {
        condition.map_or(Ok(()), |condition| condition.check(view))?;
        let target = view.backup_target(asked.target).map_err(|problem| problem.field("target"))?;
        Ok((view.vm(vm)?, target))
    });
    let (vm, target) = found.await?;
    let extent = Extent::of(asked.full, asked.repair);
    let about = vec![About { kind: ObjectKind::Vm, uuid: vm.uuid }];
    let new = NewTask { uuid: Uuid::new_v4(), verb: VERB, about, cancellable: true, intent: None };
    let at_work = daemon.clone();
    daemon
        .tasks
        .start(daemon, new, move |context| async move { work(&at_work, &vm, (&target, extent), context).await })
        .await
}

async fn work(
    daemon: &Daemon,
    vm: &Vm,
    (target, extent): (&BackupTarget, Extent),
    mut context: Context,
) -> Result<Value, Problem> {
    context.step("find", true).await?;
    context.unless_cancelled(target::backups_on(daemon, target, None)).await?;
    let (temporary, snapshot) = Temporary::record(daemon, Some(vm.uuid)).await?;
    let (made, bases) = match take(daemon, vm, snapshot, &mut context).await {
        Ok(taken) => {
            let made = copy_all(daemon, vm, &taken, (target, extent), &mut context).await;
            let bases = made.iter().flatten().filter_map(|(vdi, made)| {
                let disk = taken.disks.iter().find(|disk| disk.vdi == *vdi)?;
                Some((disk.snapshot?, made.base(target)))
            });
            let bases = bases.collect();
            (made, bases)
        }
        Err(problem) => (Err(problem), Vec::new()),
    };
    let alone = match bases.is_empty() {
        true => Vec::new(),
        false => keep(daemon, VERB, bases, Some(snapshot)).await,
    };
    if let Err(problem) = context.step("remove", false).await {
        tracing::debug!(task = %context.uuid(), "its snapshots are destroyed although {problem}");
    }
    fault::point(VERB, "remove", false);
    temporary.remove().await;
    for temporary in alone {
        temporary.remove().await;
    }
    fault::point(VERB, "remove", true);
    let disks = made?;
    let shown = |(vdi, made): &(Uuid, Made)| {
        json!({
            "vdi": vdi,
            "backup": made.id,
            "size": made.size,
            "since": made.since,
            "full": made.full,
            "statistics": made.statistics,
        })
    };
    Ok(json!({
        "uuid": vm.uuid,
        "target": target.uuid,
        "backup": disks.first().map(|(_, made)| &made.id),
        "disks": disks.iter().map(shown).collect::<Vec<_>>(),
    }))
}

async fn take(daemon: &Daemon, vm: &Vm, snapshot: Uuid, context: &mut Context) -> Result<VmSnapshot, Problem> {
    context.step("snapshot", true).await?;
    fault::point(VERB, "snapshot", false);
    let description = "read by a backup, and destroyed after it".parse().unwrap_or_default();
    let at = clock::now().wall;
    let begun = vm::backup_snapshot(daemon, vm.uuid, (snapshot, at), description).await?;
    context.part(daemon, &begun).await?;
    fault::point(VERB, "snapshot", true);
    context.check()?;
    let vm = vm.uuid;
    daemon.catalogue.read(move |view| view.vm_snapshot(vm, snapshot)).await
}

/// Copies each disk; removes the backups of all if one of them fails.
async fn copy_all(
    daemon: &Daemon,
    vm: &Vm,
    taken: &VmSnapshot,
    (target, extent): (&BackupTarget, Extent),
    context: &mut Context,
) -> Result<Vec<(Uuid, Made)>, Problem> {
    context.step("copy", true).await?;
    let machine = machine(vm, taken);
    let sources = sources(daemon, taken).await?;
    let mut made: Vec<(Uuid, Made)> = Vec::new();
    let mut before = Transfer { len: sources.iter().map(|(vdi, _)| vdi.size).sum(), ..Transfer::default() };
    for (vdi, snapshot) in &sources {
        fault::point(VERB, "copy", false);
        let mut last = Transfer::default();
        let copied = copy(daemon, (vdi, *snapshot), &machine, (target, extent), context, |transfer| {
            last = transfer;
            context.transferred(both(&before, &transfer));
        });
        match copied.await {
            Ok(one) => made.push((vdi.uuid, one)),
            Err(problem) => {
                remove(daemon, target, &made, vdi, taken).await;
                return Err(problem);
            }
        }
        before = both(&before, &Transfer { done: vdi.size, ..last });
        fault::point(VERB, "copy", true);
    }
    Ok(made)
}

async fn copy(
    daemon: &Daemon,
    (vdi, snapshot): (&Vdi, Uuid),
    machine: &Machine,
    (target, extent): (&BackupTarget, Extent),
    context: &Context,
    on_progress: impl FnMut(Transfer),
) -> Result<Made, Problem> {
    let backups = context.unless_cancelled(target::backups_on(daemon, target, Some(vdi.uuid))).await?;
    let source = Source { vdi, snapshot, backups: &backups, machine: Some(machine), extent };
    source.copy(daemon, target, context, on_progress).await
}

/// The transfer of all disks, of which `before` are done.
fn both(before: &Transfer, now: &Transfer) -> Transfer {
    let done = before.done.saturating_add(now.done);
    let rest = before.len.saturating_sub(done);
    Transfer {
        done,
        len: before.len,
        rate: now.rate,
        left: now.rate.and_then(|rate| rest.checked_div(rate)),
        holes: before.holes.saturating_add(now.holes),
        unchanged: before.unchanged.saturating_add(now.unchanged),
        deduplicated: before.deduplicated.saturating_add(now.deduplicated),
        sent: before.sent.saturating_add(now.sent),
    }
}

fn machine(vm: &Vm, taken: &VmSnapshot) -> Machine {
    let disks = taken.disks.iter().map(|disk| MachineDisk {
        position: disk.position,
        mode: disk.mode,
        bootable: disk.bootable,
        queues: disk.queues,
        vdi: disk.vdi,
    });
    Machine {
        vm: vm.uuid,
        moment: taken.uuid,
        name: vm.name.clone(),
        description: vm.description.clone(),
        hardware: taken.hardware.clone(),
        disks: disks.collect(),
    }
}

/// The disks with snapshots, each once.
async fn sources(daemon: &Daemon, taken: &VmSnapshot) -> Result<Vec<Pair>, Problem> {
    let pairs: Vec<(Uuid, Uuid)> = taken.disks.iter().filter_map(|disk| Some((disk.vdi, disk.snapshot?))).collect();
    let read = daemon.catalogue.read(move |view| {
        let mut known = HashSet::new();
        let once = pairs.into_iter().filter(|(vdi, _)| known.insert(*vdi));
        once.map(|(vdi, snapshot)| Ok((view.vdi(vdi)?, snapshot))).collect()
    });
    read.await
}

/// Removes the backups of the disks before, which are of no use without that of `failed`; and its own one, which may
/// have been published although its process was killed, and then has the same moment.
async fn remove(daemon: &Daemon, target: &BackupTarget, made: &[(Uuid, Made)], failed: &Vdi, taken: &VmSnapshot) {
    let mut ids: Vec<BackupId> = made.iter().map(|(_, made)| made.id.clone()).collect();
    match published(daemon, target, failed.uuid, taken).await {
        Ok(published) => ids.extend(published),
        Err(problem) => {
            tracing::warn!(target = %target.name, "a backup of a part of a machine may stay on the target: {problem}");
        }
    }
    if ids.is_empty() {
        return;
    }
    let words: Vec<OsString> = ids.iter().map(|id| id.to_string().into()).collect();
    // A target that does not respond must not keep the task, which may be cancelled.
    let removed = At::of(target).ask::<IgnoredAny>(&["remove"], words, daemon.config.storage.patience()).await;
    if let Err(problem) = removed {
        tracing::warn!(target = %target.name, "backups of a part of a machine stay on the target: {problem}");
    }
}

/// The backup of a disk that is a part of this snapshot of its machine, if the target has one.
async fn published(
    daemon: &Daemon,
    target: &BackupTarget,
    disk: Uuid,
    taken: &VmSnapshot,
) -> Result<Option<BackupId>, Problem> {
    let listed = target::backups_on(daemon, target, Some(disk)).await?;
    for backup in listed.iter().rev().filter(|backup| backup.moment.is_some()) {
        let shown = Shown::of(daemon, target, &backup.id).await?;
        if shown.properties().machine.is_some_and(|machine| machine.moment == taken.uuid) {
            return Ok(Some(shown.id));
        }
        // That one was made before, and so were the rest.
        if backup.time < taken.created {
            break;
        }
    }
    Ok(None)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_transfer_of_a_machine_is_that_of_all_disks() {
        let whole = Transfer { len: 100, ..Transfer::default() };
        let first =
            Transfer { done: 60, len: 60, rate: Some(10), left: Some(0), holes: 5, sent: 50, ..Transfer::default() };
        let before = both(&whole, &first);
        let now = both(&before, &Transfer { done: 20, len: 40, rate: Some(4), sent: 7, ..Transfer::default() });
        assert_eq!((now.done, now.len, now.left, now.holes, now.sent), (80, 100, Some(5), 5, 57));
        assert_eq!(both(&whole, &Transfer { done: 1, rate: Some(0), ..Transfer::default() }).left, None);
    }
}
