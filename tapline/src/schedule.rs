//! Options for a schedule of snapshots or backups of a disk or machine.

use api::{BackupSchedule, Code, Problem, Retention};
use jiff::Timestamp;
use uuid::Uuid;

use crate::column::Uuids;
use crate::session::Session;

/// How many are retained, or that the schedule ends. All options are in the argument group `schedule`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Retained {
    /// Take a snapshot (with --to: make a backup) each hour and retain those of the last N hours
    #[arg(long, value_name = "N", group = "schedule")]
    hourly: Option<u16>,
    /// Retain the last one of each of N days
    #[arg(long, value_name = "N", group = "schedule")]
    daily: Option<u16>,
    /// Retain the last one of each of N weeks
    #[arg(long, value_name = "N", group = "schedule")]
    weekly: Option<u16>,
    /// Retain the last one of each of N months
    #[arg(long, value_name = "N", group = "schedule")]
    monthly: Option<u16>,
    /// End the schedule; what it has made stays
    #[arg(long, group = "schedule", conflicts_with_all = ["hourly", "daily", "weekly", "monthly"])]
    none: bool,
}

impl Retained {
    /// The schedule; `None` ends it.
    pub fn retention(&self) -> Result<Option<Retention>, Problem> {
        if self.none {
            return Ok(None);
        }
        let Retained { hourly, daily, weekly, monthly, .. } = *self;
        let number = Option::unwrap_or_default;
        Retention::new(number(hourly), number(daily), number(weekly), number(monthly))
            .map(Some)
            .map_err(|why| Problem::new(Code::Invalid, why))
    }

    /// The schedule of backups to a target; `None` ends it.
    fn backups(&self, target: Uuid) -> Result<Option<BackupSchedule>, Problem> {
        if self.none {
            return Ok(None);
        }
        let Retained { hourly, daily, weekly, monthly, .. } = *self;
        let number = Option::unwrap_or_default;
        let schedule = BackupSchedule {
            target,
            hourly: number(hourly),
            daily: number(daily),
            weekly: number(weekly),
            monthly: number(monthly),
        };
        schedule.checked().map(Some).map_err(|why| Problem::new(Code::Invalid, why))
    }
}

/// Where backups go, if the schedule is one of backups.
#[derive(clap::Args)]
#[group(skip)]
pub struct To {
    /// Make backups instead of snapshots, to this target, where the numbers hold for all backups of it, also those made
    /// otherwise: its name or UUID prefix ('tapline target list')
    #[arg(long = "to", value_name = "TARGET")]
    backup_target: Option<String>,
}

impl To {
    /// The schedule of backups to be set, if it is one; `before` is that of the object. A schedule is ended for the
    /// target that it backs up to.
    pub async fn schedule(
        &self,
        session: &Session,
        retained: &Retained,
        before: impl AsyncFnOnce() -> Result<Option<BackupSchedule>, Problem>,
    ) -> Result<Option<Option<BackupSchedule>>, Problem> {
        let Some(word) = &self.backup_target else { return Ok(None) };
        let target = session.backup_target(word).await?;
        let schedule = retained.backups(target)?;
        let before = before().await?.map(|before| before.target);
        if let (Some(_), Some(other)) = (schedule, before.filter(|before| *before != target)) {
            let what = format!("there is a schedule of backups to another target, {other}: an object has one");
            return Err(Problem::new(Code::State, what).advise(format!("end it first: --to {other} --none")));
        }
        if schedule.is_none() && before != Some(target) {
            let what = format!("there is no schedule of backups to '{word}'");
            return Err(Problem::new(Code::State, what).advise("see its schedules: tapline vdi show, tapline vm show"));
        }
        Ok(Some(schedule))
    }
}

/// Formats a schedule of backups.
pub fn backed_up(schedule: Option<&BackupSchedule>, uuids: Uuids<'_>) -> String {
    schedule.map(|schedule| format!("{schedule}, to {}", uuids.named(schedule.target))).unwrap_or_default()
}

/// Formats when a backup was due that was made.
pub fn last_backup(at: Option<Timestamp>) -> String {
    at.map(|at| format!("{at:.0}")).unwrap_or_default()
}

/// Formats why what was due was not made, and the advice.
pub fn missed(problem: Option<&Problem>) -> String {
    let Some(Problem { detail, advice, .. }) = problem else { return String::new() };
    [Some(detail.clone()), advice.clone()].into_iter().flatten().collect::<Vec<_>>().join("\n")
}
