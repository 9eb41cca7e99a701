//! Known facts about the exit of a QEMU.
//!
//! It knows nothing about its callers. Invariant: unknown facts are not made up.

use std::process::ExitStatus;

/// A QEMU that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// How; known only to its parent.
    pub status: Option<ExitStatus>,
    /// Why, as it has said itself; one that was killed or has crashed has not.
    pub shutdown: Option<Shutdown>,
    /// Its last output; for an adopted QEMU, possibly from before the adoption.
    pub said: String,
}

/// The reason that QEMU gave for its exit (the event SHUTDOWN).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shutdown {
    /// Whether the guest has requested it.
    pub guest: bool,
    /// QEMU's reason: `guest-shutdown`, `host-signal`, `host-qmp-quit`, …
    pub reason: String,
}

impl Ended {
    /// In which way it has ended by itself; nothing if its guest has powered off.
    pub fn badly(&self) -> Option<String> {
        match (&self.status, &self.shutdown) {
            (Some(status), _) if status.success() => None,
            (Some(status), _) => Some(status.to_string()),
            (None, Some(Shutdown { guest: true, reason })) if reason != "guest-panic" => None,
            (None, Some(shutdown)) => Some(format!("QEMU's shutdown reason is {}", shutdown.reason)),
            (None, None) => {
                Some("exit status unknown: it was started by an earlier daemon and gave no shutdown reason".into())
            }
        }
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn said(status: Option<i32>, shutdown: Option<(bool, &str)>) -> Option<String> {
        let shutdown = shutdown.map(|(guest, reason)| Shutdown { guest, reason: reason.into() });
        Ended { status: status.map(ExitStatus::from_raw), shutdown, said: String::new() }.badly()
    }

    #[test]
    fn a_power_off_is_not_a_failure() {
        assert_eq!(said(Some(0), None), None);
        assert_eq!(said(None, Some((true, "guest-shutdown"))), None);
    }

    #[test]
    fn any_other_end_is_described() {
        let has = |found: Option<String>, word: &str| {
            assert!(found.as_ref().is_some_and(|how| how.contains(word)), "{found:?}");
        };
        has(said(Some(9), Some((true, "guest-shutdown"))), "signal: 9");
        has(said(None, Some((false, "host-signal"))), "host-signal");
        has(said(None, Some((true, "guest-panic"))), "guest-panic");
        has(said(None, None), "exit status unknown");
    }
}
