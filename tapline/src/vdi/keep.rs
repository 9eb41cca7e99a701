//! `vdi keep`: the schedule of a disk's snapshots.

use api::{Problem, VdiPatch};

use super::Disk;
use crate::schedule::Schedule;
use crate::session::Session;

/// Sets or ends a schedule.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("schedule").required(true).multiple(true))]
#[group(skip)]
pub struct Keep {
    #[command(flatten)]
    vdi: Disk,
    #[command(flatten)]
    schedule: Schedule,
    /// Have this snapshot stay that a schedule has taken, whatever the schedule says
    #[arg(long, group = "schedule", conflicts_with_all = ["hourly", "daily", "weekly", "monthly", "none"])]
    snapshot: bool,
}

impl Keep {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let patch = match self.snapshot {
            true => VdiPatch { scheduled: Some(false), ..VdiPatch::default() },
            false => VdiPatch { retention: Some(self.schedule.retention()?), ..VdiPatch::default() },
        };
        let vdi = session.client.vdi_set(self.vdi.find(session).await?, &patch).await?;
        if session.json() { session.value(&vdi) } else { Ok(()) }
    }
}
