//! Errors of a running machine, which say what was tried and what to do.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::super::hardware::HardwareError;
use super::super::process::Identity;
use super::super::served::NotServed;
use crate::qmp::QmpError;

/// Why an operation on a machine failed.
#[derive(Debug, Error)]
pub enum MachineError {
    /// There can be no such machine, or no such disk.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// The directory for the machine's files does not do.
    #[error("{} cannot hold the VM's monitor: {why}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A file could not be used.
    #[error("cannot {what} {}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The program could not be started.
    #[error("cannot start `{program}`; it comes with {package}")]
    Start {
        /// The program.
        program: String,
        /// Its package.
        package: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU has ended.
    #[error("cannot {what}: QEMU exited: {said}")]
    Ended {
        /// What was tried.
        what: String,
        /// Its last output.
        said: String,
    },
    /// QEMU's monitor did not do it.
    #[error("cannot {what}")]
    Monitor {
        /// What was tried.
        what: String,
        /// The monitor's error.
        source: QmpError,
    },
    /// The process of a machine has exited.
    #[error("the VM's QEMU, process {}, has exited", identity.pid)]
    Gone {
        /// The process.
        identity: Identity,
    },
    /// Another process than the machine's listens at its monitor.
    #[error("process {found} listens at {} instead of the VM's QEMU, {expected}", path.display())]
    NotIts {
        /// The monitor's socket.
        path: PathBuf,
        /// The process that listens.
        found: i32,
        /// The process that should listen.
        expected: i32,
    },
    /// A process could not be queried or signalled.
    #[error("cannot {what} the VM's QEMU")]
    Process {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU cannot save the guest's memory: something in the machine does not allow it.
    #[error("QEMU cannot save the guest's memory: {0}")]
    NotSavable(String),
    /// Saving or loading the guest's memory failed.
    #[error("QEMU could not {what} the guest's memory: {why}")]
    Memory {
        /// Which of the two.
        what: &'static str,
        /// QEMU's reason.
        why: String,
    },
    /// A disk is not served, and no command about it was sent to QEMU.
    #[error("cannot plug disk {position} into the VM")]
    NotServed {
        /// The disk's position.
        position: u8,
        /// The cause.
        source: NotServed,
    },
    /// There is a disk at this position.
    #[error("the VM already has a disk {0}: unplug it first")]
    Taken(u8),
    /// The guest has not let go of a disk. It may still do so, at which the disk's position is free.
    #[error(
        "the guest has not released disk {position} in {} s: it is not up, hangs, or is using the disk; try again, or \
         stop the disk's process, after which the guest's I/O to it hangs forever",
        after.as_secs()
    )]
    Held {
        /// The disk's position.
        position: u8,
        /// How long it was waited for.
        after: Duration,
    },
    /// The guest has refused to let go of a disk.
    #[error("the guest refuses to release disk {0}: unmount it there first")]
    Refused(u8),
    /// A plug failed, and could not be rolled back.
    #[error("cannot plug disk {position}, and its chardev could not be removed: {undo}")]
    HalfPlugged {
        /// The disk's position.
        position: u8,
        /// Why its connection stays.
        undo: String,
        /// Why it was not plugged.
        source: QmpError,
    },
}

impl MachineError {
    /// QEMU has not answered in time: whether it has done what was tried, or will, is unknown.
    pub fn is_late(&self) -> bool {
        matches!(self, Self::Monitor { source, .. } if source.is_late())
    }
}

/// For `map_err`: a command of the monitor, done to `what`.
pub(super) fn monitor(what: impl Into<String>) -> impl FnOnce(QmpError) -> MachineError {
    let what = what.into();
    move |source| MachineError::Monitor { what, source }
}

/// For `map_err`: something done to the process.
pub(super) fn process(what: &'static str) -> impl FnOnce(io::Error) -> MachineError {
    move |source| MachineError::Process { what, source }
}
