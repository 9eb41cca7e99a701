//! Violations of the invariants, as found by a run.

use disk::{FileId, ImageError, Status};

use crate::oracle::Illegal;
use crate::reader::Unread;

/// More events than any workload has: a run with more does not end.
pub const EVENTS_MAX: usize = 200_000;

/// A violation of an invariant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A read without a crash returned an illegal content.
    #[error("a read finds what it must not: {0}")]
    Read(Illegal),
    /// A read after a crash returned an illegal content.
    #[error("after a power loss: {0}")]
    Recovered(Illegal),
    /// A read after a crash failed.
    #[error("after a power loss, reading sector {sector} ends with {status:?}")]
    Unreadable {
        /// The first sector of the read.
        sector: u64,
        /// The status of the response.
        status: Status,
    },
    /// The image does not open.
    #[error("after a power loss the image does not open: {0}")]
    Open(ImageError),
    /// In each of the possible chains, layers do not fit together.
    #[error("after a power loss the chain does not open: {0}")]
    Unfit(ImageError),
    /// The image is damaged.
    #[error("after a power loss the image is damaged: {0}")]
    Damage(String),
    /// A log was applied to a file that is not in the state that the log follows.
    #[error("a copy of file {} from before is put back, and the redo log is used for it", .0.0)]
    Believed(FileId),
    /// A request failed without a reason.
    #[error("{op} is answered {status:?} though nothing has failed")]
    Status {
        /// The request.
        op: String,
        /// The status of the response.
        status: Status,
    },
    /// A request was accepted after a failed sync.
    #[error("{op} is answered {status:?} though a sync has failed")]
    NotRefused {
        /// The request.
        op: String,
        /// The status of the response.
        status: Status,
    },
    /// Requests wait although the storage has no pending operation.
    #[error("{0} requests are never answered")]
    Unanswered(usize),
    /// A verb on the chain has failed.
    #[error("a step fails for no reason: {0}")]
    Step(String),
    /// A response without a request in flight.
    #[error("request {0} is answered twice")]
    Twice(u64),
    /// The run does not end.
    #[error("the disk is still busy after {EVENTS_MAX} events")]
    Endless,
    /// A violation in the process that has taken over.
    #[error("after the death of the disk's process: {0}")]
    TakenOver(Box<Violation>),
    /// A violation in a chain that shares layers with the disk's.
    #[error("beside the disk: {0}")]
    Sibling(Box<Violation>),
    /// A file that was reported to a client may not survive, because its name is not durable.
    #[error("after a power loss file {}, which was answered for, has no name", .0.0)]
    Nameless(FileId),
    /// A map of changed blocks does not open.
    #[error("after a power loss the map of changed blocks does not open: {0}")]
    Map(ImageError),
    /// A map of changed blocks misses a change.
    #[error("sector {0} has changed, and the map does not name it")]
    Unnamed(u64),
    /// A map of changed blocks names what no request came near.
    #[error("the map names sector {0}, and nothing has changed near it")]
    Overnamed(u64),
    /// A panic in the code under test.
    #[error("panic: {0}")]
    Panic(String),
}

impl Violation {
    /// Whether the layers of a chain do not fit together, so that another chain may be valid.
    pub fn is_unfit(&self) -> bool {
        match self {
            Violation::TakenOver(violation) => violation.is_unfit(),
            violation => matches!(violation, Violation::Unfit(_)),
        }
    }
}

impl From<Unread> for Violation {
    fn from(unread: Unread) -> Violation {
        match unread {
            Unread::Open(error) => Violation::Open(error),
            Unread::Status { sector, status } => Violation::Unreadable { sector, status },
            Unread::Unanswered => Violation::Unanswered(1),
        }
    }
}
