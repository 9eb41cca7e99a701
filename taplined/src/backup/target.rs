//! Targets: registered with the ID that is found where they are; their backups listed, verified and removed.

use std::ffi::OsString;
use std::time::Duration;

use api::{
    BackupId, BackupPlace, BackupPrune, BackupRemove, BackupTarget, BackupTargetAdd, Code, DiskBackup, Problem,
    S3Access, Task,
};
use jiff::Timestamp;
use repo::catalogue::NewTask;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use super::identity;
use super::program::At;
use crate::clock;
use crate::daemon::Daemon;
use crate::request;

/// Backups that a request can remove: they are on one command line.
const REMOVED_MAX: usize = 1000;

/// The longest time of grace in hours: ten years.
const GRACE_MAX: u32 = 87_600;

/// What is read of the description of a target.
#[derive(Deserialize)]
struct Shown {
    id: String,
}

impl At {
    /// A registered target.
    pub fn of(target: &BackupTarget) -> At {
        let BackupTarget { path, s3, key_file, target_id, .. } = target.clone();
        At { path, s3, key_file, target_id: Some(target_id), properties: None }
    }
}

/// Registers the target that is in a directory or bucket, which must be there.
pub async fn add(daemon: &Daemon, asked: BackupTargetAdd) -> Result<BackupTarget, Problem> {
    let BackupTargetAdd { uuid, name, path, s3, key_file, target_id } = asked;
    if target_id.as_deref().is_some_and(|id| id.len() != 32 || id.parse::<BackupId>().is_err()) {
        let what = "the ID of a backup target has 32 hexadecimal digits, in lower case";
        return Err(Problem::new(Code::Invalid, what).field("target_id"));
    }
    check_access(&path, s3.as_ref())?;
    let at = At { path: path.clone(), s3: s3.clone(), key_file: key_file.clone(), target_id, properties: None };
    let found = at.ask::<Shown>(&["target", "show"], Vec::new(), daemon.config.storage.patience()).await;
    let found = found.map_err(|problem| match problem.code {
        Code::NotFound => problem.field("path").advise(format!("create it: tapline backup target create {path}")),
        // The key, the server or the bucket: what was given does not work.
        Code::Failed | Code::State if s3.is_some() => Problem { code: Code::State, ..problem }.field("s3"),
        _ => problem,
    })?;
    let target = BackupTarget {
        uuid: uuid.unwrap_or_else(Uuid::new_v4),
        name,
        path,
        s3,
        target_id: found.id,
        key_file,
        created: Timestamp::now(),
    };
    let added = request::change(&daemon.catalogue, 201, move |tx| {
        uuid.map_or(Ok(()), |uuid| tx.check_uuid_free(uuid))?;
        tx.add_backup_target(&target)?;
        Ok(target)
    });
    added.await
}

/// Refuses a bucket without a key for it, and a directory with one.
fn check_access(path: &BackupPlace, s3: Option<&S3Access>) -> Result<(), Problem> {
    let what = match (path.is_s3(), s3) {
        (true, None) => format!("{path} is in a bucket, and there is no file with the key for its server"),
        (false, Some(_)) => format!("{path} is a directory, which has no server"),
        _ => return Ok(()),
    };
    let advice = "name a bucket as s3://BUCKET[/PREFIX], and a file with the key: --credentials FILE";
    Err(Problem::new(Code::Invalid, what).field("s3").advise(advice))
}

/// The backups on a target, or those of one VDI, the oldest first.
pub async fn backups(daemon: &Daemon, target: Uuid, vdi: Option<Uuid>) -> Result<Vec<DiskBackup>, Problem> {
    let target = daemon.catalogue.read_for_client(move |view| view.backup_target(target)).await?;
    let patience = daemon.config.storage.patience();
    daemon.backup_turns.during(&target, patience, |rest| list(daemon, &target, vdi, rest)).await
}

/// The same on a target that the caller has, for a task: it waits for no requests of others.
pub async fn backups_on(daemon: &Daemon, target: &BackupTarget, vdi: Option<Uuid>) -> Result<Vec<DiskBackup>, Problem> {
    list(daemon, target, vdi, daemon.config.storage.patience()).await
}

async fn list(
    daemon: &Daemon,
    target: &BackupTarget,
    vdi: Option<Uuid>,
    patience: Duration,
) -> Result<Vec<DiskBackup>, Problem> {
    let of_disk = vdi.map(|vdi| ["--disk".into(), identity(daemon, vdi).into()]);
    let words = of_disk.into_iter().flatten().collect();
    At::of(target).ask(&["list"], words, patience).await
}

/// A verb on a target, as a task that leaves nothing behind.
struct Work {
    verb: &'static str,
    /// The verb of the program, which is also the step.
    step: &'static str,
    words: Vec<OsString>,
    /// The result of the task.
    result: fn(&BackupTarget, Value) -> Result<Value, Problem>,
}

impl Work {
    async fn start(self, daemon: &Daemon, target: BackupTarget) -> Result<Task, Problem> {
        let Work { verb, step, words, result } = self;
        let new = NewTask { uuid: Uuid::new_v4(), verb, about: Vec::new(), cancellable: true, intent: None };
        let started = daemon.tasks.start(daemon, new, move |mut context| async move {
            context.step(step, true).await?;
            let (at, verb) = (At::of(&target), [step]);
            let ran = at.run::<Value>(&verb, words, |transfer| context.transferred(transfer));
            let mut done = result(&target, context.unless_cancelled(ran).await?)?;
            if let Some(fields) = done.as_object_mut() {
                fields.insert("uuid".to_owned(), json!(target.uuid));
            }
            Ok(done)
        });
        started.await
    }
}

async fn find(daemon: &Daemon, target: Uuid) -> Result<BackupTarget, Problem> {
    daemon.catalogue.read(move |view| view.backup_target(target)).await
}

/// Starts a `backup-verify` task, which reads everything on a target. It fails if damage costs a backup some of its
/// content.
pub async fn verify(daemon: &Daemon, target: Uuid) -> Result<Task, Problem> {
    // Damage of what no backup needs, or has elsewhere, costs nothing.
    let result = |target: &BackupTarget, verified: Value| match verified["lost"].as_array().map(Vec::is_empty) {
        Some(true) => Ok(verified),
        _ => Err(damaged(target, &verified)),
    };
    let work = Work { verb: "backup-verify", step: "verify", words: Vec::new(), result };
    work.start(daemon, find(daemon, target).await?).await
}

/// Starts a `backup-remove` task.
pub async fn remove(daemon: &Daemon, target: Uuid, asked: BackupRemove) -> Result<Task, Problem> {
    if asked.backups.is_empty() || asked.backups.len() > REMOVED_MAX {
        let what = format!("a request can remove 1 to {REMOVED_MAX} backups");
        return Err(Problem::new(Code::Invalid, what).field("backups"));
    }
    let words = asked.backups.iter().map(|backup| backup.to_string().into()).collect();
    let work = Work { verb: "backup-remove", step: "remove", words, result: |_, removed| Ok(removed) };
    work.start(daemon, find(daemon, target).await?).await
}

/// Starts a `backup-prune` task.
pub async fn prune(daemon: &Daemon, target: Uuid, asked: BackupPrune) -> Result<Task, Problem> {
    let BackupPrune { vdi, vm, last, hourly, daily, weekly, monthly, grace } = asked;
    let rule = [
        ("--keep-last", last),
        ("--keep-hourly", hourly),
        ("--keep-daily", daily),
        ("--keep-weekly", weekly),
        ("--keep-monthly", monthly),
    ];
    let given: Vec<(&str, u16)> = rule.into_iter().filter_map(|(word, number)| Some((word, number?))).collect();
    let invalid = |what: &str, field| Err(Problem::new(Code::Invalid, what).field(field));
    if !given.is_empty() && given.iter().all(|(_, number)| *number == 0) {
        return invalid("this rule would retain no backup at all", "last");
    }
    match (vdi, vm) {
        (Some(_), Some(_)) => return invalid("give a VDI or a VM, whose disks are retained or removed together", "vm"),
        (Some(_), None) if given.is_empty() => {
            return invalid("the backups of one VDI can only be removed by a rule", "vdi");
        }
        (None, Some(_)) if given.is_empty() => {
            return invalid("the backups of one VM can only be removed by a rule", "vm");
        }
        _ => {}
    }
    if grace.is_some_and(|grace| grace > GRACE_MAX) {
        return invalid("a time of grace must be at most 87600 hours", "grace");
    }
    let mut words: Vec<OsString> =
        given.into_iter().flat_map(|(word, number)| [word.into(), number.to_string().into()]).collect();
    words.extend(vm.into_iter().flat_map(|vm| ["--machine".into(), identity(daemon, vm).into()]));
    words.extend(vdi.into_iter().flat_map(|vdi| ["--disk".into(), identity(daemon, vdi).into()]));
    // What decided that it is time decides what is from the future.
    words.extend(["--now".into(), clock::now().wall.to_string().into()]);
    words.extend(grace.into_iter().flat_map(|grace| ["--grace".into(), grace.to_string().into()]));
    let work = Work { verb: "backup-prune", step: "prune", words, result: |_, pruned| Ok(pruned) };
    work.start(daemon, find(daemon, target).await?).await
}

fn damaged(target: &BackupTarget, verified: &Value) -> Problem {
    let number = |list: &str| verified[list].as_array().map_or(0, Vec::len);
    let (name, objects, backups) = (&target.name, number("damaged"), number("lost"));
    let what = format!(
        "the backup target '{name}' is damaged: {objects} objects, which cost {backups} backups some of their content"
    );
    Problem::new(Code::Failed, what).advise(format!(
        "list what is lost: tapline backup verify {}; then back the disks of those backups up: tapline vdi backup VDI \
         --to {name} --repair",
        target.path
    ))
}
