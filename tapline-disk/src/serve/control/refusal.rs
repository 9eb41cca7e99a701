//! Why a verb was refused: a kind for programs, a message for people, and what to do about it.

use serde::Serialize;
use uring::{EngineError, FileOpenError};

use crate::failure::Failure;

/// Kinds of refusals. Their names are part of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Not a JSON object, or a line that is too long.
    Malformed,
    /// Another version of the protocol.
    Version,
    /// No such verb.
    UnknownVerb,
    /// A field is missing, unknown, or invalid.
    Invalid,
    /// Another verb that takes time is under way, or there are too many clients.
    Busy,
    /// The disk is not in the state for it.
    State,
    /// A guest or a client uses the disk.
    Connected,
    /// The file exists already.
    Exists,
    /// Somebody else has a file open.
    InUse,
    /// No space is left.
    NoSpace,
    /// Not possible with this disk, format or file system.
    Unsupported,
    /// It was cancelled.
    Cancelled,
    /// It was interrupted because another process replaces this one.
    Replaced,
    /// Anything else that failed.
    Failed,
}

impl Kind {
    /// That of an error of the system.
    fn of(error: &std::io::Error) -> Kind {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Kind::NoSpace,
            std::io::ErrorKind::AlreadyExists => Kind::Exists,
            _ => Kind::Failed,
        }
    }
}

/// Why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// For programs.
    pub kind: Kind,
    /// What was tried, on what, why it was not done.
    pub message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Refusal {
    /// A refusal without advice.
    pub fn new(kind: Kind, message: impl Into<String>) -> Refusal {
        Refusal { kind, message: message.into(), advice: None }
    }

    /// Adds what to do about it.
    pub fn advise(mut self, advice: impl Into<String>) -> Refusal {
        self.advice = Some(advice.into());
        self
    }

    /// The same, known to be of this kind.
    pub fn of_kind(mut self, kind: Kind) -> Refusal {
        self.kind = kind;
        self
    }

    /// The same, with what it means in front.
    pub fn with_reason(mut self, reason: &str) -> Refusal {
        self.message = format!("{reason}: {}", self.message);
        self
    }

    /// A step that failed with an error of the system.
    pub fn failed(tried: impl std::fmt::Display, error: &std::io::Error) -> Refusal {
        Refusal::new(Kind::of(error), format!("cannot {tried}: {error}"))
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        let refusal = Refusal::new(Kind::Failed, failure.what());
        match failure.advice() {
            Some(advice) => refusal.advise(advice),
            None => refusal,
        }
    }
}

impl From<FileOpenError> for Refusal {
    fn from(error: FileOpenError) -> Refusal {
        let kind = match &error {
            FileOpenError::Exists { .. } => Kind::Exists,
            FileOpenError::InUse { .. } => Kind::InUse,
            FileOpenError::DirectRefused { .. } => Kind::Unsupported,
            FileOpenError::NotHanded { .. } | FileOpenError::AnotherFile { .. } => Kind::Invalid,
            FileOpenError::Failed { source, .. } => Kind::of(source),
            _ => Kind::Failed,
        };
        Refusal::from(Failure::said(error)).of_kind(kind)
    }
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Refusal {
        Refusal::from(Failure::said(error))
    }
}

impl From<disk::ImageError> for Refusal {
    fn from(error: disk::ImageError) -> Refusal {
        let kind = match error.kind {
            // The request is valid, but not for this image.
            disk::ImageErrorKind::Unsupported | disk::ImageErrorKind::OutOfLimits => Kind::Unsupported,
            _ => Kind::Failed,
        };
        Refusal::from(Failure::said(error)).of_kind(kind)
    }
}
