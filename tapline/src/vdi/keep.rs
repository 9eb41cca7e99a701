//! `vdi keep`: the schedule of a disk's snapshots.

use api::{Code, Problem, Retention, VdiPatch};

use super::Disk;
use crate::session::Session;

/// Sets or ends a schedule.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("schedule").required(true).multiple(true))]
#[group(skip)]
pub struct Keep {
    #[command(flatten)]
    vdi: Disk,
    /// Take a snapshot each hour, and keep those of this many hours
    #[arg(long, value_name = "N", group = "schedule")]
    hourly: Option<u16>,
    /// Keep the last snapshot of each of this many days
    #[arg(long, value_name = "N", group = "schedule")]
    daily: Option<u16>,
    /// Keep the last snapshot of each of this many weeks
    #[arg(long, value_name = "N", group = "schedule")]
    weekly: Option<u16>,
    /// Keep the last snapshot of each of this many months
    #[arg(long, value_name = "N", group = "schedule")]
    monthly: Option<u16>,
    /// End the schedule; the snapshots stay
    #[arg(long, group = "schedule", conflicts_with_all = ["hourly", "daily", "weekly", "monthly"])]
    none: bool,
    /// Have this snapshot stay that a schedule has taken, whatever the schedule says
    #[arg(long, group = "schedule", conflicts_with_all = ["hourly", "daily", "weekly", "monthly", "none"])]
    snapshot: bool,
}

impl Keep {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Keep { vdi, hourly, daily, weekly, monthly, none, snapshot } = self;
        let number = Option::unwrap_or_default;
        let schedule = || {
            Retention::new(number(hourly), number(daily), number(weekly), number(monthly))
                .map_err(|why| Problem::new(Code::Invalid, why))
        };
        let patch = match (none, snapshot) {
            (true, _) => VdiPatch { retention: Some(None), ..VdiPatch::default() },
            (_, true) => VdiPatch { scheduled: Some(false), ..VdiPatch::default() },
            _ => VdiPatch { retention: Some(Some(schedule()?)), ..VdiPatch::default() },
        };
        let vdi = session.client.vdi_set(vdi.find(session).await?, &patch).await?;
        if session.json() { session.value(&vdi) } else { Ok(()) }
    }
}
