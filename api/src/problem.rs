//! Why something was not done, for people and for programs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was refused or a task failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    /// The reason for programs.
    pub code: Code,
    /// What was tried, on what, and why it failed.
    pub message: String,
    /// The field of the request that is at fault, as a path: `source.path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// Kinds of problems. Clients must treat unknown ones as `failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request is not JSON, not HTTP, or too long.
    Malformed,
    /// A field is invalid, missing or unknown.
    Invalid,
    /// The caller is not authenticated: the token is missing, wrong, revoked or expired.
    Unauthorized,
    /// The caller lacks permission.
    Forbidden,
    /// The object does not exist.
    NotFound,
    /// The name, the location or the position is already taken.
    Exists,
    /// The object is in the wrong state.
    State,
    /// The object is in use.
    InUse,
    /// Another task is working on the object.
    Busy,
    /// The repository, the image or the file system is read-only.
    ReadOnly,
    /// There is not enough space, or not without using the reserve.
    NoSpace,
    /// The repository, the format or the host does not support this.
    Unsupported,
    /// Too many requests at the same time; retry later.
    Overloaded,
    /// The operation was cancelled.
    Cancelled,
    /// The operation did not complete in time.
    Timeout,
    /// The storage, a file or another program failed.
    Failed,
    /// The catalogue is damaged or missing: the daemon stops, and an administrator must repair it.
    Damaged,
    /// An internal error of the daemon.
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
    /// Creates a problem.
    pub fn new(code: Code, message: impl Into<String>) -> Problem {
        Problem { code, message: message.into(), field: None, advice: None }
    }

    /// Adds the field that is at fault.
    pub fn field(self, field: impl Into<String>) -> Problem {
        Problem { field: Some(field.into()), ..self }
    }

    /// Adds what to do about it.
    pub fn advise(self, advice: impl Into<String>) -> Problem {
        Problem { advice: Some(advice.into()), ..self }
    }

    /// A failed operation: what was tried, and why it failed.
    pub fn failed(tried: impl std::fmt::Display, why: impl std::fmt::Display) -> Problem {
        Problem::new(Code::Failed, format!("cannot {tried}: {why}"))
    }
}
