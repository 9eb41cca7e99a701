//! Which scheduled snapshots of a VDI or a VM are destroyed, and when the next one is due: pure functions of the
//! existing snapshots and the time.
//!
//! It knows no clock, no VDI and no VM. The rule is that of [`periods`]. Invariants: the passage of
//! time alone destroys nothing, only a newer snapshot does; each new snapshot makes at most one per kind of period
//! superfluous; a snapshot from the future, taken while the clock was ahead, is neither counted nor destroyed; the
//! set of kept snapshots never grows when a snapshot is destroyed.

use std::cmp::Reverse;

use api::Retention;
use jiff::Timestamp;
use periods::Rule;
use uuid::Uuid;

/// A scheduled snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The snapshot.
    pub snapshot: Uuid,
    /// The time of its data.
    pub at: Timestamp,
}

/// The rule of a schedule of snapshots.
pub fn rule(schedule: &Retention) -> Rule {
    let Retention { hourly, daily, weekly, monthly } = *schedule;
    Rule { hourly, daily, weekly, monthly }
}

/// Whether a snapshot or backup is due: there is none of this period.
pub fn is_due(rule: Rule, taken: impl IntoIterator<Item = Timestamp>, now: Timestamp) -> bool {
    let period = rule.interval();
    !taken.into_iter().any(|at| period.of(at.as_second()) == period.of(now.as_second()))
}

/// The snapshots to destroy, oldest first.
pub fn superfluous(schedule: &Retention, taken: &[Taken], now: Timestamp) -> Vec<Uuid> {
    let mut counted: Vec<&Taken> = taken.iter().filter(|taken| taken.at <= now).collect();
    counted.sort_by_key(|taken| Reverse((taken.at, taken.snapshot)));
    let times: Vec<i64> = counted.iter().map(|taken| taken.at.as_second()).collect();
    let kept = rule(schedule).retained(&times);
    let superfluous = counted.into_iter().enumerate().filter(|(position, _)| !kept.contains(position));
    superfluous.map(|(_, taken)| taken.snapshot).rev().collect()
}

#[cfg(test)]
mod test;
