//! Why an object cannot be read: for callers of this crate a kind, for people a sentence.
//!
//! A URL in a message has no query, which may contain a signature of a redirection.

use std::time::Duration;

/// What callers distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpErrorKind {
    /// There is no such object, or it may not be read.
    Missing,
    /// The object is not the one that was opened.
    Changed,
    /// The server answers in a way that is not accepted.
    Refused,
    /// The server is away, or has failed for too long.
    Away,
    /// The process is to end.
    Stopped,
}

/// Why an object cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
#[error("cannot read {url}: {why}")]
pub struct HttpError {
    url: String,
    why: String,
    /// Its kind.
    pub kind: HttpErrorKind,
    /// What to do about it.
    pub advice: Option<String>,
}

impl HttpError {
    pub(crate) fn new(url: impl ToString, kind: HttpErrorKind, why: impl Into<String>) -> HttpError {
        HttpError { url: url.to_string(), why: why.into(), kind, advice: None }
    }

    pub(crate) fn advise(self, advice: impl Into<String>) -> HttpError {
        HttpError { advice: Some(advice.into()), ..self }
    }
}

/// Why one request has failed.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Another attempt may succeed, not before `wait` if the server has said so.
    Transient { why: String, wait: Option<Duration> },
    /// No other attempt is made.
    Fatal { kind: HttpErrorKind, why: String, advice: Option<&'static str> },
}

impl Fault {
    pub(crate) fn transient(why: impl Into<String>) -> Fault {
        Fault::Transient { why: why.into(), wait: None }
    }

    pub(crate) fn refused(why: impl Into<String>) -> Fault {
        Fault::Fatal { kind: HttpErrorKind::Refused, why: why.into(), advice: None }
    }

    pub(crate) fn changed(why: impl Into<String>) -> Fault {
        let advice = Some("start again; if it is replaced often, use a URL that names one version of it");
        Fault::Fatal { kind: HttpErrorKind::Changed, why: why.into(), advice }
    }

    pub(crate) fn of_kind(kind: HttpErrorKind, why: impl Into<String>) -> Fault {
        Fault::Fatal { kind, why: why.into(), advice: None }
    }

    pub(crate) fn advise(self, advice: &'static str) -> Fault {
        match self {
            Fault::Fatal { kind, why, .. } => Fault::Fatal { kind, why, advice: Some(advice) },
            transient @ Fault::Transient { .. } => transient,
        }
    }
}
