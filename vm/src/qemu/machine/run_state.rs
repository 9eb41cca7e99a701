//! Whether the guest of a machine runs: queried, changed, and followed.
//!
//! Invariant: a command that QEMU has not answered in time is neither done nor not done. The machine is in doubt until
//! QEMU answers again, and then it says what has become of the guest.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use serde_json::json;

use super::{COMMAND, MachineError, QemuVm};
use crate::qmp::Event;

/// For the answer of a QEMU that has just been silent for as long as a command may take.
const TO_ANSWER_AGAIN: Duration = Duration::from_secs(1);

/// The state of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The guest runs.
    Running,
    /// The guest is paused: it was paused, or never resumed.
    Paused,
    /// The guest cannot continue; QEMU's run state (`internal-error`, `guest-panicked`, …).
    Stuck(String),
}

impl QemuVm {
    /// The current state.
    pub fn status(&mut self) -> Result<Status, MachineError> {
        self.status_within(COMMAND)
    }

    fn status_within(&mut self, timeout: Duration) -> Result<Status, MachineError> {
        let answer = self.client.execute("query-status", &json!({}), timeout);
        self.in_doubt = answer.as_ref().is_err_and(|error| error.is_late());
        let answer = answer.map_err(|error| self.explained("query its status", error))?;
        Ok(match answer["status"].as_str().unwrap_or("unknown") {
            "running" => Status::Running,
            // The last three while its memory is saved or loaded, and after that.
            "paused" | "prelaunch" | "finish-migrate" | "postmigrate" | "inmigrate" => Status::Paused,
            other => Status::Stuck(other.to_owned()),
        })
    }

    /// Stops the guest's processors; its memory and its disks stay.
    pub fn pause(&mut self) -> Result<(), MachineError> {
        self.change("pause the guest", "stop", &Status::Paused)
    }

    /// Lets the guest's processors run.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        self.change("resume the guest", "cont", &Status::Running)
    }

    fn change(&mut self, what: &str, command: &str, to: &Status) -> Result<(), MachineError> {
        let late = match self.command(what, command, &json!({})) {
            Err(error) if error.is_late() => error,
            done => return done.map(drop),
        };
        // QEMU executes commands in order: if it answers this one, that one is done.
        match self.status_within(TO_ANSWER_AGAIN) {
            Ok(status) if status == *to => Ok(()),
            Ok(_) | Err(_) => Err(late),
        }
    }

    /// Reads what QEMU has sent, without waiting. Returns whether its guest may have stopped or continued since the
    /// last call; [`QemuVm::status`] says which.
    pub fn has_changed(&mut self) -> Result<bool, MachineError> {
        let read = self.client.wait_event(Duration::ZERO, |_| false);
        let changed = self.knows_of_change() || std::mem::take(&mut self.in_doubt);
        self.client.retain_events(|event| !is_change(event));
        read.map_err(|error| self.explained("read its events", error))?;
        Ok(changed)
    }

    /// Whether an event that was read meanwhile says that the guest has stopped or continued.
    pub fn knows_of_change(&self) -> bool {
        self.client.has_event(is_change)
    }

    /// Readable when QEMU has sent something, or has ended.
    pub fn monitor(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }
}

fn is_change(event: &Event) -> bool {
    matches!(event.name.as_str(), "STOP" | "RESUME")
}
