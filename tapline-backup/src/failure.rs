//! Failures of commands: the message, with the advice, and the exit code.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

use backup::{StoreError, StoreErrorKind};
use control::{Kind, in_full, printable};
use nbd::tls::directory::DirectoryError;
use serde_json::json;

/// Outcomes. Each number means the same for all commands of Tapline (docs/man/tapline.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done,
    /// A verification has found damage.
    Damaged,
    /// The command failed.
    Failed,
    /// No such target or backup.
    NotFound,
    /// It exists already, or is in use.
    Conflict,
    /// No space is left.
    NoSpace,
    /// Invalid arguments.
    Usage,
}

impl Exit {
    /// The code for the shell.
    pub fn code(self) -> ExitCode {
        ExitCode::from(self.number())
    }

    /// The same as a number.
    pub const fn number(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Damaged => 2,
            Exit::Failed => 4,
            Exit::NotFound => 6,
            Exit::Conflict => 7,
            Exit::NoSpace => 9,
            Exit::Usage => 64,
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Exit::Done => "done",
            Exit::Damaged => "damaged",
            Exit::Failed => "failed",
            Exit::NotFound => "not-found",
            Exit::Conflict => "conflict",
            Exit::NoSpace => "no-space",
            Exit::Usage => "invalid",
        }
    }
}

/// Why a command failed.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    what: String,
    advice: Option<String>,
}

impl Failure {
    /// A failure with a complete message.
    pub fn new(exit: Exit, what: impl Into<String>) -> Failure {
        Failure { exit, what: what.into(), advice: None }
    }

    /// `cannot {tried}: {why}`, followed by the causes of `why`.
    pub fn cannot(tried: impl fmt::Display, why: impl Error + Send + Sync + 'static) -> Failure {
        let error = control::Error::cannot(tried, Box::new(why));
        let exit = match error.kind {
            Kind::NoSpace => Exit::NoSpace,
            Kind::Exists | Kind::InUse => Exit::Conflict,
            _ => Exit::Failed,
        };
        Failure::new(exit, error.message)
    }

    /// Adds what to do about it.
    pub fn advise(mut self, advice: impl Into<String>) -> Failure {
        self.advice = Some(advice.into());
        self
    }

    /// The message for people.
    pub fn message(&self) -> String {
        let advice = self.advice.as_ref().map(|advice| format!("  {}\n", printable(advice))).unwrap_or_default();
        format!("tapline: {}\n{advice}", printable(&self.what))
    }

    /// The failure as a line of JSON.
    pub fn json(&self) -> String {
        let mut error = json!({ "kind": self.exit.word(), "message": self.what });
        if let (Some(advice), Some(fields)) = (&self.advice, error.as_object_mut()) {
            fields.insert("advice".to_owned(), json!(advice));
        }
        format!("{}\n", json!({ "error": error }))
    }
}

impl From<backup::Error> for Failure {
    fn from(error: backup::Error) -> Failure {
        let exit = match &error {
            backup::Error::Store(store) => of_store(store),
            backup::Error::NoTarget | backup::Error::NoBackup(_) => Exit::NotFound,
            backup::Error::TargetExists => Exit::Conflict,
            backup::Error::Invalid(_) | backup::Error::WrongBase { .. } => Exit::Usage,
            backup::Error::WrongKey | backup::Error::KeyNeeded | backup::Error::NotEncrypted => Exit::Usage,
            backup::Error::Damaged { .. } | backup::Error::Lost { .. } => Exit::Damaged,
            backup::Error::Sink { source, .. } if Kind::of(source) == Kind::NoSpace => Exit::NoSpace,
            _ => Exit::Failed,
        };
        Failure::new(exit, in_full(&error))
    }
}

fn of_store(error: &StoreError) -> Exit {
    match error.kind {
        StoreErrorKind::NoSpace => Exit::NoSpace,
        StoreErrorKind::NotFound => Exit::NotFound,
        StoreErrorKind::Exists => Exit::Conflict,
        _ => Exit::Failed,
    }
}

impl From<DirectoryError> for Failure {
    fn from(error: DirectoryError) -> Failure {
        Failure::new(Exit::Usage, error.to_string()).advise(error.advice)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        Failure::new(of_store(&error), in_full(&error))
    }
}
