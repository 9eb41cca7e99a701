//! `vdi schedule` and `vdi pin`: sets the schedules of a disk's snapshots and backups, and protects snapshots from it.

use api::{Problem, VdiPatch};

use super::Disk;
use crate::schedule::{Retained, To};
use crate::session::Session;

/// Arguments of `vdi schedule`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("schedule").required(true).multiple(true))]
#[group(skip)]
pub struct Schedule {
    #[command(flatten)]
    vdi: Disk,
    #[command(flatten)]
    to: To,
    #[command(flatten)]
    retained: Retained,
}

/// Arguments of `vdi pin`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Pin {
    #[command(flatten)]
    snapshot: Disk,
}

impl Schedule {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let before = async || {
            let vdi = session.client.vdi(self.vdi.find(session).await?).await?;
            Ok(vdi.backup_schedule)
        };
        let patch = match self.to.schedule(session, &self.retained, before).await? {
            None => VdiPatch { retention: Some(self.retained.retention()?), ..VdiPatch::default() },
            Some(schedule) => VdiPatch { backup_schedule: Some(schedule), ..VdiPatch::default() },
        };
        patch_vdi(session, &self.vdi, &patch).await
    }
}

impl Pin {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        patch_vdi(session, &self.snapshot, &VdiPatch { scheduled: Some(false), ..VdiPatch::default() }).await
    }
}

async fn patch_vdi(session: &Session, vdi: &Disk, patch: &VdiPatch) -> Result<(), Problem> {
    let vdi = session.client.vdi_set(vdi.find(session).await?, patch).await?;
    if session.json() { session.value(&vdi) } else { Ok(()) }
}
