//! `vdi backup` and `vdi restore`.

use api::{
    BackupId, Code, Description, ImageFormat, LogicalBlockSize, Name, Problem, VdiBackup, VdiRestore, VdiRestoreInPlace,
};
use control::printable;
use control::size::readable;
use serde_json::Value;
use uuid::Uuid;

use crate::confirm::Confirm;
use crate::find::Disk;
use crate::label::NewLabels;
use crate::session::{Outcome, Session, Waiting, named, print};
use crate::target::named_backup;
use crate::word;

/// Arguments of `vdi backup`.
#[derive(clap::Args)]
pub struct Backup {
    #[command(flatten)]
    vdi: Disk,
    /// The backup target: its name or UUID prefix ('tapline target list')
    #[arg(long = "to", value_name = "TARGET")]
    backup_target: String,
    /// Read everything, even if it is known what has changed since the last backup
    #[arg(long)]
    full: bool,
    /// Verify the target first, then send again what is damaged there: other backups of the same data are whole again
    #[arg(long)]
    repair: bool,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `vdi restore`.
#[derive(clap::Args)]
pub struct Restore {
    /// The backup target: its name or UUID prefix ('tapline target list')
    #[arg(value_name = "TARGET")]
    backup_target: String,
    /// The backup: its ID, of which the first 8 digits are enough ('tapline target backups')
    #[arg(value_name = "ID")]
    backup: BackupId,
    /// Name of the new disk
    #[arg(long, required_unless_present = "in_place")]
    name: Option<Name>,
    /// Replace the contents of this disk (its name or UUID prefix), which must be unplugged; data written since then is
    /// lost. The disk gets the size that it had, and is otherwise the same: snapshots, block devices and schedules stay
    #[arg(long, value_name = "DISK",
        conflicts_with_all = ["name", "logical_block_size", "format", "description", "tag", "config"])]
    in_place: Option<String>,
    /// Accept a backup of another disk, or of another host
    #[arg(long, requires = "in_place", conflicts_with = "name")]
    other_disk: bool,
    /// The repository: its name or UUID prefix [default: the only attached one, ISO libraries aside]
    #[arg(long)]
    sr: Option<String>,
    /// Size of the sectors that the guest addresses, in bytes [default: that of the disk that was backed up]
    #[arg(long, value_name = "BYTES", value_parser = word::block_size())]
    logical_block_size: Option<LogicalBlockSize>,
    /// Format [default: the repository's default]
    #[arg(long, value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    /// Description
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

impl Backup {
    /// Backs a disk up, and prints the ID of the backup.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vdi = self.vdi.find(session).await?;
        let target = session.backup_target(&self.backup_target).await?;
        let answer =
            session.client.vdi_backup(vdi, &VdiBackup { target, full: self.full, repair: self.repair }).await?;
        match session.outcome(answer, self.waiting).await? {
            Outcome::Done(made) => print(&report(&made)),
            Outcome::Printed => Ok(()),
        }
    }
}

/// The ID of a backup, what it cost, and why not less.
fn report(made: &Value) -> String {
    let bytes = |field: &str| readable(made["statistics"][field].as_u64().unwrap_or(0));
    let costs = ["read", "holes", "unchanged", "deduplicated", "sent"].map(|field| format!("{} {field}", bytes(field)));
    let extent = match (made["since"].as_str(), made["full"].as_str()) {
        (Some(since), _) => format!("only changes since {since} were read\n"),
        (None, Some(full)) => format!("everything was read: {}\n", printable(full)),
        (None, None) => String::new(),
    };
    format!("{}\n{}\n{extent}", made["backup"].as_str().unwrap_or_default(), costs.join(", "))
}

impl Restore {
    /// Restores a backup to a new disk, and prints its UUID; or to an existing one.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let target = session.backup_target(&self.backup_target).await?;
        match (&self.in_place, &self.name) {
            (Some(disk), _) => self.in_place(session, target, disk).await,
            (None, Some(name)) => {
                let name = name.clone();
                self.create(session, target, name).await
            }
            (None, None) => Err(Problem::new(Code::Invalid, "give the new disk a name: --name")),
        }
    }

    async fn create(self, session: &Session, target: Uuid, name: Name) -> Result<(), Problem> {
        let Restore { backup, sr, logical_block_size, format, description, labels, waiting, .. } = self;
        let (tags, other_config) = labels.values()?;
        let sr = session.sr_or_only(sr.as_deref()).await?;
        let description = description.unwrap_or_default();
        let asked =
            VdiRestore { backup, sr, name, uuid: None, description, logical_block_size, format, tags, other_config };
        session.print_created(session.client.vdi_restore(target, &asked).await?, waiting).await
    }

    async fn in_place(&self, session: &Session, target: Uuid, disk: &str) -> Result<(), Problem> {
        let sr = session.sr_if(self.sr.as_deref()).await?;
        let vdi = session.client.vdi(session.vdi_in(sr, disk).await?).await?;
        let disk = named("disk", vdi.name.as_str(), vdi.uuid);
        let backup = named_backup(session, target, &self.backup).await?;
        self.confirm
            .ask(&format!("replace the contents of {disk} by {backup}; data written since then will be lost"))?;
        let asked = VdiRestoreInPlace { target, backup: self.backup.clone(), other_disk: self.other_disk };
        session.complete(session.client.vdi_restore_in_place(vdi.uuid, &asked).await?, self.waiting).await
    }
}
