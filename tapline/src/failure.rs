//! Failures of commands: the message and the exit code.

use api::{Code, Problem};
use control::{Error, Kind};
use serde_json::json;

/// Exit codes, each with the same meaning for all commands (docs/man/tapline.1). `tapline-disk` uses 0 to 5 as well.
pub mod exit {
    /// The storage, a file or another program failed.
    pub const FAILED: u8 = 4;
    /// There is no such object.
    pub const NOT_FOUND: u8 = 6;
    /// The object exists already, is in use, or is in another state.
    pub const CONFLICT: u8 = 7;
    /// Something else is under way; the same command may succeed later.
    pub const BUSY: u8 = 8;
    /// There is not enough space.
    pub const NO_SPACE: u8 = 9;
    /// The daemon cannot be reached.
    pub const UNREACHABLE: u8 = 10;
    /// The user, or the token, may not do this.
    pub const FORBIDDEN: u8 = 11;
    /// The arguments are wrong (`EX_USAGE`).
    pub const USAGE: u8 = 64;
}

/// The reason why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// A problem reported by the daemon, or with a request to it.
    Problem(Problem),
    /// An error reported by a disk process, or of an operation without the daemon.
    Error(Error),
    /// An error of this kind that was printed already.
    Printed(Kind),
}

impl Failure {
    /// The message for users: what failed, and advice. The field of the request is for programs only.
    pub fn message(&self) -> String {
        match self {
            Failure::Problem(problem) => {
                let advice = problem.advice.as_ref().map(|advice| format!("  {advice}\n")).unwrap_or_default();
                format!("tapline: {problem}\n{advice}")
            }
            Failure::Error(error) => format!("tapline: {}\n", error.with_advice()),
            Failure::Printed(_) => String::new(),
        }
    }

    /// The failure as a line of JSON, for programs.
    pub fn json(&self) -> String {
        match self {
            Failure::Problem(problem) => format!("{}\n", json!({ "error": problem })),
            Failure::Error(error) => format!("{}\n", json!({ "error": error })),
            Failure::Printed(_) => String::new(),
        }
    }

    /// The exit code of the command.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Problem(problem) => of_code(problem.code),
            Failure::Error(Error { kind, .. }) | Failure::Printed(kind) => of_kind(*kind),
        }
    }
}

fn of_code(code: Code) -> u8 {
    match code {
        Code::Malformed | Code::Invalid | Code::Method | Code::MediaType => exit::USAGE,
        Code::NotFound => exit::NOT_FOUND,
        Code::Exists
        | Code::NameTaken
        | Code::State
        | Code::InUse
        | Code::Changed
        | Code::KeyReused
        | Code::ReadOnly => exit::CONFLICT,
        Code::Busy | Code::Overloaded => exit::BUSY,
        Code::NoSpace => exit::NO_SPACE,
        Code::Unreachable => exit::UNREACHABLE,
        Code::Unauthorized | Code::Forbidden | Code::MissingRole => exit::FORBIDDEN,
        Code::Failed | Code::Internal | Code::Damaged | Code::Timeout | Code::Cancelled | Code::Unsupported => {
            exit::FAILED
        }
    }
}

fn of_kind(kind: Kind) -> u8 {
    match kind {
        Kind::Malformed | Kind::Version | Kind::UnknownVerb | Kind::Invalid => exit::USAGE,
        Kind::Exists | Kind::State | Kind::InUse | Kind::Connected => exit::CONFLICT,
        Kind::Busy | Kind::Replaced => exit::BUSY,
        Kind::NoSpace => exit::NO_SPACE,
        Kind::Failed | Kind::NotAnImage | Kind::Unsupported | Kind::Cancelled => exit::FAILED,
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Failure {
        Failure::Problem(problem)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(error)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_problem_shows_its_advice_and_no_field() {
        let problem = Problem::new(api::Code::Exists, "there is an sr 'a'").field("name").advise("choose another");
        assert_eq!(Failure::from(problem).message(), "tapline: there is an sr 'a'\n  choose another\n");
    }

    #[test]
    fn an_error_of_a_disk_shows_advice_and_an_invalid_request_is_wrong_usage() {
        let failure = Failure::from(Error::new(Kind::Invalid, "there is no layer 7").advise("see layers"));
        assert_eq!(failure.message(), "tapline: there is no layer 7\n  see layers\n");
        assert_eq!(failure.exit_code(), 64);
        assert_eq!(Failure::Printed(Kind::Busy).exit_code(), 8);
    }

    #[test]
    fn a_failure_for_programs_is_a_line_of_json() {
        let line = Failure::from(Problem::new(Code::NoSpace, "no room")).json();
        let read: serde_json::Value = serde_json::from_str(line.strip_suffix('\n').unwrap()).unwrap();
        assert_eq!((&read["error"]["code"], &read["error"]["detail"]), (&json!("no-space"), &json!("no room")));
    }
}
