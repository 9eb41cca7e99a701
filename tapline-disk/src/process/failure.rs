//! Outcomes of commands: an exit code, or, as for verbs of the control socket, an error with its kind for programs,
//! what was tried, on what, why it failed and what to do about it.

use std::error::Error;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;

use control::{ImageName, Kind, printable};
use disk::{ImageError, ImageErrorKind};
use nbd::tls::directory::DirectoryError;
use uring::{EngineError, FileOpenError};

/// The outcomes of commands. Each number means the same for all commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command succeeded and found nothing wrong.
    Done,
    /// `compare`: the disks differ.
    Differ,
    /// `check`: the image is damaged.
    Damaged,
    /// `check --repair`: the image was damaged and is repaired.
    Repaired,
    /// `check`: the only problem is leaked space.
    Leaks,
    /// The command failed.
    Failed,
    /// Invalid arguments (`EX_USAGE`).
    Usage,
}

impl Exit {
    /// Returns the exit code for the shell.
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

/// Why a command or a verb failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(control::Error);

impl Failure {
    /// Makes a failure from a complete message of a known kind.
    pub fn of(kind: Kind, what: impl Into<String>) -> Failure {
        Failure(control::Error::new(kind, what))
    }

    /// Makes the message `cannot {tried}: {why}`, followed by the causes of `why`.
    pub fn new(tried: impl fmt::Display, why: impl Into<Box<dyn Error + Send + Sync>>) -> Failure {
        let why = why.into();
        let kind = kind_of(&*why);
        Failure(control::Error::cannot(tried, why).of_kind(kind))
    }

    /// Wraps an error whose message already says what was tried and on what; its causes are added.
    pub fn said(error: impl Error + 'static) -> Failure {
        let (kind, advice) = (kind_of(&error), no_space_for_file(&error));
        let failure = Failure(control::Error::said(error).of_kind(kind));
        advice.into_iter().fold(failure, Failure::advise)
    }

    /// Reports a step that failed with an error of the system.
    pub fn failed(tried: impl fmt::Display, error: &std::io::Error) -> Failure {
        Failure(control::Error::failed(tried, error))
    }

    /// Reports that another verb is in progress.
    pub fn busy_with(verb: &str) -> Failure {
        Failure(control::Error::busy_with(verb))
    }

    /// Adds what to do about it.
    pub fn advise(self, advice: impl Into<String>) -> Failure {
        Failure(self.0.advise(advice))
    }

    /// Prefixes the message with its subject.
    pub fn about(self, what: &impl fmt::Display) -> Failure {
        Failure(self.0.about(what))
    }

    /// Sets the kind, for programs.
    pub fn of_kind(self, kind: Kind) -> Failure {
        Failure(self.0.of_kind(kind))
    }

    /// Returns the kind, for programs.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// Returns the message: what was tried, on what, and why it failed.
    pub fn what(&self) -> &str {
        &self.0.message
    }

    /// Returns the advice, if there is any.
    pub fn advice(&self) -> Option<&str> {
        self.0.advice.as_deref()
    }

    /// Returns the exit code of a command that failed so.
    pub fn exit(&self) -> Exit {
        match self.0.kind {
            Kind::Malformed | Kind::Version | Kind::UnknownVerb | Kind::Invalid => Exit::Usage,
            _ => Exit::Failed,
        }
    }
}

/// Returns what to do if a file cannot be created for lack of space. If bytes are free, inodes or a quota are used up.
fn no_space_for_file(error: &(dyn Error + 'static)) -> Option<String> {
    let Some(FileOpenError::Failed { path, source, .. }) = error.downcast_ref() else { return None };
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let place = directory.display();
    match source.kind() {
        ErrorKind::QuotaExceeded => {
            Some(format!("a quota is used up: remove files of this user in {place}, or raise it"))
        }
        ErrorKind::StorageFull => Some(match rustix::fs::statvfs(directory) {
            Ok(free) if free.f_favail == 0 && free.f_files > 0 => {
                format!("no inodes are free on the file system of {place} (df -i): remove files there")
            }
            _ => format!("free some space on the file system of {place}"),
        }),
        _ => None,
    }
}

/// Returns the kind of an error, or of its causes.
fn kind_of(error: &(dyn Error + 'static)) -> Kind {
    let causes = std::iter::successors(Some(error), |&cause| cause.source());
    let kinds = causes.map(|cause| {
        if let Some(error) = cause.downcast_ref::<FileOpenError>() {
            return kind_of_file(error);
        }
        if let Some(error) = cause.downcast_ref::<ImageError>() {
            return match error.kind {
                // The request is valid, but not for this image.
                ImageErrorKind::Unsupported | ImageErrorKind::OutOfLimits => Kind::Unsupported,
                ImageErrorKind::WrongFormat | ImageErrorKind::Corrupt => Kind::NotAnImage,
                ImageErrorKind::Mismatch | ImageErrorKind::Storage => Kind::Failed,
            };
        }
        cause.downcast_ref().map_or(Kind::Failed, Kind::of)
    });
    kinds.into_iter().find(|&kind| kind != Kind::Failed).unwrap_or(Kind::Failed)
}

fn kind_of_file(error: &FileOpenError) -> Kind {
    match error {
        FileOpenError::Exists { .. } => Kind::Exists,
        FileOpenError::InUse { .. } => Kind::InUse,
        FileOpenError::DirectRefused { .. } => Kind::Unsupported,
        _ => Kind::Failed,
    }
}

impl From<Failure> for control::Error {
    fn from(failure: Failure) -> control::Error {
        failure.0
    }
}

/// Converts an error reported by another disk process.
impl From<control::Error> for Failure {
    fn from(error: control::Error) -> Failure {
        let failure = Failure::of(error.kind, printable(&error.message));
        match error.advice {
            Some(advice) => failure.advise(printable(&advice)),
            None => failure,
        }
    }
}

/// Converts an error about a file that a client has named.
impl From<FileOpenError> for Failure {
    fn from(error: FileOpenError) -> Failure {
        let invalid = matches!(error, FileOpenError::NotHanded { .. } | FileOpenError::AnotherFile { .. });
        let failure = Failure::said(error);
        if invalid { failure.of_kind(Kind::Invalid) } else { failure }
    }
}

impl From<DirectoryError> for Failure {
    fn from(error: DirectoryError) -> Failure {
        Failure::of(Kind::Invalid, error.to_string()).advise(error.advice)
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        Failure::said(error)
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Failure {
        Failure::said(error)
    }
}

/// Adds advice to an image error, by its kind.
pub fn explain(name: &ImageName, error: ImageError) -> Failure {
    let advice = match error.kind {
        ImageErrorKind::WrongFormat => Some(format!(
            "give the file's actual format; if it should be {}, its start and end are damaged or truncated",
            name.format
        )),
        ImageErrorKind::Corrupt if name.format.is_read_only() => Some(format!(
            "`qemu-img check -f {} {}` may repair it; else restore it from a backup",
            name.format,
            name.path().display()
        )),
        ImageErrorKind::Corrupt => Some(format!("`tapline image check {name}` lists the problems")),
        ImageErrorKind::Unsupported | ImageErrorKind::Mismatch => None,
        ImageErrorKind::OutOfLimits => None,
        ImageErrorKind::Storage => Some("its storage failed; see the kernel log".into()),
    };
    // Formats use FILE for the file's name in the commands that they recommend.
    let error = ImageError { what: error.what.replace(" FILE ", &format!(" {} ", name.path().display())), ..error };
    let error = ImageError { what: error.what.replace(" FILE`", &format!(" {}`", name.path().display())), ..error };
    let failure = Failure::new(format!("open {name}"), error);
    match advice {
        Some(advice) => failure.advise(advice),
        None => failure,
    }
}

/// Reports that a command cannot use images of another hypervisor.
pub fn only_read(tried: impl fmt::Display, name: &ImageName) -> Failure {
    let why = format!("{} images are only read, to be converted", name.format);
    let advice = format!("make another of it: tapline image convert {name} qcow2:FILE");
    Failure::new(tried, why).advise(advice).of_kind(Kind::Unsupported)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.with_advice())
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
