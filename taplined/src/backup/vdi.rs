//! `vdi-backup`: the state of a VDI at one moment, on a backup target.
//!
//! 1. `find`: the target is opened, so that nothing is begun for one that is not there.
//! 2. `snapshot`: the job `vdi-snapshot`, under a UUID that was recorded before ([`super::snapshot`]). A VDI that is
//!    read-only needs none.
//! 3. `copy`: the snapshot is plugged as for clients of the NBD address, and a process reads it there and sends it to
//!    the target. The backup counts when that process has succeeded.
//! 4. `base`: if the changes since the snapshot can be listed, the next backup reads only these.
//! 5. `remove`: the snapshot is destroyed; a base loses its data only.
//!
//! *If killed:* the processes end with the daemon; the next one removes the VBD and destroys the snapshot. There may be
//! a backup, but none in part; one that is repeated sends only what is missing.

use std::ffi::OsString;
use std::path::Path;

use api::{BackupBase, BackupId, BackupTarget, Code, DiskBackup, Problem, Task, Transfer, Vdi, VdiBackup};
use jiff::Timestamp;
use repo::catalogue::NewTask;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::program::At;
use super::snapshot::{Temporary, keep_as_bases};
use super::{Machine, Properties, changes, identity, target};
use crate::clock;
use crate::daemon::Daemon;
use crate::fault;
use crate::reader::Reader;
use crate::request;
use crate::task::Context;
use crate::vdi::{about_vdi, begin, block_size, must_be_ready};

const VERB: &str = "vdi-backup";

/// The maximum length of the name of a disk on a target, in bytes.
const LABEL_MAX: usize = 255;

/// What is read of the result of a backup.
#[derive(Debug, Deserialize)]
pub struct Made {
    /// The backup.
    pub id: BackupId,
    /// The size of the disk in bytes.
    pub size: u64,
    content: String,
    /// The backup since which only the changes were read.
    #[serde(default)]
    pub since: Option<BackupId>,
    /// Otherwise why everything was read.
    #[serde(skip)]
    pub full: Option<String>,
    /// What it cost.
    pub statistics: Value,
}

impl Made {
    /// What the next backup to a target needs to read only the changes since this one.
    pub fn base(&self, target: &BackupTarget) -> BackupBase {
        BackupBase { target: target.uuid, backup: self.id.clone(), content: self.content.clone() }
    }
}

/// Starts a `vdi-backup` task.
pub async fn back_up(daemon: &Daemon, vdi: Uuid, asked: VdiBackup) -> Result<Task, Problem> {
    let condition = request::condition();
    let found = daemon.catalogue.read(move |view| {
        condition.map_or(Ok(()), |condition| condition.check(view))?;
        view.check_not_of_memory(vdi, "backed up")?;
        let target = view.backup_target(asked.target).map_err(|problem| problem.field("target"))?;
        Ok((view.vdi(vdi)?, target))
    });
    let (vdi, target) = found.await?;
    let extent = Extent::of(asked.full, asked.repair);
    must_be_ready(&vdi)?;
    let new =
        NewTask { uuid: Uuid::new_v4(), verb: VERB, about: vec![about_vdi(vdi.uuid)], cancellable: true, intent: None };
    let at_work = daemon.clone();
    daemon
        .tasks
        .start(daemon, new, move |context| async move { work(&at_work, &vdi, (&target, extent), context).await })
        .await
}

async fn work(
    daemon: &Daemon,
    vdi: &Vdi,
    (target, extent): (&BackupTarget, Extent),
    mut context: Context,
) -> Result<Value, Problem> {
    context.step("find", true).await?;
    let backups = context.unless_cancelled(target::backups_on(daemon, target, Some(vdi.disk()))).await?;
    let source = |snapshot| Source { vdi, snapshot, backups: &backups, machine: None, extent };
    let made = if vdi.read_only {
        copy(daemon, source(vdi.uuid), target, &mut context).await
    } else {
        let (temporary, snapshot) = Temporary::record(daemon, None).await?;
        let made = match take(daemon, vdi, snapshot, &mut context).await {
            Ok(()) => copy(daemon, source(snapshot), target, &mut context).await,
            Err(problem) => Err(problem),
        };
        let before = match &made {
            Ok(made) => keep(daemon, VERB, vec![(snapshot, made.base(target))], None).await,
            Err(_) => Vec::new(),
        };
        if let Err(problem) = context.step("remove", false).await {
            tracing::debug!(task = %context.uuid(), "its snapshot is destroyed although {problem}");
        }
        fault::point(VERB, "remove", false);
        temporary.remove().await;
        for temporary in before {
            temporary.remove().await;
        }
        fault::point(VERB, "remove", true);
        made
    };
    let Made { id, size, content, since, full, statistics } = made?;
    Ok(json!({
        "uuid": vdi.uuid,
        "target": target.uuid,
        "backup": id,
        "size": size,
        "content": content,
        "since": since,
        "full": full,
        "statistics": statistics,
    }))
}

/// Has snapshots become bases ([`keep_as_bases`]). The backups count in any case.
pub async fn keep(
    daemon: &Daemon,
    verb: &'static str,
    made: Vec<(Uuid, BackupBase)>,
    of_vm: Option<Uuid>,
) -> Vec<Temporary> {
    fault::point(verb, "base", false);
    let kept = keep_as_bases(daemon, made, of_vm).await.unwrap_or_else(|problem| {
        tracing::warn!("the next backup will read everything: {problem}");
        Vec::new()
    });
    fault::point(verb, "base", true);
    kept
}

/// The part of a name that fits into a list of backups.
fn label(name: &str) -> &str {
    let len = (0..=LABEL_MAX.min(name.len())).rev().find(|len| name.is_char_boundary(*len));
    len.and_then(|len| name.get(..len)).unwrap_or_default()
}

/// Takes the snapshot.
async fn take(daemon: &Daemon, vdi: &Vdi, snapshot: Uuid, context: &mut Context) -> Result<(), Problem> {
    context.step("snapshot", true).await?;
    fault::point(VERB, "snapshot", false);
    let description = "read by a backup, and destroyed after it".parse();
    let chosen = (snapshot, clock::now().wall);
    let begun = begin::backup_snapshot(daemon, vdi.uuid, chosen, description.unwrap_or_default()).await?;
    context.part(daemon, &begun).await?;
    fault::point(VERB, "snapshot", true);
    context.check()
}

async fn copy(
    daemon: &Daemon,
    source: Source<'_>,
    target: &BackupTarget,
    context: &mut Context,
) -> Result<Made, Problem> {
    context.step("copy", true).await?;
    fault::point(VERB, "copy", false);
    let made = source.copy(daemon, target, context, |transfer| context.transferred(transfer)).await?;
    fault::point(VERB, "copy", true);
    Ok(made)
}

/// How much of a disk a backup reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// What has changed since the last backup, if that is known.
    Changes,
    /// Everything.
    Full,
    /// Everything, and what is damaged on the target is sent again.
    Repair,
}

impl Extent {
    /// What was requested.
    pub fn of(full: bool, repair: bool) -> Extent {
        match (full, repair) {
            (_, true) => Extent::Repair,
            (true, false) => Extent::Full,
            (false, false) => Extent::Changes,
        }
    }
}

/// A disk to be copied to a target.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The VDI that is backed up.
    pub vdi: &'a Vdi,
    /// What is read: a read-only VDI.
    pub snapshot: Uuid,
    /// The backups of the disk on the target.
    pub backups: &'a [DiskBackup],
    /// The machine that it is backed up with.
    pub machine: Option<&'a Machine>,
    /// How much of it is read.
    pub extent: Extent,
}

impl Source<'_> {
    /// The arguments of the backup program, and the properties of the backup.
    async fn words(&self, daemon: &Daemon, read: &Vdi, socket: &Path) -> Result<(Vec<OsString>, String), Problem> {
        let Source { vdi, machine, .. } = *self;
        let properties = Properties {
            vdi: Some(vdi.disk()),
            logical_block_size: Some(block_size(daemon, read).await?),
            machine: machine.cloned(),
        };
        let properties = serde_json::to_string(&properties);
        let properties = properties.map_err(|error| Problem::failed("record the properties of a backup", error))?;
        let time = read.snapshot_time.unwrap_or_else(Timestamp::now);
        let mut words: Vec<OsString> = vec![nbd::uri::of_socket(socket).into()];
        // In one word, because a name may begin as an option does.
        words.push(format!("--name={}", label(vdi.name.as_str())).into());
        words.extend(["--disk".into(), identity(daemon, vdi.disk()).into()]);
        words.extend(["--time".into(), time.to_string().into()]);
        if let Some(machine @ Machine { vm, moment, .. }) = machine {
            words.extend(["--machine".into(), identity(daemon, *vm).into()]);
            words.extend(["--moment".into(), moment.to_string().into()]);
            words.extend(["--disks".into(), machine.backed_up().to_string().into()]);
        }
        if self.extent == Extent::Repair {
            words.push("--repair".into());
        }
        words.push("--properties".into());
        Ok((words, properties))
    }

    /// Reads the disk, or what has changed in it since its last backup if that is certain, and sends it to the target.
    pub async fn copy(
        &self,
        daemon: &Daemon,
        target: &BackupTarget,
        context: &Context,
        mut on_progress: impl FnMut(Transfer),
    ) -> Result<Made, Problem> {
        let snapshot = self.snapshot;
        let copying = async {
            // Plugged until the process has ended.
            let reader = Reader::open(daemon, snapshot, &[], context.requester()).await?;
            let read = daemon.catalogue.read(move |view| view.vdi(snapshot)).await?;
            let (words, properties) = self.words(daemon, &read, &reader.socket).await?;
            let at = At { properties: Some(properties), ..At::of(target) };
            let known = match self.extent {
                Extent::Changes => changes::since(daemon, self.vdi.disk(), &read, target, self.backups).await,
                Extent::Full => Err("a full backup was requested".to_owned()),
                Extent::Repair => Err("damage of the target was to be repaired".to_owned()),
            };
            let full = match known {
                Ok(changes) => {
                    let words = words.iter().cloned().chain(changes.words()).collect();
                    match at.run::<Made>(&["create"], words, &mut on_progress).await {
                        // The base may have been removed meanwhile, or its index be damaged.
                        Err(Problem { code: Code::State | Code::NotFound | Code::Failed, detail, .. }) => detail,
                        made => return made,
                    }
                }
                Err(why) => why,
            };
            tracing::info!(vdi = %self.vdi.uuid, target = %target.name, "the backup reads everything: {full}");
            let made = at.run::<Made>(&["create"], words, &mut on_progress).await?;
            Ok(Made { full: Some(full), ..made })
        };
        context.unless_cancelled(copying).await
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_long_name_is_cut_between_characters() {
        assert_eq!(label("web"), "web");
        let long = "\u{fc}".repeat(200);
        assert_eq!((label(&long).len(), label(&long).chars().count()), (254, 127));
    }
}
