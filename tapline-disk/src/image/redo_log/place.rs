//! Finds the log of an image whose file number has changed since it was logged.
//!
//! A log is named after the number of its file ([`control::redo_name`]). A device may be attached under another number,
//! a file may move to another file system, and a number may be given to another image; the stamp in the image
//! identifies its log. It knows nothing about the contents of logs. Invariant: the log of a running process is never
//! renamed; a log that may still be of use is set aside before another one takes its name.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use disk::Stamp;
use disk::redo::{self, Owner, PREFIX_LEN};
use rustix::fs::FlockOperation;
use uring::ImageFile;

use super::not_used;
use crate::files::mark;
use crate::process::log::say;

/// The maximum number of logs set aside: each takes 132 KiB of memory. Beyond that the oldest are removed.
const ASIDE_MAX: usize = 16;
/// The prefix of their names, and the extension of all logs.
const ASIDE: &str = "aside-";
const ENDING: &str = "redo";

/// Renames the log of `image` in `directory` to `name`, if it has another name there. With `create`, the caller is
/// about to begin a log of that name: the log of another image is set aside.
pub fn find(directory: &Path, name: &str, image: &ImageFile, owner: &Owner, create: bool) -> io::Result<()> {
    let own = directory.join(name);
    let there = Log::read(&own)?.filter(Log::is_left);
    if there.as_ref().is_some_and(|log| !redo::is_void(&log.prefix, owner)) {
        return Ok(());
    }
    let moved = if owner.stamps.is_empty() { None } else { other_with(directory, &own, &owner.stamps)? };
    let shows_change = there.as_ref().is_some_and(|log| redo::shows_change(&log.prefix, owner));
    if shows_change && moved.is_none() && create {
        // With that log goes what shows that a map does not have all changes of the image.
        mark::end(image)?;
    }
    if there.is_some() && (create || moved.is_some()) {
        set_aside(directory, &own)?;
        say(not_used(image.path().display()));
    }
    match moved {
        Some(from) => std::fs::rename(from, own),
        None => Ok(()),
    }
}

/// Finds the log of a dead process whose image has one of these stamps.
fn other_with(directory: &Path, own: &Path, stamps: &[Stamp]) -> io::Result<Option<PathBuf>> {
    for entry in logs_in(directory)? {
        let log = if entry == own { None } else { Log::read(&entry)? };
        if log.is_some_and(|log| log.is_left() && log.has_any_of(stamps) && log.is_unheld()) {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

fn logs_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match directory.read_dir() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut logs = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == ENDING) {
            logs.push(path);
        }
    }
    Ok(logs)
}

/// Renames a log to a name that no image looks for first.
fn set_aside(directory: &Path, own: &Path) -> io::Result<()> {
    let is_aside = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(ASIDE));
    let mut aside: Vec<PathBuf> = logs_in(directory)?.into_iter().filter(is_aside).collect();
    // The time only decides which ones are removed.
    aside.sort_by_key(|path| std::fs::metadata(path).and_then(|found| found.modified()).ok());
    for path in aside.iter().take((aside.len() + 1).saturating_sub(ASIDE_MAX)) {
        std::fs::remove_file(path)?;
    }
    let unique = crate::image::uuid::text(&crate::image::uuid::new()?);
    std::fs::rename(own, directory.join(format!("{ASIDE}{unique}.{ENDING}")))
}

/// The beginning of a log file.
struct Log {
    file: File,
    prefix: [u8; PREFIX_LEN],
}

impl Log {
    fn read(path: &Path) -> io::Result<Option<Log>> {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
        let file = match opened {
            // Its process has ended since the directory was read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut prefix = [0; PREFIX_LEN];
        let whole = file.read_at(&mut prefix, 0)? == PREFIX_LEN;
        Ok(whole.then_some(Log { file, prefix }))
    }

    fn is_left(&self) -> bool {
        self.prefix.first_chunk().is_some_and(redo::is_left)
    }

    fn has_any_of(&self, stamps: &[Stamp]) -> bool {
        redo::stamps_of(&self.prefix).iter().any(|stamp| stamps.contains(stamp))
    }

    /// Returns whether no process holds it ([`hold`]).
    fn is_unheld(&self) -> bool {
        rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }
}

/// Locks the log, to show other processes that this one is running and uses it. A process and its successor hold it
/// together.
pub fn hold(log: &File) -> io::Result<()> {
    rustix::fs::flock(log, FlockOperation::NonBlockingLockShared).map_err(io::Error::from)
}
