//! Finds the redo logs of images (see [`disk::redo`]), and handles logs left by dead processes.
//!
//! A log is a file in memory, named after the image's file, not its path: the next process that opens the image finds
//! it, under any name and in any chain. Passed files ([`crate::files`]) come with their logs; otherwise logs are in a
//! directory of the user: `$TAPLINE_REDO_DIR`, else `/run/tapline/redo` for root, else `tapline/redo` below
//! `$XDG_RUNTIME_DIR`, else `/tmp/tapline-UID/redo`.
//!
//! It knows nothing about a log's contents. Invariant: a log is opened only by the process that holds the write lock of
//! its image; a process with a read lock, which keeps writers out, reads a copy of it. A log is found by its name; that
//! it belongs to the current state of the image is proven by the stamp in the image, or, if the log has neither records
//! nor a stamp, or a sync has failed, by an id of the file that is never reused ([`Owner`]).

mod directory;
mod place;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use control::redo_name::file_name;
use control::{ImageName, Kind};
use disk::redo::{self, HEADER_LEN, IDENTITY_AT, IDENTITY_LEN, IN_FLIGHT, Owner};
use disk::size::{in_memory, on_disk};
use disk::{ImageErrorKind, RedoLog};
use memory::{Mapping, Shared};
use rustix::fs::{FallocateFlags, fallocate};
use uring::{Cache, ImageFile};

use crate::files::Files;
use crate::image::{uuid, write_synced};
use crate::process::failure::Failure;
use crate::process::fault::{Planted, planted};
use crate::process::log::say;

/// The size of the area for records. A flush begins when half of it is used: after some thousand changes.
const CAPACITY: usize = 128 << 10;
const LEN: u64 = 132 << 10;

/// The bytes of a word of a log.
const WORD: usize = 8;

/// The kernel's id of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

static BOOT: OnceLock<[u8; 16]> = OnceLock::new();

/// The logs that this process has opened for its whole life.
static OPENED: Mutex<Vec<LogFile>> = Mutex::new(Vec::new());

/// A log's file.
#[derive(Debug)]
struct LogFile {
    file: File,
    /// The path, where this process removes it, unless the file was passed.
    path: PathBuf,
    handed: bool,
    /// The identity of the image for which it was opened, if it stays open.
    identity: Option<[u8; IDENTITY_LEN]>,
}

/// Reads the boot ID, before the file system may become inaccessible. Without it nothing is opened: a log of an earlier
/// boot could pass for one of this.
pub fn prepare() -> Result<(), Failure> {
    boot().map(drop).map_err(|error| Failure::new(format!("read {BOOT_ID}"), error).advise("mount /proc"))
}

fn boot() -> io::Result<[u8; 16]> {
    if let Some(boot) = BOOT.get() {
        return Ok(*boot);
    }
    let text = std::fs::read_to_string(BOOT_ID)?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let boot = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok(*BOOT.get_or_init(|| boot.to_be_bytes()))
}

/// Opens the log of an image to be served for writing, which this process has locked. Returns `None` if files are
/// passed, but no log.
pub fn open(files: &Files, name: &ImageName, file: &mut ImageFile) -> Result<Option<RedoLog>, Failure> {
    let failed = |error: io::Error| Failure::new(format!("open the redo log of {name}"), error).advise(ADVICE);
    let owner = owner(file).map_err(failed)?;
    let Some(mut found) = LogFile::of(files, file, &owner, true).map_err(failed)? else {
        say(format_args!(
            "no redo log was passed for {name}: if this process dies, data not flushed by the guest is lost"
        ));
        return Ok(None);
    };
    // Allocates all of it now: if memory ran out on a later page fault, the process would be killed.
    fallocate(&found.file, FallocateFlags::empty(), 0, LEN).map_err(|errno| failed(errno.into()))?;
    let log = found.read_as(name, found.region().map_err(failed)?, &owner, file)?;
    place::hold(&found.file).map_err(failed)?;
    found.identity = Some(owner.identity);
    opened().push(found);
    Ok(Some(log))
}

const ADVICE: &str = "set TAPLINE_REDO_DIR to a directory in memory that is writable only by this user";

/// Reads the log that the last process has left of an image that is only read, and whose lock keeps writers out. The
/// result is a copy, through which the image is read, so this needs neither space nor write permission. Returns `None`
/// if nothing is left.
pub fn read(files: &Files, name: &ImageName, file: &mut ImageFile) -> Result<Option<RedoLog>, Failure> {
    let failed = |error: io::Error| Failure::new(format!("read the redo log of {name}"), error).advise(ADVICE);
    if planted(Planted::ReaderIgnoresLog) {
        return Ok(None);
    }
    let owner = owner(file).map_err(failed)?;
    let Some(found) = LogFile::of(files, file, &owner, false).map_err(failed)?.filter(LogFile::is_left) else {
        return Ok(None);
    };
    let log = found.read_as(name, found.copied().map_err(failed)?, &owner, file)?;
    // A process that takes over from this one reads it too.
    opened().push(LogFile { identity: Some(owner.identity), ..found });
    Ok((log.owed().is_some() || log.has_failed()).then_some(log))
}

/// Returns whether a sync of the image at this path, or of one of its parents, has failed in its last process.
pub fn has_failed(files: &Files, path: &Path) -> bool {
    let state = LogFile::of_path(files, path).and_then(|found| found.state().ok().flatten());
    state.is_some_and(|state| redo::has_failed(&state))
}

/// Returns whether a process has left something in the log of the image at this path.
pub fn is_left(files: &Files, path: &Path) -> bool {
    LogFile::of_path(files, path).is_some_and(|found| found.is_left())
}

/// Records a failed sync of an image that has no open log, and that this process has locked: the kernel may have marked
/// clean what it could not write, so the next process must not trust a successful sync.
pub fn record_failed_sync(files: &Files, name: &ImageName, file: &ImageFile) {
    if files.are_handed() {
        return;
    }
    match open(files, name, &mut file.clone()) {
        Ok(log) => log.into_iter().for_each(|mut log| log.sync_failed()),
        Err(failure) => say(format_args!("that a sync of {name} has failed is not recorded: {}", failure.what())),
    }
}

/// Replays the log of a dead process into an image, which is open for writing and locked, and ends the log. After a
/// failed sync nothing is replayed, and the image is used as after a power loss, which is logged.
pub fn settle(files: &Files, name: &ImageName, file: &mut ImageFile) -> Result<(), Failure> {
    settle_above(files, name, file, AfterFailure { below: false, keep: false }).map(|_| ())
}

/// How to handle failed syncs when the logs of a chain are replayed, beginning with the deepest image.
#[derive(Clone, Copy, Debug)]
pub struct AfterFailure {
    /// A sync of one of its parents has failed.
    pub below: bool,
    /// Keep a log with a failed sync, to read the image through it: its guest is running.
    pub keep: bool,
}

/// Like [`settle`], for an image whose parents have been settled; returns whether a sync of it or of them has failed.
/// In that case data that this image has discarded may exist only in what that sync should have made durable.
pub fn settle_above(
    files: &Files,
    name: &ImageName,
    file: &mut ImageFile,
    after: AfterFailure,
) -> Result<bool, Failure> {
    let failed = |error: io::Error| explain_replay(name, error);
    let owner = owner(file).map_err(failed)?;
    let left = LogFile::of(files, file, &owner, false).map_err(failed)?.filter(LogFile::is_left);
    let Some(found) = left else { return Ok(after.below) };
    let mut log = found.read_as(name, found.region().map_err(failed)?, &owner, file)?;
    if after.below {
        log.sync_failed();
    }
    if log.has_failed() {
        if !after.keep {
            say(format_args!(
                "a sync of {name} or of an image below it failed in its last process: using it as after a power loss"
            ));
            drop_cache(name, file);
            drop(log);
            found.end();
        }
        return Ok(true);
    }
    let unsynced = log.is_unsynced();
    let owed = log.owed().map(|owed| (owed.batches().to_vec(), owed.sectors()));
    // The kernel may have marked clean what it could not write: the next sync would succeed.
    let mut sync = |file: &mut ImageFile| file.sync().inspect_err(|_| log.sync_failed());
    match owed {
        Some((batches, sectors)) => {
            write_synced::write_synced(file, &batches, sync).map_err(failed)?;
            say(format_args!("{name}: replayed {sectors} sectors from the redo log of its last process"));
        }
        None if unsynced => sync(file).map_err(failed)?,
        None => {}
    }
    let was_void = log.was_void();
    drop(log);
    if !was_void {
        found.end();
    }
    Ok(false)
}

/// Returns whether the last process has left the image in another state than it is in, as far as its log shows: it was
/// replaced or restored, or another program has written to it.
pub fn is_void(files: &Files, image: &mut ImageFile) -> io::Result<bool> {
    let owner = owner(image)?;
    let found = LogFile::of(files, image, &owner, false)?;
    let prefix = found.map(|found| found.prefix()).transpose()?.flatten();
    Ok(prefix.is_some_and(|prefix| redo::shows_change(&prefix, &owner)))
}

/// Explains why a log could not be replayed. No data is lost.
fn explain_replay(name: &ImageName, error: io::Error) -> Failure {
    let failure = Failure::new(format!("replay the redo log of {name}"), error);
    match failure.kind() {
        Kind::NoSpace => failure.advise(
            "nothing is lost: free some space on the storage of the image and run it again. Until then the image can \
             be read, and served with --read-only",
        ),
        _ => failure,
    }
}

/// Makes an image whose sync has failed show what its storage contains.
pub fn drop_cache(name: &ImageName, file: &mut ImageFile) {
    if let Err(error) = file.sync_and_drop_cache() {
        say(format_args!("the storage of {name} still fails: {error}"));
    }
}

/// Ends the logs that this process has opened and that need not be read. Call it when nothing is logged any more, while
/// the images are still locked. A former layer may have been merged and removed since: another file may have received
/// its inode number, and with it its log, which a running process maps.
pub fn end_all() {
    let is_unneeded = |found: &LogFile| !found.is_left() && !found.was_void() && found.is_own();
    for found in opened().drain(..).filter(is_unneeded) {
        found.end();
    }
}

/// Returns whether a process would find something in a log other than this image's.
pub fn other_logs_remain(image: &ImageFile) -> bool {
    let own = image.metadata().ok().map(|metadata| file_name(&metadata));
    let is_own = |found: &&LogFile| found.path.file_name().and_then(|name| name.to_str()) == own.as_deref();
    opened().iter().filter(|found| !is_own(found)).any(LogFile::is_left)
}

/// Returns the logs that were passed to this process, for its successor. Otherwise the successor opens them itself.
pub fn logs_to_pass() -> io::Result<Vec<(PathBuf, File)>> {
    let opened = opened();
    let mut all: Vec<(PathBuf, File)> = Vec::new();
    for found in opened.iter().filter(|found| found.handed) {
        // For a merge, the log of the layer that was the leaf when the process started is passed again.
        if all.iter().all(|(path, _)| *path != found.path) {
            all.push((found.path.clone(), found.file.try_clone()?));
        }
    }
    Ok(all)
}

fn opened() -> std::sync::MutexGuard<'static, Vec<LogFile>> {
    // A thread that panicked while holding the lock has left the value consistent: each change is a single step.
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the log of a file that is about to be overwritten by another image. Call it before the first byte is written.
pub fn invalidate(files: &Files, file: &mut ImageFile) -> io::Result<()> {
    let owner = owner(file)?;
    match LogFile::of(files, file, &owner, false)? {
        Some(found) => found.file.set_len(0),
        None => Ok(()),
    }
}

/// Identifies an image's file among all others of this boot, and this process among all others.
fn owner(file: &mut ImageFile) -> io::Result<Owner> {
    let mut identity = [0; IDENTITY_LEN];
    let parts = [boot()?.to_vec(), file.unique_id()?].concat();
    identity.iter_mut().zip(parts).for_each(|(place, byte)| *place = byte);
    let stamps = disk::stamps_in(file).map_err(io::Error::other)?;
    Ok(Owner { identity, stamps, session: uuid::new()? })
}
const _: () = assert!(16 + uring::UNIQUE_ID_MAX <= IDENTITY_LEN, "an id would be cut off");

impl LogFile {
    fn of(files: &Files, file: &ImageFile, owner: &Owner, create: bool) -> io::Result<Option<LogFile>> {
        let metadata = file.metadata()?;
        if !files.are_handed() {
            let directory = directory::path();
            directory::check(&directory)?;
            if !planted(Planted::AnyStamp) {
                place::find(&directory, &file_name(&metadata), file, owner, create)?;
            }
        }
        LogFile::find(files, &metadata, create)
    }

    /// Returns the log of the image at this path, if it can be opened.
    fn of_path(files: &Files, path: &Path) -> Option<LogFile> {
        if files.are_handed() {
            return LogFile::find(files, &files.metadata(path).ok()?, false).ok().flatten();
        }
        let look = uring::OpenOptions { write: false, cache: Cache::Writeback, lock: false };
        let mut file = ImageFile::open(path, look).ok()?;
        let owner = owner(&mut file).ok()?;
        LogFile::of(files, &file, &owner, false).ok().flatten()
    }

    fn find(files: &Files, image: &std::fs::Metadata, create: bool) -> io::Result<Option<LogFile>> {
        let mut name = file_name(image);
        if planted(Planted::LinkDecides) {
            name = format!("{}-{name}", image.nlink());
        }
        if files.are_handed() {
            let found = files.handed_as(&name).transpose()?;
            return Ok(found.map(|file| LogFile { file, path: PathBuf::from(name), handed: true, identity: None }));
        }
        let directory = directory::path();
        if create {
            directory::create(&directory)?;
        }
        directory::check(&directory)?;
        let path = directory.join(name);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(create).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        match options.open(&path) {
            Ok(file) => Ok(Some(LogFile { file, path, handed: false, identity: None })),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !create => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn region(&self) -> io::Result<Shared> {
        let len = in_memory(self.file.metadata()?.len()).min(HEADER_LEN + CAPACITY);
        Ok(Shared::of(Mapping::of_shrinking_file(self.file.as_fd(), len)?))
    }

    /// Copies the log to memory of this process, without the requests in flight, which concern only writers.
    fn copied(&self) -> io::Result<Shared> {
        let len = in_memory(self.file.metadata()?.len()).min(HEADER_LEN + CAPACITY);
        let mut bytes = vec![0; len / WORD * WORD];
        self.file.read_exact_at(&mut bytes, 0)?;
        let copy = Shared::of_words(bytes.len() / WORD);
        let words = (0..).step_by(WORD).zip(bytes.chunks_exact(WORD).filter_map(<[u8]>::first_chunk));
        for (at, word) in words.filter(|(at, _)| !IN_FLIGHT.contains(at)) {
            copy.store_u64_native(at, u64::from_ne_bytes(*word));
        }
        Ok(copy)
    }

    /// Returns whether there is something to read. A log that cannot be read is reported when it is opened.
    fn is_left(&self) -> bool {
        self.state().map_or(true, |state| state.is_some_and(|state| redo::is_left(&state)))
    }

    /// Returns whether somebody has yet to know that the image was not as its last process had left it.
    fn was_void(&self) -> bool {
        self.prefix().is_ok_and(|prefix| prefix.is_some_and(|prefix| redo::was_void(&prefix)))
    }

    /// Reads what is in front of the records; `None` if it is empty.
    fn prefix(&self) -> io::Result<Option<[u8; redo::PREFIX_LEN]>> {
        let mut prefix = [0; redo::PREFIX_LEN];
        let len = self.file.read_at(&mut prefix, 0)?;
        Ok((len == prefix.len()).then_some(prefix))
    }

    /// Reads the beginning of the log; `None` if it is empty.
    fn state(&self) -> io::Result<Option<[u8; redo::STATE_LEN]>> {
        let mut state = [0; redo::STATE_LEN];
        let len = self.file.read_at(&mut state, 0)?;
        Ok((len == state.len()).then_some(state))
    }

    /// Returns whether it is still the log of the image for which it was opened.
    fn is_own(&self) -> bool {
        let mut written = [0; IDENTITY_LEN];
        let read = self.file.read_exact_at(&mut written, on_disk(IDENTITY_AT));
        read.is_ok() && self.identity.is_none_or(|identity| identity == written)
    }

    /// Opens the log in a region for an image, and reports one that does not belong to it.
    fn read_as(
        &self,
        name: &ImageName,
        region: Shared,
        owner: &Owner,
        file: &mut ImageFile,
    ) -> Result<RedoLog, Failure> {
        if planted(Planted::AnyStamp) {
            adopt(&region, file);
        }
        let drops = self.is_left() && region.read(0).is_some_and(|prefix| redo::is_void(&prefix, owner));
        let log = RedoLog::open(region, owner, file).map_err(|error| self.unusable(name, error))?;
        if drops {
            say(not_used(name));
        }
        if planted(Planted::TimeDecides) && log.owed().is_some() {
            let late = file.metadata().and_then(|found| found.modified()).is_ok_and(|time| time > SystemTime::now());
            if late {
                return Err(Failure::new(
                    format!("open {name}"),
                    "it was changed after its last process was seen last",
                ));
            }
        }
        Ok(log)
    }

    fn unusable(&self, name: &ImageName, error: disk::ImageError) -> Failure {
        let first = match error.kind {
            ImageErrorKind::Unsupported => {
                "serve the image with the tapline-disk version that served it last and stop that; or "
            }
            _ => "",
        };
        Failure::new(format!("open {name}"), error).advise(format!(
            "{first}remove {} to open it as after a power loss: data that its last process had not made durable is \
             then lost",
            self.path.display()
        ))
    }

    /// Empties and removes a log that is not needed any more.
    fn end(self) {
        let ended = self.file.set_len(0);
        let ended = if self.handed { ended } else { std::fs::remove_file(&self.path) };
        if let Err(error) = ended {
            say(format_args!("the empty redo log {} could not be removed: {error}", self.path.display()));
        }
    }
}

/// Makes the message about a log that does not belong to an image.
fn not_used(image: impl std::fmt::Display) -> String {
    format!(
        "{image} is not in the state in which the last process here left its image (it was replaced or restored, or \
         another program has written to it): the redo log of that process is not used"
    )
}

/// Makes a log belong to an image whatever its stamp, for a planted fault.
fn adopt(region: &Shared, file: &mut ImageFile) {
    let found = disk::stamps_in(file).ok().and_then(|found| found.into_iter().next());
    if let (Some(stamp), Some(at)) = (found, redo::STAMPS_AT.first()) {
        region.write(*at, stamp.to_bytes());
        region.store_u64_native(redo::ACCEPTED_AT, 1);
    }
}
