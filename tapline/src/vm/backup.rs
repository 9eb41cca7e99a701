//! `vm backup` and `vm restore`.

use api::{BackupId, Code, Description, Name, Problem, VmBackup, VmRestore, VmRestoreInPlace};
use control::printable;
use control::size::readable;
use serde_json::Value;
use uuid::Uuid;

use crate::confirm::Confirm;
use crate::output;
use crate::session::{Outcome, Session, Waiting, named, print};
use crate::target::named_backup;

/// Arguments of `vm backup`.
#[derive(clap::Args)]
pub struct Backup {
    /// Name or UUID prefix
    vm: String,
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

/// Arguments of `vm restore`.
#[derive(clap::Args)]
pub struct Restore {
    /// The backup target: its name or UUID prefix ('tapline target list')
    #[arg(value_name = "TARGET")]
    backup_target: String,
    /// The backup of any disk of the machine: its ID, of which the first 8 digits are enough ('tapline target backups')
    #[arg(value_name = "ID")]
    backup: BackupId,
    /// Name of the new machine; its disks are called NAME-0, NAME-1 and so on
    #[arg(long, required_unless_present = "in_place")]
    name: Option<Name>,
    /// Replace the contents of all disks of this machine (its name or UUID prefix), which must be halted; data written
    /// since then is lost. Its hardware stays as it is now
    #[arg(long, value_name = "VM", conflicts_with_all = ["name", "sr", "description"])]
    in_place: Option<String>,
    /// The repository of its disks: its name or UUID prefix [default: the only attached one, ISO libraries aside]
    #[arg(long)]
    sr: Option<String>,
    /// Description [default: that of the machine that was backed up]
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

impl Backup {
    /// Backs a machine up, and prints the IDs of the backups of its disks.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm(&self.vm).await?;
        let target = session.backup_target(&self.backup_target).await?;
        let answer = session.client.vm_backup(vm, &VmBackup { target, full: self.full, repair: self.repair }).await?;
        match session.outcome(answer, self.waiting).await? {
            Outcome::Done(made) => print(&report(&made)),
            Outcome::Printed => Ok(()),
        }
    }
}

/// A line for each disk, and why everything was read of it.
fn report(made: &Value) -> String {
    let line = |disk: &Value| {
        let bytes = |field: &str| readable(disk["statistics"][field].as_u64().unwrap_or(0));
        let why = disk["full"].as_str().map(|full| format!("; everything was read: {}", printable(full)));
        let [backup, why] = [disk["backup"].as_str().unwrap_or_default(), &why.unwrap_or_default()];
        format!("{backup}  {} read, {} sent{why}\n", bytes("read"), bytes("sent"))
    };
    made["disks"].as_array().into_iter().flatten().map(line).collect()
}

impl Restore {
    /// Restores a machine, and prints its UUID; or the disks of an existing one.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let target = session.backup_target(&self.backup_target).await?;
        match (&self.in_place, &self.name) {
            (Some(vm), _) => self.in_place(session, target, vm).await,
            (None, Some(name)) => {
                let name = name.clone();
                self.create(session, target, name).await
            }
            (None, None) => Err(Problem::new(Code::Invalid, "give the new machine a name: --name")),
        }
    }

    async fn create(self, session: &Session, target: Uuid, name: Name) -> Result<(), Problem> {
        let Restore { backup, sr, description, waiting, .. } = self;
        let sr = session.sr_or_only(sr.as_deref()).await?;
        let asked = VmRestore { backup, sr, name, uuid: None, description };
        let answer = session.client.vm_restore(target, &asked).await?;
        match session.outcome(answer, waiting).await? {
            Outcome::Done(made) => {
                if let Some(note) = made["note"].as_str() {
                    output::say(&format!("tapline: {note}\n"));
                }
                print(&format!("{}\n", made["uuid"].as_str().unwrap_or_default()))
            }
            Outcome::Printed => Ok(()),
        }
    }

    async fn in_place(&self, session: &Session, target: Uuid, vm: &str) -> Result<(), Problem> {
        let vm = session.client.vm(session.vm(vm).await?).await?;
        let machine = named("vm", vm.name.as_str(), vm.uuid);
        let backup = named_backup(session, target, &self.backup).await?;
        self.confirm.ask(&format!(
            "replace the contents of all disks of {machine} by {backup}; data written since then will be lost"
        ))?;
        let asked = VmRestoreInPlace { target, backup: self.backup.clone() };
        session.complete(session.client.vm_restore_in_place(vm.uuid, &asked).await?, self.waiting).await
    }
}
