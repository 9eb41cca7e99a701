//! Wall-clock time and uptime, for schedules.
//!
//! Tests can set both. Invariant: the two parts of a reading belong to the same moment.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use crate::fault::for_tests;

/// The environment variable that names a file with a test's wall-clock time and uptime in seconds.
const VARIABLE: &str = "TAPLINED_CLOCK";

static GIVEN: LazyLock<Option<PathBuf>> = LazyLock::new(|| for_tests(VARIABLE).map(PathBuf::from));

/// A reading of both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The wall clock, which can be set.
    pub wall: Timestamp,
    /// The time since the host was started, which only advances, also while it is suspended.
    pub up: Duration,
}

/// Reads both clocks.
pub fn now() -> Now {
    let given = GIVEN.as_ref().and_then(|path| std::fs::read_to_string(path).ok());
    given.as_deref().and_then(parse).unwrap_or_else(|| Now { wall: Timestamp::now(), up: up() })
}

/// The boot ID of the host, which [`Now::up`] counts from.
pub fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

fn up() -> Duration {
    let up = clock_gettime(ClockId::Boottime);
    Duration::from_secs(u64::try_from(up.tv_sec).unwrap_or(0))
}

fn parse(text: &str) -> Option<Now> {
    let (wall, up) = text.trim().split_once(' ')?;
    Some(Now { wall: wall.parse().ok()?, up: Duration::from_secs(up.parse().ok()?) })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_given_time_is_read_and_the_hosts_advances() {
        let given = parse("2026-11-27T10:00:00Z 3600\n").unwrap();
        assert_eq!((given.wall.to_string().as_str(), given.up.as_secs()), ("2026-11-27T10:00:00Z", 3600));
        assert_eq!(parse("2026-11-27T10:00:00Z"), None);
        let (one, other) = (now(), now());
        assert!(other.up >= one.up && one.up > Duration::ZERO);
    }
}
