//! What can go wrong with a running machine, in words that say what was tried and what to do.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::super::hardware::HardwareError;
use super::super::process::Identity;
use super::super::served::NotServed;
use crate::qmp::QmpError;

/// Why something could not be done with a machine.
#[derive(Debug, Error)]
pub enum MachineError {
    /// There can be no such machine, or no such disk.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// The directory for the machine's files does not do.
    #[error("{} cannot hold the machine's monitor: {why}", path.display())]
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
        /// What the system said.
        source: io::Error,
    },
    /// The program could not be started.
    #[error("cannot start `{program}`; it comes with {package}")]
    Start {
        /// The program.
        program: String,
        /// Its package.
        package: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// QEMU has ended.
    #[error("QEMU has ended during {during}: {said}")]
    Ended {
        /// What was tried.
        during: String,
        /// Its last words.
        said: String,
    },
    /// QEMU's monitor did not do it.
    #[error("cannot {what}")]
    Monitor {
        /// What was tried.
        what: String,
        /// What the monitor said.
        source: QmpError,
    },
    /// The process of a machine is not there any more.
    #[error("the machine's QEMU, process {}, has ended", identity.pid)]
    Gone {
        /// The process.
        identity: Identity,
    },
    /// Another process than the machine's listens at its monitor.
    #[error("at {} listens process {found} and not the machine's QEMU, {expected}", path.display())]
    NotIts {
        /// The monitor's socket.
        path: PathBuf,
        /// Who listens.
        found: i32,
        /// Who should.
        expected: i32,
    },
    /// A process could not be asked or signalled.
    #[error("cannot {what} the machine's QEMU")]
    Process {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Nobody serves a disk, and QEMU was not told of it.
    #[error("cannot give the machine disk {position}")]
    NotServed {
        /// Which.
        position: u8,
        /// What was found.
        source: NotServed,
    },
    /// There is a disk at this position.
    #[error("the machine has a disk {0} already: unplug it first")]
    Taken(u8),
    /// The guest has not let go of a disk. It may still do so, at which the disk's position is free.
    #[error(
        "the guest has not let go of disk {position} in {} s: its system is not up, hangs, or uses the disk; ask again, or end \
         who serves the disk, at which what the guest asks of it waits for ever",
        after.as_secs()
    )]
    Held {
        /// Which.
        position: u8,
        /// How long it was waited for.
        after: Duration,
    },
    /// The guest has refused to let go of a disk.
    #[error("the guest refuses to let go of disk {0}: unmount it there first")]
    Refused(u8),
    /// A disk was not plugged, and what was done for it not undone.
    #[error("cannot plug disk {position}, and its connection stays: {undo}")]
    HalfPlugged {
        /// Which.
        position: u8,
        /// Why its connection stays.
        undo: String,
        /// Why it was not plugged.
        source: QmpError,
    },
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
