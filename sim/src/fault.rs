//! What goes wrong in the simulated storage, once in a run.
//!
//! Knows nothing of files. It is named in words, as in the arguments of the command that runs a case again.

use std::fmt;
use std::str::FromStr;

use disk::{Action, FileError};

/// Linux's EIO.
const EIO: i32 = 5;

/// What goes wrong, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Any operation fails with EIO.
    Failed,
    /// A write fails with ENOSPC.
    NoSpace,
    /// A deallocation is not supported.
    Unsupported,
    /// The queue is full and hands the operation back.
    Full,
}

/// The `nth` operation (from 1) of those that `kind` can befall goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    /// How.
    pub kind: FaultKind,
    /// Which.
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
    /// Whether it can befall an operation.
    pub fn befalls(self, action: &Action) -> bool {
        match self {
            FaultKind::Failed | FaultKind::Full => true,
            FaultKind::NoSpace => matches!(action, Action::Write { .. }),
            FaultKind::Unsupported => matches!(action, Action::Deallocate { .. }),
        }
    }

    /// How that ends.
    pub fn error(self) -> FileError {
        match self {
            FaultKind::Failed | FaultKind::Full => FileError::Failed(EIO),
            FaultKind::NoSpace => FileError::NoSpace,
            FaultKind::Unsupported => FileError::Unsupported,
        }
    }
}
