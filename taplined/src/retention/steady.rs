//! Whether the wall clock may be trusted to decide which snapshots are superfluous: pure functions of clock readings.
//!
//! A host whose clock was not set at boot, or is set wrongly by a time server, may show a time that is a year ahead,
//! and go back a moment later. The monotonic clock cannot be set, so a wall clock that advances differently has
//! jumped; after a reboot of the host, the time that it was off is unknown, and more than a day counts as a jump.
//! Invariant: after a jump nothing is destroyed until the wall clock has agreed with the monotonic one for two hours.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::clock::Now;
use crate::fault::{self, Planted};

/// The tolerated difference of the clocks: a time server corrects small deviations.
const TOLERANCE: SignedDuration = SignedDuration::from_mins(15);

/// After a longer time off, a wrong clock is as likely.
const OFF_MAX: SignedDuration = SignedDuration::from_hours(24);

/// How long the clocks must agree after a jump: long enough for a time server to respond.
const STEADY: Duration = Duration::from_secs(2 * 3600);

/// The clock readings when a schedule was last followed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The boot ID of the host, which `up` counts from.
    boot: String,
    wall: Timestamp,
    /// Uptime in seconds.
    up: u64,
    /// The last jump, until it is confirmed.
    jump: Option<Jump>,
}

/// A jump of the wall clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jump {
    /// The time that was expected.
    expected: Timestamp,
    /// The time that was read.
    found: Timestamp,
    /// Uptime in seconds when it was found.
    up: u64,
}

impl Seen {
    /// The state after a new reading.
    pub fn after(before: Option<Seen>, boot: &str, now: Now) -> Seen {
        let up = now.up.as_secs();
        let Some(before) = before.filter(|_| !fault::planted(Planted::JumpedClock)) else {
            return Seen { boot: boot.into(), wall: now.wall, up, jump: None };
        };
        let same = before.boot == boot;
        if same && up < before.up {
            // It was read before, by one that has worked since.
            return before;
        }
        let passed = if same { up.saturating_sub(before.up) } else { 0 };
        let passed = SignedDuration::from_secs(i64::try_from(passed).unwrap_or(i64::MAX));
        let expected = before.wall.saturating_add(passed).unwrap_or(before.wall);
        let ahead = now.wall.duration_since(expected);
        let ahead_max = if same { TOLERANCE } else { OFF_MAX };
        let jump = match (ahead > ahead_max || ahead < -TOLERANCE, before.jump) {
            (true, _) => Some(Jump { expected, found: now.wall, up }),
            // Time after this reboot alone can confirm it.
            (false, Some(jump)) if !same => Some(Jump { up, ..jump }),
            (false, jump) => jump.filter(|jump| up < jump.up.saturating_add(STEADY.as_secs())),
        };
        Seen { boot: boot.into(), wall: now.wall, up, jump }
    }

    /// The reason why nothing may be destroyed now, if so.
    pub fn why_held(&self) -> Option<String> {
        let Jump { expected, found, .. } = self.jump.as_ref()?;
        Some(format!(
            "the clock of this host went from about {expected:.0} to {found:.0}; superfluous snapshots are kept until it \
             has been steady for {} hours: check it with 'timedatectl'",
            STEADY.as_secs() / 3600
        ))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn at(wall: &str, hours: u64) -> Now {
        Now { wall: wall.parse().unwrap(), up: Duration::from_secs(hours * 3600) }
    }

    /// Whether destruction is held at each of these readings.
    fn held(readings: &[(&str, &str, u64)]) -> Vec<bool> {
        let mut seen = None;
        let held = readings.iter().map(|(boot, wall, hours)| {
            let now = Seen::after(seen.take(), boot, at(wall, *hours));
            let is_held = now.why_held().is_some();
            seen = Some(now);
            is_held
        });
        held.collect()
    }

    #[test]
    fn a_clock_that_agrees_with_the_other_one_is_trusted_at_once() {
        let steady =
            [("a", "2026-11-27T10:00:00Z", 1), ("a", "2026-11-27T11:10:00Z", 2), ("a", "2027-11-27T11:00:00Z", 8762)];
        assert_eq!(held(&steady), [false, false, false]);
        // The host was off for a night.
        assert_eq!(held(&[("a", "2026-11-27T20:00:00Z", 100), ("b", "2026-11-28T08:00:00Z", 0)]), [false, false]);
    }

    #[test]
    fn a_jump_either_way_is_trusted_after_two_steady_hours() {
        let jump = [
            ("a", "2026-11-27T10:00:00Z", 1),
            ("a", "2027-11-27T11:00:00Z", 2),
            ("a", "2027-11-27T12:00:00Z", 3),
            ("a", "2026-11-27T13:00:00Z", 4),
            ("a", "2026-11-27T14:00:00Z", 5),
            ("a", "2026-11-27T15:00:00Z", 6),
        ];
        assert_eq!(held(&jump), [false, true, true, true, true, false]);
    }

    #[test]
    fn an_older_reading_of_one_that_has_worked_since_changes_nothing() {
        let late = [
            ("a", "2026-11-27T10:00:00Z", 10),
            ("a", "2026-11-27T13:00:00Z", 13),
            ("a", "2026-11-27T10:00:00Z", 10),
            ("a", "2026-11-27T14:00:00Z", 14),
        ];
        assert_eq!(held(&late), [false; 4]);
        let jumped =
            [("a", "2026-11-27T10:00:00Z", 10), ("a", "2027-11-27T13:00:00Z", 13), ("a", "2026-11-27T11:00:00Z", 11)];
        assert_eq!(held(&jumped), [false, true, true]);
    }

    #[test]
    fn a_restart_does_not_confirm_a_jump() {
        let restarted = [
            ("a", "2026-11-27T10:00:00Z", 1),
            // Before a time server was found, and after.
            ("b", "2027-11-27T10:00:00Z", 0),
            ("c", "2027-11-27T11:59:00Z", 0),
            ("c", "2027-11-27T13:00:00Z", 1),
            ("c", "2027-11-27T14:00:00Z", 2),
        ];
        assert_eq!(held(&restarted), [false, true, true, true, false]);
        let back =
            [("a", "2026-11-27T10:00:00Z", 1), ("b", "1970-01-01T00:00:00Z", 0), ("b", "2026-11-27T10:10:00Z", 0)];
        assert_eq!(held(&back), [false, true, true]);
    }
}
