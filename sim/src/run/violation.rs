//! What a run finds that must not be.

use disk::{FileId, ImageError, Status};

use super::EVENTS_MAX;
use crate::oracle::Illegal;
use crate::reader::Unread;

/// What was found that must not be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A read without a crash found something else.
    #[error("a read finds what it must not: {0}")]
    Read(Illegal),
    /// A read after a crash did.
    #[error("after a power loss: {0}")]
    Recovered(Illegal),
    /// A read after a crash failed.
    #[error("after a power loss, reading sector {sector} ends with {status:?}")]
    Unreadable {
        /// The first sector that was asked for.
        sector: u64,
        /// The answer.
        status: Status,
    },
    /// The image does not open.
    #[error("after a power loss the image does not open: {0}")]
    Open(ImageError),
    /// The layers of no chain that may be opened fit together.
    #[error("after a power loss the chain does not open: {0}")]
    Unfit(ImageError),
    /// The image is damaged.
    #[error("after a power loss the image is damaged: {0}")]
    Damage(String),
    /// A log was used for a file that is not in the state that the log follows.
    #[error("a copy of file {} from before is put back, and the redo log is used for it", .0.0)]
    Believed(FileId),
    /// A request was answered with an error for no reason.
    #[error("{op} is answered {status:?} though nothing has failed")]
    Status {
        /// The request.
        op: String,
        /// The answer.
        status: Status,
    },
    /// Something was accepted after a failed sync.
    #[error("{op} is answered {status:?} though a sync has failed")]
    NotRefused {
        /// The request.
        op: String,
        /// The answer.
        status: Status,
    },
    /// The storage has nothing more to do and requests wait.
    #[error("{0} requests are never answered")]
    Unanswered(usize),
    /// The chain cannot be changed as it should be.
    #[error("a step fails for no reason: {0}")]
    Step(String),
    /// An answer for which there is no question.
    #[error("request {0} is answered twice")]
    Twice(u64),
    /// The run does not end.
    #[error("the disk is still busy after {EVENTS_MAX} events")]
    Endless,
    /// What is wrong is wrong in the process that has taken over.
    #[error("after the death of the disk's process: {0}")]
    TakenOver(Box<Violation>),
    /// What is wrong is wrong with a chain that shares layers with the disk's.
    #[error("beside the disk: {0}")]
    Sibling(Box<Violation>),
    /// A file that was answered for does not survive, however durable its content is.
    #[error("after a power loss file {}, which was answered for, has no name", .0.0)]
    Nameless(FileId),
    /// A panic.
    #[error("panic: {0}")]
    Panic(String),
}

impl Violation {
    /// Whether the layers of one chain do not fit together: another may be the right one.
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
