//! Starts QEMU so that it outlives the parent process: in its own session, without our terminal, with its output in a
//! file.
//!
//! It knows nothing about QMP. Invariant: QEMU has enough descriptors for every disk it may get; its last output can be
//! read.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Resource, getrlimit};

use super::super::account::{Account, directories_open_to_all};
use super::error::MachineError;

/// Descriptors for 255 disks with queues for each processor: four a queue and six a disk. More are not needed, and not
/// always allowed.
const DESCRIPTORS_MAX: u64 = 65_536;

/// How many bytes at the end of its output are shown.
const WORDS_MAX: u64 = 4096;

/// Others that may do something in the directory: with the monitor they would have the guest.
const OTHERS: u32 = 0o007;

/// The name of the monitor's socket.
const MONITOR: &str = "monitor";

/// The name of QEMU's messages.
const LOG: &str = "qemu.log";

/// The files of a machine, in a directory of its own.
#[derive(Clone, Debug)]
pub(super) struct Files {
    /// Where the monitor listens.
    pub monitor: PathBuf,
    /// Where its messages go.
    pub log: PathBuf,
    /// The offset in the log where the output of this QEMU begins.
    from: u64,
}

impl Files {
    /// The files in a directory that others have no access to.
    pub fn of(directory: &Path) -> Result<Self, MachineError> {
        let refuse = |why: &str| Err(MachineError::Directory { path: directory.to_owned(), why: why.to_owned() });
        let failed = |source| MachineError::File { what: "examine", path: directory.to_owned(), source };
        let metadata = fs::metadata(directory).map_err(failed)?;
        if !metadata.is_dir() || !directory.is_absolute() {
            return refuse("it must be an absolute path of a directory");
        }
        if metadata.mode() & OTHERS != 0 {
            return refuse(
                "other users have access to it, and access to the monitor means control of the guest; run \
                chmod o= on it",
            );
        }
        let monitor = directory.join(MONITOR);
        if monitor.as_os_str().len() > 107 {
            return refuse("its name is too long for a socket inside it; at most 99 bytes fit");
        }
        Ok(Self { monitor, log: directory.join(LOG), from: 0 })
    }

    /// Checks that the user that QEMU runs as has access to them.
    pub fn must_be_reachable(&self, account: &Account) -> Result<(), MachineError> {
        let directory = self.log.parent().unwrap_or(Path::new("/"));
        directories_open_to_all(directory).map_err(|closed| {
            let (uid, closed) = (account.uid, closed.display());
            let why =
                format!("QEMU runs as uid {uid}, which has no search permission on {closed}; run chmod o+x {closed}");
            MachineError::Directory { path: directory.to_owned(), why }
        })
    }

    /// Starts `program`, to which the arguments belong, through the wrapper programs in `before`.
    pub fn start(&mut self, before: &[String], program: &Path, words: &[String]) -> Result<Child, MachineError> {
        let failed = |source| MachineError::File { what: "write", path: self.log.clone(), source };
        let log = File::options().append(true).create(true).open(&self.log).map_err(failed)?;
        self.from = log.metadata().map_err(failed)?.len();
        let errors = log.try_clone().map_err(failed)?;
        // Both replace themselves by what follows, so that the process we start is QEMU. They do what a program can
        // only do in a child before it becomes QEMU, which takes unsafe code.
        let limit = getrlimit(Resource::Nofile).maximum.map_or(DESCRIPTORS_MAX, |most| most.min(DESCRIPTORS_MAX));
        let mut command = Command::new("setsid");
        command.args(["prlimit", &format!("--nofile={limit}:"), "--"]).args(before).arg(program).args(words);
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let directory = self.log.parent().unwrap_or(Path::new("/"));
        command.current_dir(directory);
        command.spawn().map_err(|source| MachineError::Start {
            program: "setsid".to_owned(),
            package: "util-linux",
            source,
        })
    }

    /// This QEMU's output, as far as it is the end of the file.
    pub fn last_words(&self) -> String {
        let read = || {
            let mut log = File::open(&self.log)?;
            let end = log.metadata()?.len();
            log.seek(SeekFrom::Start(self.from.max(end.saturating_sub(WORDS_MAX))))?;
            let mut words = Vec::new();
            log.take(WORDS_MAX).read_to_end(&mut words)?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&words).trim().to_owned())
        };
        match read() {
            Ok(words) if words.is_empty() => format!("it printed nothing ({} is empty)", self.log.display()),
            Ok(words) => words,
            Err(error) => format!("its output cannot be read ({}: {error})", self.log.display()),
        }
    }
}
