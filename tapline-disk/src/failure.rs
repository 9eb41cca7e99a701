//! How a command ends: with an exit code, or with what was tried, on what, why it failed and what to do about it.

use std::error::Error;
use std::fmt;

use vm::syntax::in_full;
use vm::xen::NotDone;

/// Ends of commands. Each number means one thing, whatever the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done; nothing is wrong.
    Done,
    /// `compare`: the disks differ.
    Differ,
    /// `check`: the image is damaged.
    Damaged,
    /// `check --repair`: the image was damaged and is repaired.
    Repaired,
    /// `check`: nothing is wrong but space that nothing refers to.
    Leaks,
    /// The command could not be done.
    Failed,
    /// Invalid arguments (`EX_USAGE`).
    Usage,
}

impl Exit {
    /// The exit code for the shell.
    pub fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Differ => 1,
            Exit::Damaged => 2,
            Exit::Repaired => 3,
            Exit::Failed => 4,
            Exit::Leaks => 5,
            Exit::Usage => 64,
        }
    }
}

/// Why a command could not be done.
#[derive(Debug)]
pub struct Failure {
    what: String,
    advice: Option<String>,
    exit: Exit,
}

impl Failure {
    /// `cannot {tried}: {why}`, followed by the causes of `why`.
    pub fn new(tried: impl Into<String>, why: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        let what = format!("cannot {}: {}", tried.into(), in_full(&*why.into()));
        Failure { what, advice: None, exit: Exit::Failed }
    }

    /// An error whose message already says what was tried and on what; its causes are added.
    pub fn said(error: impl Error) -> Failure {
        Failure { what: in_full(&error), advice: None, exit: Exit::Failed }
    }

    /// A complete message from elsewhere, which says what was tried and why it failed.
    pub fn told(what: String) -> Failure {
        Failure { what, advice: None, exit: Exit::Failed }
    }

    /// Adds what to do about it.
    pub fn advise(mut self, advice: impl Into<String>) -> Failure {
        self.advice = Some(advice.into());
        self
    }

    /// Prefixes the message with what it is about.
    pub fn about(mut self, what: &impl fmt::Display) -> Failure {
        self.what = format!("{what}: {}", self.what);
        self
    }

    /// Changes the exit code from [`Exit::Failed`].
    pub fn exit_as(mut self, exit: Exit) -> Failure {
        self.exit = exit;
        self
    }

    /// The message: what was tried, on what, and why it failed.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The advice, if there is any.
    pub fn advice(&self) -> Option<&str> {
        self.advice.as_deref()
    }

    /// The exit code.
    pub fn exit(&self) -> Exit {
        self.exit
    }
}

impl From<NotDone> for Failure {
    fn from(not_done: NotDone) -> Failure {
        let advice = not_done.advice().map(str::to_owned);
        Failure { what: not_done.what().to_owned(), advice, exit: Exit::Failed }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.advice {
            Some(advice) => write!(f, "\n  {advice}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[derive(Debug)]
    struct Outer(std::num::ParseIntError);

    impl fmt::Display for Outer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the number is wrong")
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn a_failure_says_what_failed_why_and_what_to_do() {
        let cause = "x".parse::<u8>().unwrap_err();
        let failure = Failure::new("open vhd:a", Outer(cause)).advise("name another file");
        assert_eq!(
            failure.to_string(),
            "cannot open vhd:a: the number is wrong: invalid digit found in string\n  name another file"
        );
        assert_eq!(failure.exit().code(), 4);
    }
}
