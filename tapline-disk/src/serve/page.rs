//! The file of a served disk's statistics page: handed over, named by `--stats-page`, or in the directory of all pages.
//!
//! It knows nothing about what is in it ([`::stats`]). Invariants: a disk is served whatever becomes of its statistics;
//! two processes never write one page, since its writer holds a lock on it, which goes to its successor with the
//! description of the file.

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

/// The name of a page that is handed over, by a daemon or by the process before this one.
pub const NAME: &str = "statistics.page";

/// The ending of a page's name in the directory of all pages.
const ENDING: &str = "page";

/// A page that is not begun yet.
#[derive(Debug)]
pub struct PageFile {
    file: File,
    /// Its path, if this process is to remove it at its end.
    own: Option<PathBuf>,
}

/// What is left to do at the end of the process.
#[derive(Debug, Default)]
pub struct Kept {
    /// For the next process.
    file: Option<File>,
    own: Option<PathBuf>,
}

/// The page of the disk; `None` if there is none, which is said unless nobody asked for one.
pub fn find(files: &Files, serve: &Serve) -> Option<PageFile> {
    let found = match (files.handed_as(NAME), &serve.stats_page) {
        (Some(handed), _) => handed.map(|file| Some(PageFile { own: own_path(serve, &file), file })),
        (None, Some(path)) => create(path).map(|file| Some(PageFile { file, own: None })),
        (None, None) if files.are_handed() || serve.take_over => Ok(None),
        (None, None) => in_directory_of_all(),
    };
    found.unwrap_or_else(|error| {
        say_none(error);
        None
    })
}

/// Begins to count in the page, as the process before this one, if there was one, has let go of it.
pub fn begin(found: Option<PageFile>, identity: &str) -> Result<(Page, Kept), PageError> {
    if let Some(PageFile { file, own }) = found {
        match begin_in(&file, identity) {
            Ok(page) => return Ok((page, Kept { file: Some(file), own })),
            Err(why) => say_none(why),
        }
    }
    Ok((Page::anonymous()?, Kept::default()))
}

fn begin_in(file: &File, identity: &str) -> Result<Page, Box<dyn Error>> {
    lock(file)?;
    Ok(Page::begin(file.try_clone()?, Source::of_this_machine(), identity)?)
}

fn say_none(why: impl Display) {
    say(format_args!("no statistics page, so that tapline top does not see this disk: {why}"));
}

impl Kept {
    /// The file, for the next process.
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// The disk is served no more.
    pub fn remove(&self) {
        if let Some(path) = &self.own {
            // One that is left is removed by the next process that makes a page there.
            drop(std::fs::remove_file(path));
        }
    }
}

fn lock(file: &File) -> io::Result<()> {
    flock(file, FlockOperation::NonBlockingLockExclusive)
        .map_err(|errno| io::Error::other(format!("another process writes it ({})", io::Error::from(errno))))
}

/// Where a page that was taken over is, if the process that has made it would have removed it.
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

/// A new page in the directory of all pages; `None` where there is no such directory for this user.
fn in_directory_of_all() -> io::Result<Option<PageFile>> {
    let Some(directory) = ::stats::directory() else { return Ok(None) };
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", directory.display()));
    DirBuilder::new().recursive(true).mode(0o755).create(&directory).map_err(named)?;
    remove_stale(&directory);
    let path = directory.join(format!("{}.{ENDING}", uuid::text(&uuid::new().map_err(named)?)));
    Ok(Some(PageFile { file: create(&path)?, own: Some(path) }))
}

/// Removes the pages of processes that were killed: nobody holds their locks.
fn remove_stale(directory: &Path) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == ENDING))
    {
        // A page that another process is about to begin is younger than its lock by moments.
        let is_old = path
            .metadata()
            .and_then(|metadata| metadata.modified())
            .is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age.as_secs() > 60));
        if is_old && File::open(&path).is_ok_and(|file| lock(&file).is_ok()) {
            drop(std::fs::remove_file(&path));
        }
    }
}
