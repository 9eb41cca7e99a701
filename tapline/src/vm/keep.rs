//! `vm keep`: the schedule of snapshots of all disks of a machine.

use api::{Problem, VmPatch, VmSnapshotPatch};

use super::snapshot;
use crate::schedule::Schedule;
use crate::session::Session;

/// Sets or ends a schedule.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("schedule").required(true).multiple(true))]
#[group(skip)]
pub struct Keep {
    /// Name or UUID prefix of the machine
    vm: String,
    #[command(flatten)]
    schedule: Schedule,
    /// Have this snapshot of the machine stay that its schedule has taken, whatever the schedule says: its name or UUID
    /// prefix
    #[arg(long, group = "schedule", conflicts_with_all = ["hourly", "daily", "weekly", "monthly", "none"])]
    snapshot: Option<String>,
}

impl Keep {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Keep { vm: text, schedule, snapshot } = self;
        let vm = session.vm(&text).await?;
        if let Some(snapshot) = snapshot {
            let snapshot = snapshot::find(session, vm, &text, &snapshot).await?.uuid;
            let asked = VmSnapshotPatch { scheduled: Some(false) };
            let snapshot = session.client.vm_snapshot_set(vm, snapshot, &asked).await?;
            return if session.json() { session.value(&snapshot) } else { Ok(()) };
        }
        let patch = VmPatch { retention: Some(schedule.retention()?), ..VmPatch::default() };
        let vm = session.client.vm_set(vm, &patch).await?;
        if session.json() { session.value(&vm) } else { Ok(()) }
    }
}
