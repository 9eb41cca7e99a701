//! The redo logs of dead processes: replayed before an image is opened, or read through.
//!
//! It knows nothing about formats. Invariant: the deepest layer of a chain comes first; readers write nothing.

use control::{ImageName, Kind};
use disk::RedoLog;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::redo_log::{self, AfterFailure};
use crate::image::remote::{self, User};
use crate::process::failure::Failure;
use crate::process::log::say;

/// A chain that is about to be opened.
#[derive(Clone, Copy, Debug)]
pub struct ChainToReplay<'a> {
    /// The source of the files.
    pub files: &'a Files,
    /// Its layers, the image itself first.
    pub names: &'a [&'a ImageName],
    /// The options of the first `writable` layers; those below are opened for reading.
    pub options: OpenOptions,
    /// See `options`.
    pub writable: usize,
    /// Whether the image is served.
    pub is_served: bool,
    /// Whether the log of a failed sync is kept for a layer that is only read: its guest is running, and must read what
    /// was acknowledged.
    pub keeps_failed: bool,
    /// Whether logs are replayed although the chain is only read.
    pub writes_all: bool,
}

/// The result of replaying the logs of a chain.
#[derive(Debug, Default)]
pub struct Replayed {
    /// A sync of a layer below the image has failed: nothing above that layer is written.
    pub below_failed: bool,
    /// The depths of parents whose logs lack space to be replayed. Their disk does it when there is space.
    pub unsettled: Vec<usize>,
}

/// Opens the file of an image for writing, after replaying its redo log.
pub fn to_write(files: &Files, name: &ImageName, options: OpenOptions) -> Result<ImageFile, Failure> {
    let mut file = files.open_image(name, options).map_err(Failure::said)?;
    redo_log::settle(files, name, &mut file)?;
    Ok(file)
}

/// Opens the file of an image for reading, and its redo log, if there is one, through which it must be read.
pub fn to_read(files: &Files, name: &ImageName, options: OpenOptions) -> Result<(ImageFile, Option<RedoLog>), Failure> {
    if let Some(file) = remote::open(files, name, false, User::Job)? {
        return Ok((file, None));
    }
    let mut file = files.open_image(name, OpenOptions { write: false, ..options }).map_err(Failure::said)?;
    let log = redo_log::read(files, name, &mut file)?;
    Ok((file, log))
}

/// Replays the redo log of an image that is then opened for reading.
pub fn image(files: &Files, name: &ImageName) -> Result<(), Failure> {
    if !name.is_at_server() && redo_log::is_left(files, name.path()) {
        drop(to_write(files, name, OpenOptions { write: true, cache: Cache::Writeback, lock: true })?);
        // Its lock would conflict with the reader's.
        files.close_writable(name.path());
    }
    Ok(())
}

/// Replays the redo logs of a chain's layers, the deepest first: data discarded by a merge from one layer must be in
/// those below it. The log of an image served for writing is replayed by its disk, and so is that of a parent for which
/// there is no space. A chain that is only read is read through its logs, and nothing is written; only a log with a
/// failed sync is ended, unless its guest is running and must read what was acknowledged.
pub fn chain(chain: &ChainToReplay<'_>) -> Result<Replayed, Failure> {
    let mut settled = Replayed::default();
    let options = chain.options;
    for (depth, name) in chain.names.iter().enumerate().rev() {
        let write = options.write && depth < chain.writable;
        let by_disk = chain.is_served && write;
        if by_disk || name.is_at_server() || !redo_log::is_left(chain.files, name.path()) {
            continue;
        }
        let has_failed = settled.below_failed || redo_log::has_failed(chain.files, name.path());
        if !options.write && !chain.writes_all && !has_failed {
            continue;
        }
        if !settled.unsettled.is_empty() {
            // Data that it has discarded is in a layer below, which must come first.
            settled.unsettled.push(depth);
            continue;
        }
        let after = AfterFailure { below: settled.below_failed, keep: chain.keeps_failed && !write };
        match layer(chain, name, write, after) {
            Ok(failed) => settled.below_failed = failed,
            Err(failure) if failure.kind() == Kind::NoSpace && chain.is_served => {
                say(format_args!(
                    "there is no space to replay the redo log of the last process in {name}: the disk reads through it, \
                     flushes fail until there is space"
                ));
                settled.unsettled.push(depth);
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(settled)
}

/// Replays the log of one layer; returns whether a sync of it or of one below it has failed.
fn layer(chain: &ChainToReplay<'_>, name: &ImageName, write: bool, after: AfterFailure) -> Result<bool, Failure> {
    let ChainToReplay { files, options, .. } = *chain;
    let mut file = files.open_image(name, OpenOptions { write: true, ..options }).map_err(Failure::said)?;
    let failed = redo_log::settle_above(files, name, &mut file, after)?;
    drop(file);
    if !write {
        // Its lock would conflict with the reader's.
        files.close_writable(name.path());
    }
    Ok(failed)
}
