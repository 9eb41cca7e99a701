//! `tapline target`: backup targets that the daemon knows.

use api::client::Answer;
use api::{
    BackupId, BackupPlace, BackupPrune, BackupRemove, BackupTarget, BackupTargetAdd, Code, DiskBackup, Name, Problem,
    Region, S3Access, ServerUrl,
};
use arguments::number;
use control::printable;
use control::size::readable;
use serde_json::Value;
use uuid::Uuid;

use crate::column::{Column, Names};
use crate::session::{Listing, Outcome, Session, Waiting, print};
use crate::word::{self, HostPath};

/// Operations on backup targets that the daemon knows.
#[derive(clap::Subcommand)]
pub enum TargetVerb {
    /// Register a backup target and print its UUID; 'tapline backup target create' makes one of a directory or bucket
    Add {
        /// A unique name
        name: Name,
        /// The directory of the target on the daemon's host, or s3://BUCKET[/PREFIX]
        #[arg(value_name = "DIR|URL", value_parser = place)]
        path: Place,
        #[command(flatten)]
        access: Access,
        /// The file with its key, if it is encrypted; readable by root only
        #[arg(long, value_name = "FILE", value_parser = word::path)]
        key_file: Option<HostPath>,
        /// Fail unless it is the target with this ID, which 'tapline backup target create' has printed
        #[arg(long, value_name = "ID")]
        target_id: Option<String>,
    },
    /// List the backup targets
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        listing: Listing,
    },
    /// Show a backup target
    Show {
        /// Name or UUID prefix
        #[arg(value_name = "TARGET")]
        backup_target: String,
    },
    /// Forget a backup target; the backups on it stay
    #[command(visible_alias = "rm", aliases = ["delete", "forget", "destroy"])]
    Remove {
        /// Name or UUID prefix
        #[arg(value_name = "TARGET")]
        backup_target: String,
    },
    /// List the backups on a target, the oldest first
    Backups {
        /// Name or UUID prefix
        #[arg(value_name = "TARGET")]
        backup_target: String,
        /// Only those of this disk: its name or UUID prefix
        #[arg(long)]
        vdi: Option<String>,
        /// Only those of disks that had this name when they were backed up, also of disks that are gone
        #[arg(long, conflicts_with = "vdi")]
        name: Option<String>,
        #[command(flatten)]
        listing: Listing,
    },
    /// Remove backups and free the space that no other backup needs
    RemoveBackups {
        /// Name or UUID prefix
        #[arg(value_name = "TARGET")]
        backup_target: String,
        /// The backups: their IDs, of which the first 8 digits are enough
        #[arg(value_name = "ID", required = true)]
        backups: Vec<BackupId>,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Remove the backups that are superfluous by a rule, and free space
    Prune(Prune),
    /// Read everything on a target and check it; fails if a backup has lost something
    Verify {
        /// Name or UUID prefix
        #[arg(value_name = "TARGET")]
        backup_target: String,
        #[command(flatten)]
        waiting: Waiting,
    },
}

/// The word for the place of a target.
#[derive(Clone)]
pub enum Place {
    Bucket(BackupPlace),
    Directory(HostPath),
}

fn place(word: &str) -> Result<Place, String> {
    match word.split_once("://") {
        Some(_) => word.parse().map(Place::Bucket),
        None => word::directory(word).map(Place::Directory),
    }
}

/// How the bucket of a target is reached.
#[derive(clap::Args)]
#[group(skip)]
pub struct Access {
    /// Of a target in S3: the file with the key for its server, readable by root only: aws_access_key_id and
    /// aws_secret_access_key of the profile 'default', as Amazon's tools keep it
    #[arg(long, value_name = "FILE", value_parser = word::path)]
    credentials: Option<HostPath>,
    /// Of a target in S3: its server, for all but Amazon's; TLS is used unless it begins with http://
    #[arg(long, value_name = "URL", requires = "credentials")]
    endpoint: Option<ServerUrl>,
    /// Of a target in S3: the region
    #[arg(long, value_name = "NAME", requires = "credentials")]
    region: Option<Region>,
    /// Of a target in S3: certificates of the authorities that are trusted (PEM), instead of those of the system
    #[arg(long, value_name = "FILE", value_parser = word::path, requires = "credentials")]
    ca_file: Option<HostPath>,
}

impl Access {
    fn of_request(self, session: &Session) -> Result<Option<S3Access>, Problem> {
        let Access { credentials, endpoint, region, ca_file } = self;
        let Some(credentials) = credentials else { return Ok(None) };
        let credentials = session.path(credentials)?;
        let ca_file = ca_file.map(|file| session.path(file)).transpose()?;
        Ok(Some(S3Access { credentials, endpoint, region, ca_file }))
    }
}

/// Arguments of `target prune`. Without a rule no backup is removed, and only leftovers are deleted.
#[derive(clap::Args)]
pub struct Prune {
    /// Name or UUID prefix
    #[arg(value_name = "TARGET")]
    backup_target: String,
    /// Only backups of this disk alone: its name or UUID prefix [default: those of each machine and each disk alone]
    #[arg(long)]
    vdi: Option<String>,
    /// Only backups of this machine, of which all disks are retained or removed together: its name or UUID prefix
    #[arg(long, conflicts_with = "vdi")]
    vm: Option<String>,
    /// Retain the last N backups
    #[arg(long = "keep-last", value_name = "N")]
    last: Option<u16>,
    /// Retain the last backup of each of N hours
    #[arg(long = "keep-hourly", value_name = "N")]
    hourly: Option<u16>,
    /// Retain the last backup of each of N days
    #[arg(long = "keep-daily", value_name = "N")]
    daily: Option<u16>,
    /// Retain the last backup of each of N weeks
    #[arg(long = "keep-weekly", value_name = "N")]
    weekly: Option<u16>,
    /// Retain the last backup of each of N months
    #[arg(long = "keep-monthly", value_name = "N")]
    monthly: Option<u16>,
    /// Spare what no backup refers to for this time: it may be of a backup that is running on any host [default: 24]
    #[arg(long, value_name = "HOURS", value_parser = number::<u32>(0..=87_600))]
    grace: Option<u32>,
    #[command(flatten)]
    waiting: Waiting,
}

impl Prune {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Prune { backup_target, vdi, vm, last, hourly, daily, weekly, monthly, grace, waiting } = self;
        let target = session.backup_target(&backup_target).await?;
        let vdi = session.vdi_if(vdi.as_deref()).await?;
        let vm = session.vm_if(vm.as_deref()).await?;
        let asked = BackupPrune { vdi, vm, last, hourly, daily, weekly, monthly, grace };
        removed(session, session.client.backup_prune(target, &asked).await?, waiting).await
    }
}

/// Waits for backups to be removed, and prints how many were.
async fn removed(session: &Session, answer: Answer<Value>, waiting: Waiting) -> Result<(), Problem> {
    match session.outcome(answer, waiting).await? {
        Outcome::Done(done) => {
            let backups = done["removed"].as_array().map_or(0, Vec::len);
            let number = |field: &str| done[field].as_u64().unwrap_or(0);
            let mut text = format!(
                "{backups} backups removed, {} objects deleted; {} objects that no backup refers to are spared until \
                 their grace period ends\n",
                number("deleted"),
                number("spared")
            );
            if number("unjudged") > 0 {
                text += &format!(
                    "{} backups are retained whatever the rule: they belong to machines of which the other disks are \
                     not backed up, or were not chosen\n",
                    number("unjudged")
                );
            }
            print(&text)
        }
        Outcome::Printed => Ok(()),
    }
}

const COLUMNS: &[Column<BackupTarget>] = &[
    Column::new("uuid", |target, uuids| uuids.show(target.uuid)),
    Column::new("name", |target, _| target.name.to_string()),
    Column::new("path", |target, _| target.path.to_string()),
    Column::new("key file", |target: &BackupTarget, _| {
        target.key_file.as_ref().map(ToString::to_string).unwrap_or_default()
    })
    .if_room(),
    Column::new("target id", |target: &BackupTarget, _| target.target_id.clone()).wide(),
    Column::new("credentials", |target: &BackupTarget, _| of_s3(target, |s3| Some(&s3.credentials))).alone(),
    Column::new("endpoint", |target: &BackupTarget, _| of_s3(target, |s3| s3.endpoint.as_ref())).alone(),
    Column::new("region", |target: &BackupTarget, _| of_s3(target, |s3| s3.region.as_ref())).alone(),
    Column::new("ca file", |target: &BackupTarget, _| of_s3(target, |s3| s3.ca_file.as_ref())).alone(),
    Column::new("created", |target: &BackupTarget, _| format!("{:.0}", target.created)).if_room(),
];

/// How the bucket of a target is reached, in a cell.
fn of_s3<T: ToString>(target: &BackupTarget, field: impl Fn(&S3Access) -> Option<&T>) -> String {
    target.s3.as_ref().and_then(field).map(T::to_string).unwrap_or_default()
}

const BACKUPS: &[Column<DiskBackup>] = &[
    Column::new("id", |backup, _| backup.id.to_string()),
    Column::new("time", |backup, _| format!("{:.0}", backup.time)),
    Column::new("size", |backup: &DiskBackup, _| readable(backup.size)).right(),
    Column::new("name", |backup, _| backup.name.clone()),
    Column::new("machine at", |backup: &DiskBackup, _| moment(backup)).if_room(),
];

/// The moment that a backup is a part of, in short.
fn moment(backup: &DiskBackup) -> String {
    backup.moment.as_ref().map_or_else(String::new, |moment| {
        let id = moment.id.get(..8).unwrap_or(&moment.id);
        format!("{id} ({} disks)", moment.disks)
    })
}

impl TargetVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            TargetVerb::Add { name, path, access, key_file, target_id } => {
                let path = match path {
                    Place::Bucket(url) => url,
                    Place::Directory(path) => session.path(path)?.into(),
                };
                let s3 = access.of_request(session)?;
                let key_file = key_file.map(|file| session.path(file)).transpose()?;
                let asked = BackupTargetAdd { uuid: None, name, path, s3, key_file, target_id };
                let target = client.backup_target_add(&asked).await?;
                if session.json() { session.value(&target) } else { print(&format!("{}\n", target.uuid)) }
            }
            TargetVerb::List { listing } => session.list(&client.backup_targets(None).await?, COLUMNS, &listing),
            TargetVerb::Show { backup_target } => {
                let target = session.backup_target(&backup_target).await?;
                session.show(&client.backup_target(target).await?, COLUMNS)
            }
            TargetVerb::Remove { backup_target } => {
                client.backup_target_remove(session.backup_target(&backup_target).await?).await
            }
            TargetVerb::Backups { backup_target, vdi, name, listing } => {
                let target = session.backup_target(&backup_target).await?;
                let vdi = session.vdi_if(vdi.as_deref()).await.map_err(|problem| match problem.code {
                    Code::NotFound => problem.advise("of a disk that is gone: --name NAME, or leave it out"),
                    _ => problem,
                })?;
                let mut backups = client.backups(target, vdi).await?;
                backups.retain(|backup| name.as_ref().is_none_or(|name| backup.name == *name));
                session.list_named(&backups, BACKUPS, &listing, &[], Names::new()).await
            }
            TargetVerb::RemoveBackups { backup_target, backups, waiting } => {
                let target = session.backup_target(&backup_target).await?;
                removed(session, client.backup_remove(target, &BackupRemove { backups }).await?, waiting).await
            }
            TargetVerb::Prune(prune) => prune.run(session).await,
            TargetVerb::Verify { backup_target, waiting } => {
                let target = session.backup_target(&backup_target).await?;
                match session.outcome(client.backup_verify(target).await?, waiting).await? {
                    Outcome::Done(verified) => print(&clean(&verified)),
                    Outcome::Printed => Ok(()),
                }
            }
        }
    }
}

/// The line that says what was verified.
fn clean(verified: &Value) -> String {
    let number = |field: &str| verified[field].as_u64().unwrap_or(0);
    let (backups, read, packs) = (number("backups"), readable(number("bytes")), number("packs"));
    match verified["damaged"].as_array().map_or(0, Vec::len) {
        0 => format!("clean: {backups} backups, {read} in {packs} packs\n"),
        objects => format!("{objects} objects are damaged, and each of {backups} backups can be restored\n"),
    }
}

/// Formats a backup by its ID, with the name of its disk and its moment if it is on the target.
pub async fn named_backup(session: &Session, target: Uuid, id: &BackupId) -> Result<String, Problem> {
    let all = session.client.backups(target, None).await?;
    let found = all.iter().find(|backup| backup.id.to_string().starts_with(&id.to_string()));
    Ok(match found {
        Some(backup) => format!("backup {id} of '{}' at {:.0}", printable(&backup.name), backup.time),
        // The daemon refuses it in its own words.
        None => format!("backup {id}"),
    })
}
