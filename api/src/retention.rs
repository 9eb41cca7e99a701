//! Retention: schedules by which the daemon takes snapshots of a VDI or of a VM, or backs it up, and how many it keeps.

use std::fmt;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// The most that all numbers together may be: each snapshot may be an image of the chain of its VDI, which has at most
/// 60.
const TOTAL_MAX: u16 = 50;

/// The number of hours, days, weeks and months whose newest scheduled snapshot of a VDI or a VM is kept; periods
/// without a snapshot do not count. A snapshot is taken in each of the shortest periods given here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "Numbers")]
pub struct Retention {
    /// Hours of which one is kept.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 50)]
    pub hourly: u16,
    /// Days (UTC) of which one is kept.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 50)]
    pub daily: u16,
    /// Weeks, from Monday, of which one is kept.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 50)]
    pub weekly: u16,
    /// Months of which one is kept.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 50)]
    pub monthly: u16,
}

/// The most that each number of a schedule of backups may be.
const BACKUPS_MAX: u16 = 1000;

/// A schedule of backups of a VDI or a VM: to which target, and of how many hours, days, weeks and months the last
/// backup is retained there; the last one always is. A backup is made in each of the shortest periods given here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "BackupNumbers")]
pub struct BackupSchedule {
    /// The backup target.
    pub target: Uuid,
    /// Hours of which the last backup is retained.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 1000)]
    pub hourly: u16,
    /// Days (UTC) of which the last backup is retained.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 1000)]
    pub daily: u16,
    /// Weeks, from Monday, of which the last backup is retained.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 1000)]
    pub weekly: u16,
    /// Months of which the last backup is retained.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(maximum = 1000)]
    pub monthly: u16,
}

/// The same before it is checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BackupNumbers {
    target: Uuid,
    #[serde(default)]
    hourly: u16,
    #[serde(default)]
    daily: u16,
    #[serde(default)]
    weekly: u16,
    #[serde(default)]
    monthly: u16,
}

impl BackupSchedule {
    /// Checks the numbers.
    pub fn checked(self) -> Result<BackupSchedule, String> {
        let BackupSchedule { hourly, daily, weekly, monthly, .. } = self;
        match [hourly, daily, weekly, monthly].into_iter().max() {
            None | Some(0) => Err("a schedule must retain at least one backup".into()),
            Some(most) if most > BACKUPS_MAX => {
                Err(format!("a schedule can retain the backups of at most {BACKUPS_MAX} periods, not {most}"))
            }
            Some(_) => Ok(self),
        }
    }

    /// Whether the last backup is so old that another one should have been made: two periods.
    pub fn is_overdue(&self, last: Timestamp, now: Timestamp) -> bool {
        let hours = match *self {
            BackupSchedule { hourly: 1.., .. } => 1,
            BackupSchedule { daily: 1.., .. } => 24,
            BackupSchedule { weekly: 1.., .. } => 7 * 24,
            _ => 31 * 24,
        };
        now.duration_since(last) > SignedDuration::from_hours(2 * hours)
    }
}

impl TryFrom<BackupNumbers> for BackupSchedule {
    type Error = String;

    fn try_from(numbers: BackupNumbers) -> Result<BackupSchedule, String> {
        let BackupNumbers { target, hourly, daily, weekly, monthly } = numbers;
        BackupSchedule { target, hourly, daily, weekly, monthly }.checked()
    }
}

/// `7 daily, 4 weekly`, without the target.
impl fmt::Display for BackupSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BackupSchedule { hourly, daily, weekly, monthly, .. } = *self;
        Retention { hourly, daily, weekly, monthly }.fmt(f)
    }
}

/// The same before it is checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Numbers {
    #[serde(default)]
    hourly: u16,
    #[serde(default)]
    daily: u16,
    #[serde(default)]
    weekly: u16,
    #[serde(default)]
    monthly: u16,
}

impl Retention {
    /// A schedule with these numbers, if it is one.
    pub fn new(hourly: u16, daily: u16, weekly: u16, monthly: u16) -> Result<Retention, String> {
        let total = [hourly, daily, weekly, monthly].into_iter().fold(0, u16::saturating_add);
        match total {
            0 => Err("a schedule must keep at least one snapshot".into()),
            total if total > TOTAL_MAX => Err(format!(
                "a schedule can keep at most {TOTAL_MAX} snapshots, not {total}, because a chain is limited"
            )),
            _ => Ok(Retention { hourly, daily, weekly, monthly }),
        }
    }
}

impl TryFrom<Numbers> for Retention {
    type Error = String;

    fn try_from(numbers: Numbers) -> Result<Retention, String> {
        let Numbers { hourly, daily, weekly, monthly } = numbers;
        Retention::new(hourly, daily, weekly, monthly)
    }
}

/// `24 hourly, 7 daily`.
impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Retention { hourly, daily, weekly, monthly } = *self;
        let all = [(hourly, "hourly"), (daily, "daily"), (weekly, "weekly"), (monthly, "monthly")];
        let some = all.into_iter().filter(|(number, _)| *number > 0);
        let words: Vec<String> = some.map(|(number, word)| format!("{number} {word}")).collect();
        f.write_str(&words.join(", "))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_schedule_keeps_something_and_no_more_than_a_chain_holds() {
        let parse = |text: &str| serde_json::from_str::<Retention>(text);
        let both = parse(r#"{"hourly":24,"daily":7}"#).unwrap();
        assert_eq!((both, both.to_string().as_str()), (Retention::new(24, 7, 0, 0).unwrap(), "24 hourly, 7 daily"));
        assert_eq!(serde_json::to_string(&both).unwrap(), r#"{"hourly":24,"daily":7}"#);
        for wrong in ["{}", r#"{"hourly":0}"#, r#"{"hourly":44,"daily":7}"#, r#"{"yearly":1}"#, r#"{"hourly":-1}"#] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let target = "6f0d3c2e-41b7-4a86-9a55-0c8be7a0d1f2";
        let backups =
            |rest: &str| serde_json::from_str::<BackupSchedule>(&format!("{{\"target\":\"{target}\"{rest}}}"));
        let one = backups(r#","daily":90,"monthly":24"#).unwrap();
        assert_eq!((one.target.to_string(), one.to_string().as_str()), (target.into(), "90 daily, 24 monthly"));
        for wrong in ["", r#","daily":0"#, r#","daily":1001"#, r#","last":1"#] {
            assert!(backups(wrong).is_err(), "{wrong}");
        }
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let (last, now) = (at("2026-11-28T00:10:00Z"), at("2026-11-30T00:11:00Z"));
        assert!(one.is_overdue(last, now) && !one.is_overdue(last, at("2026-11-30T00:09:00Z")));
        assert!(parse(r#"{"monthly":65535,"daily":65535}"#).unwrap_err().to_string().contains("at most 50 snapshots"));
    }
}
