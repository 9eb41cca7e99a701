//! How a command fails: what is printed, and the exit code.

use api::Problem;
use control::{Error, Kind};

/// The exit code of a command that failed. The other exit codes are those of `tapline-disk`.
pub const FAILED: u8 = 4;
/// The exit code for wrong arguments (`EX_USAGE`).
pub const USAGE: u8 = 64;

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// As the daemon says it, or about a request to it.
    Problem(Problem),
    /// As a disk process says it, or about what was done without the daemon.
    Error(Error),
    /// An error of this kind, which was printed already.
    Printed(Kind),
}

impl Failure {
    /// What people read: what it is, which field of the request it concerns, and what to do about it.
    pub fn told(&self) -> String {
        match self {
            Failure::Problem(problem) => {
                let field = problem.field.as_ref().map(|field| format!(" ({field})")).unwrap_or_default();
                let advice = problem.advice.as_ref().map(|advice| format!("  {advice}\n")).unwrap_or_default();
                format!("tapline: {problem}{field}\n{advice}")
            }
            Failure::Error(error) => format!("tapline: {}\n", error.with_advice()),
            Failure::Printed(_) => String::new(),
        }
    }

    /// The exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Problem(_) => FAILED,
            Failure::Error(Error { kind, .. }) | Failure::Printed(kind) => match kind {
                Kind::Malformed | Kind::Version | Kind::UnknownVerb | Kind::Invalid => USAGE,
                _ => FAILED,
            },
        }
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
    fn a_problem_shows_field_and_advice() {
        let problem = Problem::new(api::Code::Exists, "there is an sr 'a'").field("name").advise("choose another");
        assert_eq!(Failure::from(problem).told(), "tapline: there is an sr 'a' (name)\n  choose another\n");
    }

    #[test]
    fn an_error_of_a_disk_shows_advice_and_an_invalid_request_is_wrong_usage() {
        let failure = Failure::from(Error::new(Kind::Invalid, "there is no layer 7").advise("see layers"));
        assert_eq!(failure.told(), "tapline: there is no layer 7\n  see layers\n");
        assert_eq!(failure.exit_code(), 64);
        assert_eq!(Failure::Printed(Kind::Busy).exit_code(), 4);
    }
}
