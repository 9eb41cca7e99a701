//! Retention: a schedule by which the daemon takes snapshots of a VDI or of a VM, and how many of them it keeps.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
        assert!(parse(r#"{"monthly":65535,"daily":65535}"#).unwrap_err().to_string().contains("at most 50 snapshots"));
    }
}
