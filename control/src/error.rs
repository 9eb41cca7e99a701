//! Why something was not done: a kind for programs, a message for people, and what to do about it.

use std::fmt;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::{Reply, in_full};

/// Kinds of errors. Their names are part of the interface; one that is not known here counts as `failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Not a JSON object, or a line that is too long.
    Malformed,
    /// Another version of the protocol.
    Version,
    /// No such verb.
    UnknownVerb,
    /// A field or an argument is missing, unknown, or invalid.
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
    /// A file is damaged, or not of the format that it is said to be.
    NotAnImage,
    /// No space is left.
    NoSpace,
    /// Not possible with this disk, format or file system.
    Unsupported,
    /// It was cancelled.
    Cancelled,
    /// It was interrupted because another process replaces this one.
    Replaced,
    /// Anything else that failed.
    #[serde(other)]
    Failed,
}

impl Kind {
    /// The kind of an error of the system.
    pub fn of(error: &std::io::Error) -> Kind {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Kind::NoSpace,
            std::io::ErrorKind::AlreadyExists => Kind::Exists,
            _ => Kind::Failed,
        }
    }
}

/// Why a request was not done, as sent to clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// For programs.
    pub kind: Kind,
    /// What was tried, on what, why it was not done.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// If another verb is under way: which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub under_way: Option<String>,
}

impl Error {
    /// An error without advice.
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), advice: None, under_way: None }
    }

    /// `cannot {tried}: {why}`, followed by the causes of `why`; of the kind of a system error among them.
    pub fn cannot(tried: impl fmt::Display, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        let why = why.into();
        Error::new(kind_of(&*why), format!("cannot {tried}: {}", in_full(&*why)))
    }

    /// An error whose message already says what was tried and on what; its causes are added.
    pub fn said(error: impl std::error::Error + 'static) -> Error {
        Error::new(kind_of(&error), in_full(&error))
    }

    /// A step that failed with an error of the system.
    pub fn failed(tried: impl fmt::Display, error: &std::io::Error) -> Error {
        Error::new(Kind::of(error), format!("cannot {tried}: {error}"))
    }

    /// Another verb is under way.
    pub fn busy_with(verb: &str) -> Error {
        let article = if verb.starts_with('u') { "an" } else { "a" };
        let error = Error::new(Kind::Busy, format!("{article} {verb} is in progress"));
        Error { under_way: Some(verb.to_owned()), ..error }
    }

    /// Why a process that was passed its files has failed: it says so in the last line that it prints.
    pub fn in_output(output: &str) -> Option<Error> {
        match Reply::<IgnoredAny>::parse(output.lines().next_back()?.as_bytes()) {
            Ok(Reply::Error(error)) => Some(error),
            _ => None,
        }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn advise(mut self, advice: impl Into<String>) -> Error {
        self.advice = Some(advice.into());
        self
    }

    /// The same, known to be of this kind.
    #[must_use]
    pub fn of_kind(mut self, kind: Kind) -> Error {
        self.kind = kind;
        self
    }

    /// The message, and in a second line the advice.
    pub fn with_advice(&self) -> String {
        match &self.advice {
            Some(advice) => format!("{}\n  {advice}", self.message),
            None => self.message.clone(),
        }
    }

    /// The same, with what it is about in front.
    #[must_use]
    pub fn about(mut self, what: &impl fmt::Display) -> Error {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

fn kind_of(error: &(dyn std::error::Error + 'static)) -> Kind {
    let causes = std::iter::successors(Some(error), |&cause| cause.source());
    causes.into_iter().find_map(|cause| cause.downcast_ref().map(Kind::of)).unwrap_or(Kind::Failed)
}
