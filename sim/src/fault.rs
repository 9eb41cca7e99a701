//! Faults of the simulated storage, one per run.
//!
//! A fault is written as in the arguments of the command that repeats a case.

use std::fmt;
use std::str::FromStr;

use disk::{Action, FileError};

/// The error number EIO of Linux.
const EIO: i32 = 5;

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An operation fails with EIO.
    Failed,
    /// A write fails with ENOSPC.
    NoSpace,
    /// A deallocation is not supported.
    Unsupported,
    /// The queue is full and refuses the operation.
    Full,
}

/// A fault of the `nth` operation (from 1) among those to which `kind` applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// The kind of the fault.
    pub kind: FaultKind,
    /// The number of the operation.
    pub nth: u64,
}

const FAULTS: [(FaultKind, &str); 4] = [
    (FaultKind::Failed, "failed"),
    (FaultKind::NoSpace, "no-space"),
    (FaultKind::Unsupported, "unsupported"),
    (FaultKind::Full, "full"),
];

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = FAULTS.iter().find(|(kind, _)| *kind == self.kind).map_or("", |(_, name)| name);
        write!(f, "{name}@{}", self.nth)
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let (name, nth) = text.split_once('@').unwrap_or((text, ""));
        let kind = FAULTS.iter().find(|(_, other)| *other == name).map(|(kind, _)| *kind);
        match (kind, nth.parse()) {
            (Some(kind), Ok(nth)) => Ok(Fault { kind, nth }),
            _ => Err(format!("'{text}' is not a fault; they look like failed@3, no-space@1, unsupported@1 and full@7")),
        }
    }
}

impl FaultKind {
    /// Whether the fault applies to an operation.
    pub fn applies_to(self, action: &Action) -> bool {
        match self {
            FaultKind::Failed | FaultKind::Full => true,
            FaultKind::NoSpace => matches!(action, Action::Write { .. }),
            FaultKind::Unsupported => matches!(action, Action::Deallocate { .. }),
        }
    }

    /// The error of an operation with this fault.
    pub fn error(self) -> FileError {
        match self {
            FaultKind::Failed | FaultKind::Full => FileError::Failed(EIO),
            FaultKind::NoSpace => FileError::NoSpace,
            FaultKind::Unsupported => FileError::Unsupported,
        }
    }
}
