//! Options for a schedule of snapshots of a disk or machine.

use api::{Code, Problem, Retention};

/// How many snapshots are retained, or that the schedule ends. All options are in the argument group `schedule`.
#[derive(clap::Args)]
#[group(skip)]
pub struct Retained {
    /// Take a snapshot each hour and retain those of the last N hours
    #[arg(long, value_name = "N", group = "schedule")]
    hourly: Option<u16>,
    /// Retain the last snapshot of each of N days
    #[arg(long, value_name = "N", group = "schedule")]
    daily: Option<u16>,
    /// Retain the last snapshot of each of N weeks
    #[arg(long, value_name = "N", group = "schedule")]
    weekly: Option<u16>,
    /// Retain the last snapshot of each of N months
    #[arg(long, value_name = "N", group = "schedule")]
    monthly: Option<u16>,
    /// End the schedule; the snapshots stay
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
}

/// Formats why a due snapshot was not taken, and the advice.
pub fn missed_snapshot(problem: Option<&Problem>) -> String {
    let Some(Problem { detail, advice, .. }) = problem else { return String::new() };
    [Some(detail.clone()), advice.clone()].into_iter().flatten().collect::<Vec<_>>().join("\n")
}
