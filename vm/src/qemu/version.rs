//! The QEMU version, as far as the command line depends on it.
//!
//! It knows nothing about machines. Invariant: a program that does not print its version costs a bounded time, and is
//! treated as the oldest.

use std::fmt::{self, Display};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::hear::hear;

/// QEMU's version output is a line or two.
const WORDS_MAX: usize = 1 << 16;

/// A version: its first two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

/// When QEMU tries to reconnect to a disk's process that has gone. It tries only then; while a process serves, no timer
/// runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnect {
    /// `reconnect`, in seconds, which was removed in QEMU 10.2.
    Seconds(u16),
    /// `reconnect-ms`, which QEMU knows since 9.2.
    Milliseconds(u16),
}

impl Reconnect {
    /// Supported by every QEMU before 10.2.
    pub const SLOW: Reconnect = Reconnect::Seconds(1);
    /// Soon enough for a process that was started again at once, and rare enough for one that stays away.
    pub const FAST: Reconnect = Reconnect::Milliseconds(100);

    /// As a property of a chardev in QMP.
    pub fn property(self) -> (&'static str, Value) {
        match self {
            Self::Seconds(after) => ("reconnect", json!(after)),
            Self::Milliseconds(after) => ("reconnect-ms", json!(after)),
        }
    }
}

/// As on the command line.
impl Display for Reconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, value) = self.property();
        write!(f, "{key}={value}")
    }
}

impl Version {
    /// The oldest supported version.
    pub const OLDEST: Version = Version(7, 2);
    /// The first version that supports a reconnect interval of less than a second.
    const RECONNECT_MS: Version = Version(9, 2);

    /// The version of `program`, or why it could not be determined within `patience`.
    pub fn of(program: &Path, patience: Duration) -> Result<Self, String> {
        let mut command = Command::new(program);
        command.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| format!("cannot start {}: {error}", program.display()))?;
        let heard = hear(&mut child, patience, WORDS_MAX, |_| false);
        let ended = child.kill().and_then(|()| child.wait());
        let heard = heard.and_then(|heard| ended.map(|_| heard)).map_err(|error| error.to_string())?;
        if !heard.in_time {
            return Err("it did not print its version in time".to_owned());
        }
        Self::parse(&String::from_utf8_lossy(&heard.said))
            .ok_or_else(|| format!("{} did not print its version", program.display()))
    }

    /// Parses `QEMU emulator version 7.2.22 (Debian …)`.
    fn parse(said: &str) -> Option<Self> {
        let (_, version) = said.split_once("QEMU emulator version ")?;
        let mut numbers = version.split(|char: char| !char.is_ascii_digit()).map(str::parse);
        Some(Self(numbers.next()?.ok()?, numbers.next()?.ok()?))
    }

    /// Parses a response to `query-version`.
    pub fn told(answer: &Value) -> Option<Self> {
        let number = |name: &str| u32::try_from(answer["qemu"][name].as_u64()?).ok();
        Some(Self(number("major")?, number("minor")?))
    }

    /// The form of the reconnect option.
    pub fn reconnect(self) -> Reconnect {
        if self >= Self::RECONNECT_MS { Reconnect::FAST } else { Reconnect::SLOW }
    }
}

impl Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reconnect_uses_the_option_of_the_version() {
        let debian_12 = Version::parse("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\n").unwrap();
        assert_eq!((debian_12, debian_12.reconnect().to_string()), (Version(7, 2), "reconnect=1".to_owned()));
        let debian_13 = Version::parse("QEMU emulator version 10.0.13 (Debian 1:10.0.13+ds)\nCopyright").unwrap();
        assert_eq!((debian_13, debian_13.reconnect().to_string()), (Version(10, 0), "reconnect-ms=100".to_owned()));
        for (version, reconnect) in [((9, 1), Reconnect::SLOW), ((9, 2), Reconnect::FAST), ((11, 0), Reconnect::FAST)] {
            assert_eq!(Version(version.0, version.1).reconnect(), reconnect, "{version:?}");
        }
        assert_eq!(Version::parse("QEMU emulator version 9.2\n"), Some(Version(9, 2)));
        assert_eq!(Version::parse("bash version 5.2"), None);
    }

    #[test]
    fn the_monitor_reports_the_version_as_numbers() {
        let answer = json!({ "qemu": { "micro": 13, "minor": 0, "major": 10 }, "package": "Debian" });
        assert_eq!(Version::told(&answer), Some(Version(10, 0)));
        assert_eq!(Version::told(&json!({ "qemu": { "minor": -1, "major": 10 } })), None);
        assert_eq!(Version::told(&json!({})), None);
    }

    #[test]
    fn a_silent_program_is_not_waited_for() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("qemu");
        testkit::program::script(&path, "exec sleep 1000");
        let late = Version::of(&path, Duration::from_millis(100)).unwrap_err();
        assert!(late.contains("in time"), "{late}");
        let no_qemu = Version::of(Path::new("/bin/true"), Duration::from_secs(60)).unwrap_err();
        assert_eq!(no_qemu, "/bin/true did not print its version");
        assert!(Version::of(Path::new("/no/such/qemu"), Duration::ZERO).unwrap_err().contains("cannot start"));
    }
}
