//! Why something was not done, for people and for programs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was refused or a task failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    /// For programs.
    pub code: Code,
    /// What was tried, on what, and why it was not done.
    pub message: String,
    /// The field of the request that is at fault, as a path: `source.path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// Kinds of problems. Clients must take one that they do not know for `failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request is not JSON, not HTTP, or too long.
    Malformed,
    /// A field has a value that makes no sense, is missing, or is not known.
    Invalid,
    /// Nobody knows who asks: a token is missing, wrong, revoked or has expired.
    Unauthorized,
    /// Whoever asks may not.
    Forbidden,
    /// There is no such object.
    NotFound,
    /// The name, the place or the position is taken.
    Exists,
    /// The object is not in the state for it.
    State,
    /// Somebody uses the object.
    InUse,
    /// Another task is at work on the object.
    Busy,
    /// The repository, the image or the file system is for reading only.
    ReadOnly,
    /// There is not enough room, or not without touching the reserve.
    NoSpace,
    /// The repository, the format or the host cannot do this at all.
    Unsupported,
    /// Too many requests at one time: ask again.
    Overloaded,
    /// Somebody has cancelled it.
    Cancelled,
    /// It did not end in its time.
    Timeout,
    /// The storage, a file or another program failed.
    Failed,
    /// The catalogue is damaged, or is not there any more: the daemon ends, and somebody has to see to it.
    Damaged,
    /// The daemon is at fault.
    Internal,
}

impl Code {
    /// The status of the HTTP response (RFC 9110, 15).
    pub fn http_status(self) -> u16 {
        match self {
            Code::Malformed | Code::Invalid => 400,
            Code::Unauthorized => 401,
            Code::Forbidden => 403,
            Code::NotFound => 404,
            Code::Exists | Code::State | Code::InUse | Code::Busy | Code::Cancelled => 409,
            Code::ReadOnly | Code::Unsupported => 422,
            Code::Overloaded | Code::Damaged => 503,
            Code::Timeout => 504,
            Code::NoSpace => 507,
            Code::Failed | Code::Internal => 500,
        }
    }
}

impl Problem {
    /// A problem of a kind.
    pub fn new(code: Code, message: impl Into<String>) -> Problem {
        Problem { code, message: message.into(), field: None, advice: None }
    }

    /// The same with the field that is at fault.
    pub fn field(self, field: impl Into<String>) -> Problem {
        Problem { field: Some(field.into()), ..self }
    }

    /// The same with what to do.
    pub fn advise(self, advice: impl Into<String>) -> Problem {
        Problem { advice: Some(advice.into()), ..self }
    }

    /// Something that was tried failed: what, and why.
    pub fn failed(tried: impl std::fmt::Display, why: impl std::fmt::Display) -> Problem {
        Problem::new(Code::Failed, format!("cannot {tried}: {why}"))
    }
}
