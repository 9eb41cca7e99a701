//! Whether the wall clock may be trusted to say which snapshots are superfluous: pure functions of what the clocks have
//! said.
//!
//! A host whose clock was not set when it was started, or is set wrongly by a time server, has a time that is a year
//! ahead, and back a moment later. The clock that counts since the start of the host cannot be set, so a wall clock
//! that has advanced by another time than that one has jumped; after a restart of the host, the time that it was off is
//! not known, and more than a day is taken for a jump. Invariant: after a jump nothing is destroyed until the wall
//! clock has agreed with the other one for two hours.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::clock::Now;
use crate::fault::{self, Planted};

/// By how much a clock may differ that is kept right by small steps.
const TOLERANCE: SignedDuration = SignedDuration::from_mins(15);

/// A host that was off for longer is as likely to have a wrong clock.
const OFF_MAX: SignedDuration = SignedDuration::from_hours(24);

/// How long the clock has to be steady after a jump: a time server is found by then.
const STEADY: Duration = Duration::from_secs(2 * 3600);

/// What the clocks said when a schedule was last followed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The start of the host since which `up` counts.
    boot: String,
    wall: Timestamp,
    /// In seconds.
    up: u64,
    /// The last jump, as long as it is not confirmed.
    jump: Option<Jump>,
}

/// A jump of the wall clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jump {
    /// The time that was expected.
    expected: Timestamp,
    /// The time that there was instead.
    found: Timestamp,
    /// When it was found, by the clock that cannot be set, in seconds.
    up: u64,
}

impl Seen {
    /// What is known of the clocks now.
    pub fn after(before: Option<Seen>, boot: &str, now: Now) -> Seen {
        let up = now.up.as_secs();
        let Some(before) = before.filter(|_| !fault::planted(Planted::JumpedClock)) else {
            return Seen { boot: boot.into(), wall: now.wall, up, jump: None };
        };
        let same = before.boot == boot && up >= before.up;
        let passed = if same { up.saturating_sub(before.up) } else { 0 };
        let passed = SignedDuration::from_secs(i64::try_from(passed).unwrap_or(i64::MAX));
        let expected = before.wall.saturating_add(passed).unwrap_or(before.wall);
        let ahead = now.wall.duration_since(expected);
        let ahead_max = if same { TOLERANCE } else { OFF_MAX };
        let jump = match (ahead > ahead_max || ahead < -TOLERANCE, before.jump) {
            (true, _) => Some(Jump { expected, found: now.wall, up }),
            // It is confirmed by this start of the host alone.
            (false, Some(jump)) if !same => Some(Jump { up, ..jump }),
            (false, jump) => jump.filter(|jump| up < jump.up.saturating_add(STEADY.as_secs())),
        };
        Seen { boot: boot.into(), wall: now.wall, up, jump }
    }

    /// Why nothing is destroyed now, if nothing is.
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

    /// Whether each of these readings is held back.
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
