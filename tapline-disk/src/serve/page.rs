//! The file of a served disk's statistics page: passed, named by `--stats-page`, or in the directory of all pages.
//!
//! It knows nothing about its contents ([`::stats`]). Invariants: whatever happens to its statistics, the disk is
//! served; two processes never write one page, since its writer holds a lock on it, which passes to its successor with
//! the open file description.

use std::error::Error;
use std::fmt::Display;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ::stats::{Page, PageError, Source};
use arguments::Serve;
use rustix::fs::{FlockOperation, flock};

use crate::files::Files;
use crate::image::uuid;
use crate::process::log::say;

/// The name of a page that the daemon or the previous process passes.
pub const NAME: &str = "statistics.page";

/// The extension of a page's name in the directory of all pages.
const ENDING: &str = "page";

/// A page file before counting begins.
#[derive(Debug)]
pub struct PageFile {
    file: File,
    /// Its path, if this process must remove it at its end.
    own: Option<PathBuf>,
}

/// The page file while the disk is served.
#[derive(Debug, Default)]
pub struct Kept {
    /// Passed to the successor.
    file: Option<File>,
    own: Option<PathBuf>,
}

/// Opens the page of the disk. Returns `None` if there is none; a failure is logged.
pub fn find(files: &Files, serve: &Serve) -> Option<PageFile> {
    let found = match (files.handed_as(NAME), &serve.stats_page) {
        (Some(handed), _) => handed.map(|file| Some(PageFile { own: own_path(serve, &file), file })),
        (None, Some(path)) => create(path).map(|file| Some(PageFile { file, own: None })),
        (None, None) if files.are_handed() || serve.take_over => Ok(None),
        (None, None) => create_in_directory(),
    };
    found.unwrap_or_else(|error| {
        log_missing(error);
        None
    })
}

/// Starts counting in the page, which the previous process, if there was one, has released.
pub fn begin(found: Option<PageFile>, identity: &str) -> Result<(Page, Kept), PageError> {
    if let Some(PageFile { file, own }) = found {
        match begin_in(&file, identity) {
            Ok(page) => return Ok((page, Kept { file: Some(file), own })),
            Err(why) => log_missing(why),
        }
    }
    Ok((Page::anonymous()?, Kept::default()))
}

fn begin_in(file: &File, identity: &str) -> Result<Page, Box<dyn Error>> {
    lock(file)?;
    Ok(Page::begin(file.try_clone()?, Source::of_this_machine(), identity)?)
}

fn log_missing(why: impl Display) {
    say(format_args!("no statistics page, so that tapline top does not see this disk: {why}"));
}

impl Kept {
    /// Returns the file, for the successor.
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Removes the page of a disk that is no longer served.
    pub fn remove(&self) {
        if let Some(path) = &self.own {
            // If this fails, the next process that creates a page there removes it.
            drop(std::fs::remove_file(path));
        }
    }
}

fn lock(file: &File) -> io::Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive)
        .map_err(|errno| io::Error::other(format!("another process writes it ({})", io::Error::from(errno))))
}

/// Returns the path of a page that was taken over, if the process that created it would have removed it.
fn own_path(serve: &Serve, file: &File) -> Option<PathBuf> {
    if serve.handing.handed || serve.stats_page.is_some() {
        return None;
    }
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())).ok()
}

fn create(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o640).open(path);
    file.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Creates a page in the directory of all pages; returns `None` if this user has no such directory.
fn create_in_directory() -> io::Result<Option<PageFile>> {
    let Some(directory) = ::stats::directory() else { return Ok(None) };
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", directory.display()));
    DirBuilder::new().recursive(true).mode(0o755).create(&directory).map_err(named)?;
    remove_stale(&directory);
    let path = directory.join(format!("{}.{ENDING}", uuid::text(&uuid::new().map_err(named)?)));
    Ok(Some(PageFile { file: create(&path)?, own: Some(path) }))
}

/// Removes the pages of killed processes, whose locks are free.
fn remove_stale(directory: &Path) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == ENDING))
    {
        // A new page may not be locked yet.
        let is_old = path
            .metadata()
            .and_then(|metadata| metadata.modified())
            .is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age.as_secs() > 60));
        if is_old && File::open(&path).is_ok_and(|file| lock(&file).is_ok()) {
            drop(std::fs::remove_file(&path));
        }
    }
}
