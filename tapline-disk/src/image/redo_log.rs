//! Where the redo logs of images are (see [`disk::redo`]), and how the log left by a dead process is handled.
//!
//! A log is a file in memory, named after the image's file, not its path: the next process that opens the image finds
//! it, under any name and in any chain. Passed files ([`crate::files`]) come with theirs; otherwise logs are in a
//! directory of the user: `$TAPLINE_REDO_DIR`, else `/run/tapline/redo` for root, else `tapline/redo` below
//! `$XDG_RUNTIME_DIR`, else `/tmp/tapline-UID/redo`.
//!
//! It knows nothing about a log's contents. Invariant: a log is opened only by the process that holds the write lock
//! of its image; a process with a read lock, which keeps writers out, reads a copy of it. By its name a log is found;
//! whether it is of the image, in the state in which the image is, is proven by the stamp in the image, or where the
//! log has no records, by an id of the file that is not given out again ([`Owner`]).

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
use disk::{ImageErrorKind, RedoLog};
use memory::{Mapping, Shared};
use rustix::fs::{FallocateFlags, fallocate};
use uring::{Cache, ImageFile};

use crate::files::Files;
use crate::image::{uuid, write_synced};
use crate::process::failure::Failure;
use crate::process::fault::{Planted, planted};
use crate::process::log::say;

/// Bytes for records. A round begins when half of it is used: after some thousand changes.
const CAPACITY: usize = 128 << 10;
const LEN: u64 = 132 << 10;

/// Bytes of a word of a log.
const WORD: usize = 8;

/// Where the kernel says which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

static BOOT: OnceLock<Option<[u8; 16]>> = OnceLock::new();

/// Logs that this process has opened to keep.
static OPENED: Mutex<Vec<LogFile>> = Mutex::new(Vec::new());

/// The file of a log.
#[derive(Debug)]
struct LogFile {
    file: File,
    /// To be removed by this process, if it was not handed over.
    path: PathBuf,
    handed: bool,
    /// Of the image for which it was opened to be kept.
    identity: Option<[u8; IDENTITY_LEN]>,
}

/// Learns which boot this is, before the file system may be out of reach.
pub fn prepare() {
    BOOT.get_or_init(|| {
        let text = std::fs::read_to_string(BOOT_ID).ok()?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
    });
}

/// Opens the log of an image that is to be served for writing, whose lock this process has. `None` where files are
/// handed over, and no log was.
pub fn open(files: &Files, name: &ImageName, file: &mut ImageFile) -> Result<Option<RedoLog>, Failure> {
    let failed = |error: io::Error| Failure::new(format!("open the redo log of {name}"), error).advise(ADVICE);
    let owner = owner(file).map_err(failed)?;
    let Some(mut found) = LogFile::of(files, file, &owner, true).map_err(failed)? else {
        say(format_args!(
            "no redo log was passed for {name}: if this process dies, data not flushed by the guest is lost"
        ));
        return Ok(None);
    };
    // All of it is there from the beginning: a page that memory has no room for later would end the process.
    fallocate(&found.file, FallocateFlags::empty(), 0, LEN).map_err(|errno| failed(errno.into()))?;
    let log = found.read_as(name, found.region().map_err(failed)?, &owner, file)?;
    place::hold(&found.file).map_err(failed)?;
    found.identity = Some(owner.identity);
    opened().push(found);
    Ok(Some(log))
}

const ADVICE: &str = "set TAPLINE_REDO_DIR to a directory in memory that is writable only by this user";

/// The log that the last process has left of an image that is only read, and whose lock keeps writers out: a copy, so
/// that nothing is written anywhere. `None` where nothing is left. The image is read through it; it needs no space, and
/// no right to write.
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
    // A process that takes the place of this one reads it, too.
    opened().push(LogFile { identity: Some(owner.identity), ..found });
    Ok((log.owed().is_some() || log.has_failed()).then_some(log))
}

/// Whether a sync of the image at this path has failed in its last process, or of one below it.
pub fn has_failed(files: &Files, path: &Path) -> bool {
    let state = LogFile::of_path(files, path).and_then(|found| found.state().ok().flatten());
    state.is_some_and(|state| redo::has_failed(&state))
}

/// Whether a process has left something in the log of the image at this path.
pub fn is_left(files: &Files, path: &Path) -> bool {
    LogFile::of_path(files, path).is_some_and(|found| found.is_left())
}

/// Records that a sync of an image has failed for which no log is open, and whose lock this process has: the kernel may
/// have marked clean what it could not write, so the next process must not believe a sync that succeeds.
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
/// failed sync nothing is replayed, and the image is used as after a power loss, which is reported.
pub fn settle(files: &Files, name: &ImageName, file: &mut ImageFile) -> Result<(), Failure> {
    settle_above(files, name, file, AfterFailure { below: false, keep: false }).map(|_| ())
}

/// What is known where logs of a chain are settled, the deepest image's first.
#[derive(Clone, Copy, Debug)]
pub struct AfterFailure {
    /// A sync of an image below this one has failed.
    pub below: bool,
    /// A log that says so is kept, for the image to be read through it: its guest lives.
    pub keep: bool,
}

/// The same for an image with parents, which were handled before; whether a sync of it or of them has failed. In that
/// case data that this one has discarded may be nowhere else than in what that sync should have covered.
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
            read_anew(name, file);
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
    drop(log);
    found.end();
    Ok(false)
}

/// Why a log could not be replayed: nothing is lost by that.
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

/// Has an image whose sync has failed show what its storage has.
pub fn read_anew(name: &ImageName, file: &mut ImageFile) {
    if let Err(error) = file.sync_and_drop_cache() {
        say(format_args!("the storage of {name} still fails: {error}"));
    }
}

/// Ends the logs that this process has opened and that need not be read, while their images are still locked; nothing
/// is logged any more. An image that was a layer of the disk may have been merged and removed since: another file may
/// have got its inode number and with that its log, which a living process maps.
pub fn end_all() {
    for found in opened().drain(..).filter(|found| !found.is_left() && found.is_own()) {
        found.end();
    }
}

/// Whether a process would find something in a log other than this image's.
pub fn others_left(image: &ImageFile) -> bool {
    let own = image.metadata().ok().map(|metadata| file_name(&metadata));
    let is_own = |found: &&LogFile| found.path.file_name().and_then(|name| name.to_str()) == own.as_deref();
    opened().iter().filter(|found| !is_own(found)).any(LogFile::is_left)
}

/// The logs that were handed to this process, for the one that takes its place. Another opens its logs itself.
pub fn to_be_handed() -> io::Result<Vec<(PathBuf, File)>> {
    let opened = opened();
    let mut all: Vec<(PathBuf, File)> = Vec::new();
    for found in opened.iter().filter(|found| found.handed) {
        // A merge is handed the log of a layer again that was the leaf when the process was started.
        if all.iter().all(|(path, _)| *path != found.path) {
            all.push((found.path.clone(), found.file.try_clone()?));
        }
    }
    Ok(all)
}

fn opened() -> std::sync::MutexGuard<'static, Vec<LogFile>> {
    // Whoever has panicked with it has left it whole: it is changed by single steps.
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the log of a file that is about to be overwritten by another image. Before the first byte of that.
pub fn void(files: &Files, file: &mut ImageFile) -> io::Result<()> {
    let owner = owner(file)?;
    match LogFile::of(files, file, &owner, false)? {
        Some(found) => found.file.set_len(0),
        None => Ok(()),
    }
}

/// What distinguishes an image's file from all others of this boot, and this process from all others.
fn owner(file: &mut ImageFile) -> io::Result<Owner> {
    prepare();
    let boot = BOOT.get().copied().flatten().unwrap_or_default();
    let mut identity = [0; IDENTITY_LEN];
    let parts = [boot.to_vec(), file.unique_id()?].concat();
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

    /// The log of the image at this path, if that can be opened.
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
        let len = usize::try_from(self.file.metadata()?.len()).unwrap_or(0).min(HEADER_LEN + CAPACITY);
        Ok(Shared::of(Mapping::of_shrinking_file(self.file.as_fd(), len)?))
    }

    /// What is in it, in memory of this process; but for what was in flight, which is the business of who writes.
    fn copied(&self) -> io::Result<Shared> {
        let len = usize::try_from(self.file.metadata()?.len()).unwrap_or(0).min(HEADER_LEN + CAPACITY);
        let mut bytes = vec![0; len / WORD * WORD];
        self.file.read_exact_at(&mut bytes, 0)?;
        let copy = Shared::of_words(bytes.len() / WORD);
        let words = (0..).step_by(WORD).zip(bytes.chunks_exact(WORD));
        for (at, word) in words.filter(|(at, _)| !IN_FLIGHT.contains(at)) {
            copy.store_u64_native(at, u64::from_ne_bytes(word.try_into().unwrap_or_default()));
        }
        Ok(copy)
    }

    /// Whether there is something to read. A log that cannot be read is reported when it is opened.
    fn is_left(&self) -> bool {
        self.state().map_or(true, |state| state.is_some_and(|state| redo::is_left(&state)))
    }

    /// How it begins; `None` where it is empty.
    fn state(&self) -> io::Result<Option<[u8; redo::STATE_LEN]>> {
        let mut state = [0; redo::STATE_LEN];
        let len = self.file.read_at(&mut state, 0)?;
        Ok((len == state.len()).then_some(state))
    }

    /// Whether it is still the log of the image for which it was opened.
    fn is_own(&self) -> bool {
        let mut written = [0; IDENTITY_LEN];
        let at = u64::try_from(IDENTITY_AT).unwrap_or(u64::MAX);
        let read = self.file.read_exact_at(&mut written, at);
        read.is_ok() && self.identity.is_none_or(|identity| identity == written)
    }

    /// Opens the log in a region for an image, and reports one that is of no use for it.
    fn read_as(
        &self,
        name: &ImageName,
        region: Shared,
        owner: &Owner,
        file: &mut ImageFile,
    ) -> Result<RedoLog, Failure> {
        if planted(Planted::AnyStamp) {
            accept_any(&region, file);
        }
        let log = RedoLog::open(region, owner, file).map_err(|error| self.not_understood(name, error))?;
        if log.was_void() {
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

    fn not_understood(&self, name: &ImageName, error: disk::ImageError) -> Failure {
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

    /// Nobody needs it any more.
    fn end(self) {
        let ended = self.file.set_len(0);
        let ended = if self.handed { ended } else { std::fs::remove_file(&self.path) };
        if let Err(error) = ended {
            say(format_args!("the empty redo log {} could not be removed: {error}", self.path.display()));
        }
    }
}

/// What is said of a log that is of no use for an image.
fn not_used(image: impl std::fmt::Display) -> String {
    format!(
        "{image} is not in the state in which the last process here left its image (it was replaced or restored, or \
         another program has written to it): the redo log of that process is not used"
    )
}

/// Has a log belong to an image whatever its stamp, for those who plant that.
fn accept_any(region: &Shared, file: &mut ImageFile) {
    let found = disk::stamps_in(file).ok().and_then(|found| found.into_iter().next());
    if let (Some(stamp), Some(at)) = (found, redo::STAMPS_AT.first()) {
        region.write(*at, stamp.to_bytes());
        region.store_u64_native(redo::ACCEPTED_AT, 1);
    }
}
