//! Why something was not done, for people and for programs: the problem details of RFC 9457.

use serde::{Deserialize, Serialize};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

/// Where the types of problems are described: each is this and the word of its code.
const TYPES: &str = "/v1/problems/";

/// Why a request was refused or a task failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(from = "Received", into = "Details")]
#[error("{detail}")]
pub struct Problem {
    /// The reason for programs.
    pub code: Code,
    /// What was tried, on what, and why it failed.
    pub detail: String,
    /// The task that failed, as a path of the API.
    pub instance: Option<String>,
    /// The field of the request that is at fault, as a path: `source.path`.
    pub field: Option<String>,
    /// What to do about it.
    pub advice: Option<String>,
}

/// A problem as JSON (RFC 9457): `application/problem+json` when it is the body of a response.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Problem)]
pub struct Details {
    /// The type of the problem, a path of the API that describes it. There is one for each code.
    #[schema(format = "uri-reference")]
    pub r#type: String,
    /// The type of the problem, for people.
    pub title: String,
    /// The HTTP status of a response with this problem.
    #[schema(minimum = 400, maximum = 599)]
    pub status: u16,
    /// What was tried, on what, and why it failed.
    pub detail: String,
    /// The task that failed, as a path of the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = "uri-reference")]
    pub instance: Option<String>,
    /// The reason for programs.
    pub code: Code,
    /// The field of the request that is at fault, as a path: `source.path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// The members of a problem that are read. The rest follow from the code.
#[derive(Deserialize)]
struct Received {
    code: Code,
    detail: String,
    instance: Option<String>,
    field: Option<String>,
    advice: Option<String>,
}

impl From<Received> for Problem {
    fn from(received: Received) -> Problem {
        let Received { code, detail, instance, field, advice } = received;
        Problem { code, detail, instance, field, advice }
    }
}

impl From<Problem> for Details {
    fn from(problem: Problem) -> Details {
        let Problem { code, detail, instance, field, advice } = problem;
        let (r#type, title, status) = (code.type_uri(), code.title().to_owned(), code.http_status());
        Details { r#type, title, status, detail, instance, code, field, advice }
    }
}

impl PartialSchema for Problem {
    fn schema() -> RefOr<Schema> {
        Details::schema()
    }
}

impl ToSchema for Problem {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Details::schemas(schemas);
    }
}

/// Kinds of problems. Unknown ones, of a later version, are read as `failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request is not JSON, not HTTP, or too long.
    Malformed,
    /// A field, a header or a query parameter is invalid, missing or unknown.
    Invalid,
    /// The caller is not authenticated: the token is missing, wrong, revoked or expired.
    Unauthorized,
    /// The caller lacks permission.
    Forbidden,
    /// The role of the caller's token does not include this.
    MissingRole,
    /// The object does not exist.
    NotFound,
    /// The path exists, but not with this method.
    Method,
    /// The UUID, the location, the position or the name of a token is already taken.
    Exists,
    /// Another object of this kind has the name.
    NameTaken,
    /// The object is in a state that does not allow this.
    State,
    /// The object is in use.
    InUse,
    /// Another task is working on the object.
    Busy,
    /// The operation was cancelled.
    Cancelled,
    /// The object is no longer as the header `If-Match` says.
    Changed,
    /// The body has a content type other than `application/json`.
    MediaType,
    /// The `Idempotency-Key` was already used with a different request.
    KeyReused,
    /// The repository, the image or the file system is read-only.
    ReadOnly,
    /// The repository, the format or the host does not support this.
    Unsupported,
    /// An internal error of the daemon.
    Internal,
    /// Too many requests at the same time.
    Overloaded,
    /// The catalogue is damaged or missing: the daemon stops, and an administrator must repair it.
    Damaged,
    /// The operation did not complete in time.
    Timeout,
    /// There is not enough space, or not without using the reserve.
    NoSpace,
    /// The daemon cannot be reached. Clients say this; the daemon itself does not.
    Unreachable,
    /// The storage, a file or another program failed.
    #[serde(other)]
    Failed,
}

/// The description of a kind of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The code.
    pub code: Code,
    /// Its word in JSON.
    pub word: &'static str,
    /// The status of an HTTP response (RFC 9110, 15).
    pub status: u16,
    /// The kind, for people.
    pub title: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// What to do about it.
    pub advice: &'static str,
}

const fn kind(
    code: Code,
    word: &'static str,
    status: u16,
    title: &'static str,
    meaning: &'static str,
    advice: &'static str,
) -> Kind {
    Kind { code, word, status, title, meaning, advice }
}

/// All kinds, by status.
#[rustfmt::skip]
pub const KINDS: [Kind; 25] = [
    kind(Code::Malformed, "malformed", 400, "The request cannot be read",
        "The request is not JSON, not HTTP, or too long.",
        "Correct the request."),
    kind(Code::Invalid, "invalid", 400, "A field of the request is invalid",
        "A field, a header or a query parameter is invalid, missing or unknown.",
        "Correct what `field` names."),
    kind(Code::Unauthorized, "unauthorized", 401, "Not authenticated",
        "The caller is not authenticated: the token is missing, wrong, revoked or expired.",
        "Send a valid token: `Authorization: Bearer TOKEN`."),
    kind(Code::Forbidden, "forbidden", 403, "Not permitted",
        "The caller lacks permission.",
        "Do it as a user or with a token that may."),
    kind(Code::MissingRole, "missing-role", 403, "The role does not include this",
        "The role of the caller's token does not include this.",
        "Use a token with the role that `detail` names."),
    kind(Code::NotFound, "not-found", 404, "No such object",
        "The object does not exist.",
        "Look for it in the list; it may have been destroyed."),
    kind(Code::Method, "method", 405, "The path does not support this method",
        "The path exists, but not with this method.",
        "Use a method that the header `Allow` lists."),
    kind(Code::Exists, "exists", 409, "Already taken",
        "The UUID, the location, the position or the name of a token is already taken.",
        "Choose another one."),
    kind(Code::NameTaken, "name-taken", 409, "The name is taken",
        "Another object of this kind has the name: a VDI in the same repository, a repository or a VM.",
        "Choose another name, or rename the object that `detail` names."),
    kind(Code::State, "state", 409, "The object is in the wrong state",
        "The object is in a state that does not allow this.",
        "Bring it into the right state first, as `advice` says."),
    kind(Code::InUse, "in-use", 409, "The object is in use",
        "The object is in use.",
        "End its use first: unplug the VBD, destroy what depends on it."),
    kind(Code::Busy, "busy", 409, "Another task is working on the object",
        "Another task is working on the object.",
        "Try again when that task has ended, or cancel it."),
    kind(Code::Cancelled, "cancelled", 409, "Cancelled",
        "The operation was cancelled.",
        "Ask again if it is still wanted."),
    kind(Code::Changed, "changed", 412, "The object was changed meanwhile",
        "The object is no longer as the header `If-Match` says.",
        "Get the object again, decide whether the change still makes sense, and ask with its new `ETag`."),
    kind(Code::MediaType, "media-type", 415, "The body is not JSON",
        "The body has a content type other than `application/json`.",
        "Send JSON with `Content-Type: application/json`."),
    kind(Code::KeyReused, "key-reused", 422, "The key belongs to another request",
        "The `Idempotency-Key` was already used with a different request.",
        "Use a new key, a random UUID, for each request."),
    kind(Code::ReadOnly, "read-only", 422, "Read-only",
        "The repository, the image or the file system is read-only.",
        "Write to something else: clone the VDI, use another repository."),
    kind(Code::Unsupported, "unsupported", 422, "Not supported",
        "The repository, the format or the host does not support this.",
        "Do without, as `advice` says."),
    kind(Code::Failed, "failed", 500, "The storage or another program failed",
        "The storage, a file or another program failed.",
        "See `detail` and the daemon's log, remove the cause, and ask again."),
    kind(Code::Internal, "internal", 500, "The daemon is at fault",
        "An internal error of the daemon.",
        "Report it, with the daemon's log."),
    kind(Code::Overloaded, "overloaded", 503, "Too many requests",
        "Too many requests at the same time.",
        "Ask again later."),
    kind(Code::Damaged, "damaged", 503, "The catalogue is damaged",
        "The catalogue is damaged or missing: the daemon stops, and an administrator must repair it.",
        "Repair or restore the catalogue (docs/recover.md)."),
    kind(Code::Timeout, "timeout", 504, "Not done in time",
        "The operation did not complete in time.",
        "Ask again; if it stays so, look at the storage."),
    kind(Code::NoSpace, "no-space", 507, "Not enough space",
        "There is not enough space, or not without using the reserve.",
        "Free space, enlarge the storage or lower the reserve."),
    kind(Code::Unreachable, "unreachable", 503, "The daemon cannot be reached",
        "The daemon cannot be reached. Clients say this; the daemon itself does not.",
        "Start it, or give its socket or address."),
];

impl Code {
    /// Its description.
    pub fn kind(self) -> &'static Kind {
        // A test holds that each code has one.
        KINDS.iter().find(|kind| kind.code == self).unwrap_or(&KINDS[0])
    }

    /// The status of the HTTP response (RFC 9110, 15).
    pub fn http_status(self) -> u16 {
        self.kind().status
    }

    /// The kind of problem, for people.
    pub fn title(self) -> &'static str {
        self.kind().title
    }

    /// The type of the problem (RFC 9457, 3.1.1): a path of the API that describes it.
    pub fn type_uri(self) -> String {
        format!("{TYPES}{}", self.kind().word)
    }
}

impl Problem {
    /// Creates a problem.
    pub fn new(code: Code, detail: impl Into<String>) -> Problem {
        Problem { code, detail: detail.into(), instance: None, field: None, advice: None }
    }

    /// Adds the field that is at fault.
    pub fn field(self, field: impl Into<String>) -> Problem {
        Problem { field: Some(field.into()), ..self }
    }

    /// Adds what to do about it.
    pub fn advise(self, advice: impl Into<String>) -> Problem {
        Problem { advice: Some(advice.into()), ..self }
    }

    /// Adds the task that failed.
    pub fn of_task(self, task: Uuid) -> Problem {
        Problem { instance: Some(format!("/v1/tasks/{task}")), ..self }
    }

    /// A failed operation: what was tried, and why it failed.
    pub fn failed(tried: impl std::fmt::Display, why: impl std::fmt::Display) -> Problem {
        Problem::new(Code::Failed, format!("cannot {tried}: {why}"))
    }
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_problem_has_the_members_of_rfc_9457_and_its_own() {
        let problem = Problem::new(Code::NoSpace, "no room").field("size").advise("free some");
        let text = json!({
            "type": "/v1/problems/no-space", "title": "Not enough space", "status": 507, "detail": "no room",
            "code": "no-space", "field": "size", "advice": "free some",
        });
        assert_eq!(serde_json::to_value(&problem).unwrap(), text);
        assert_eq!(serde_json::from_value::<Problem>(text).unwrap(), problem);
    }

    #[test]
    fn a_problem_of_a_later_version_is_read() {
        let later = json!({ "code": "on-fire", "detail": "it burns", "colour": "red" });
        assert_eq!(serde_json::from_value::<Problem>(later).unwrap(), Problem::new(Code::Failed, "it burns"));
    }

    #[test]
    fn each_code_has_one_description_by_its_own_word() {
        let schema = serde_json::to_value(Code::schema()).unwrap();
        let words: Vec<&str> = schema["enum"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        assert_eq!(words.len(), KINDS.len());
        for kind in KINDS {
            assert_eq!(serde_json::to_value(kind.code).unwrap(), json!(kind.word));
            assert!(
                words.contains(&kind.word) && kind.code.kind() == KINDS.iter().find(|k| k.word == kind.word).unwrap()
            );
        }
    }
}
