//! Space that is kept for the catalogue's log, so that what happens to disks can still be recorded on a full file
//! system.
//!
//! A commit appends to the log (sqlite.org/wal.html), and the log is used again from its beginning once all of it is in
//! the catalogue's file. Blocks that are allocated behind its end serve both.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;

use rustix::fs::FallocateFlags;

/// Some hundred deaths and restarts of disks.
const RESERVE: u64 = 2 << 20;

/// Allocates the space for the log of the catalogue at a path. Where there is none, or where the file system cannot
/// allocate ahead, the catalogue works without.
///
/// The catalogue's own file must not be opened here: closing it would release SQLite's locks on it.
pub fn keep_for_log_of(path: &Path) {
    let mut log = OsString::from(path);
    log.push("-wal");
    if let Ok(log) = File::options().write(true).open(log) {
        rustix::fs::fallocate(log, FallocateFlags::KEEP_SIZE, 0, RESERVE).ok();
    }
}
