//! `vm schedule` and `vm pin`: sets the schedules of snapshots of a machine's disks and of its backups, and protects
//! snapshots from it.

use api::{Problem, VmPatch, VmSnapshotPatch};

use super::snapshot;
use crate::schedule::{Retained, To};
use crate::session::Session;

/// Arguments of `vm schedule`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("schedule").required(true).multiple(true))]
#[group(skip)]
pub struct Schedule {
    /// Name or UUID prefix of the machine
    vm: String,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    retained: Retained,
}

/// Arguments of `vm pin`.
#[derive(clap::Args)]
pub struct Pin {
    /// Name or UUID prefix of the machine
    vm: String,
    /// The snapshot: its name or UUID prefix
    #[arg(long)]
    snapshot: String,
}

impl Schedule {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm(&self.vm).await?;
        let before = async || Ok(session.client.vm(vm).await?.backup_schedule);
        let patch = match self.to.schedule(session, &self.retained, before).await? {
            None => VmPatch { retention: Some(self.retained.retention()?), ..VmPatch::default() },
            Some(schedule) => VmPatch { backup_schedule: Some(schedule), ..VmPatch::default() },
        };
        let vm = session.client.vm_set(vm, &patch).await?;
        if session.json() { session.value(&vm) } else { Ok(()) }
    }
}

impl Pin {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vm = session.vm(&self.vm).await?;
        let snapshot = snapshot::find(session, vm, &self.vm, &self.snapshot).await?.uuid;
        let patch = VmSnapshotPatch { scheduled: Some(false) };
        let snapshot = session.client.vm_snapshot_set(vm, snapshot, &patch).await?;
        if session.json() { session.value(&snapshot) } else { Ok(()) }
    }
}
