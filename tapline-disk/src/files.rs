//! Where a command's files and listening sockets come from: the file system, or the descriptors passed to this process.
//!
//! A command uses one [`Files`], made from its command line, for all that it opens, creates, removes and syncs. It
//! knows nothing about images. Invariant: with `--handed` no path is opened, created, renamed, removed or looked up: a
//! path only selects one of the passed descriptors.
//!
//! Passed files stay available until [`Files::forget`]: a file may be opened several times, each time with the same
//! open file description and its single lock. A served disk forgets them after opening its files, and after each verb
//! ([`AtHand`]), so that a description exists, and keeps its lock, exactly as long as it is used.

pub mod access;
pub mod identity;
pub mod mark;
pub mod passed;
pub mod policy;

use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use control::handed::{Lent, Listens};
use control::{ImageName, Kind};
use disk::Tail;
use disk::changes::FileState;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use uring::{AccessMode, Cache, FileOpenError, ImageFile, OpenOptions};

use crate::process::failure::Failure;
use crate::process::log::say;

/// The source of a command's files. Clones share it.
#[derive(Clone, Debug)]
pub struct Files {
    source: Arc<Source>,
    trust: Trust,
}

#[derive(Debug)]
struct Source {
    /// The passed files, if only those are used.
    handed: Option<Mutex<Handed>>,
    /// Files taken over from another process, if the file system is used otherwise.
    taken: Mutex<Option<Handed>>,
    /// The image whose changes this process records.
    recorded: Mutex<Option<Recorded>>,
}

/// An image whose changes are recorded.
#[derive(Debug)]
struct Recorded {
    path: PathBuf,
    /// The state of its file when it was last opened for writing, before anything was written.
    opened: Option<FileState>,
}

/// Which raw images are accepted although they look like another format ([`crate::image::raw_lookalike`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    /// All of them, because the user is sure (`--really-raw`).
    All,
    /// Those whose files were passed to this process.
    Handed,
    /// None.
    Nothing,
}

/// Passed files and listening sockets, by the paths that the sender gives them.
#[derive(Debug, Default)]
pub struct Handed {
    files: Vec<HandedFile>,
    listeners: Vec<(Listens, PathBuf, OwnedFd)>,
    lent: Vec<(Lent, OwnedFd)>,
}

/// A file that was passed to this process.
#[derive(Debug)]
pub struct HandedFile {
    /// The file's path.
    pub path: PathBuf,
    /// Whether it is also open for writing.
    pub write: bool,
    /// The file.
    pub descriptor: OwnedFd,
}

/// Keeps the files passed with one verb available until it is dropped.
#[derive(Debug)]
pub struct AtHand(Files);

impl Drop for AtHand {
    fn drop(&mut self) {
        self.0.forget();
    }
}

impl Files {
    /// Uses the file system.
    pub fn of_system() -> Files {
        Files::of(None)
    }

    /// Uses only the passed files and sockets.
    pub fn handed(handed: Handed) -> Files {
        Files::of(Some(Mutex::new(handed)))
    }

    fn of(handed: Option<Mutex<Handed>>) -> Files {
        Files {
            source: Arc::new(Source { handed, taken: Mutex::default(), recorded: Mutex::default() }),
            trust: Trust::Handed,
        }
    }

    /// Makes it accept all raw images.
    pub fn trusting(self) -> Files {
        Files { trust: Trust::All, ..self }
    }

    /// Makes it check raw images even if their files were passed.
    pub fn distrusting(&self) -> Files {
        let trust = if self.trust == Trust::All { Trust::All } else { Trust::Nothing };
        Files { trust, ..self.clone() }
    }

    /// Returns whether raw images are accepted without a check.
    pub fn are_trusted(&self) -> bool {
        match self.trust {
            Trust::All => true,
            Trust::Handed => self.are_handed(),
            Trust::Nothing => false,
        }
    }

    /// Returns whether this process works on passed files.
    pub fn are_handed(&self) -> bool {
        self.source.handed.is_some()
    }

    /// Closes the passed files that are not in use.
    pub fn forget(&self) {
        self.in_handed(|handed| *handed = Handed::default());
        *self.taken() = None;
    }

    /// Makes files taken over from another process available until [`Files::forget`].
    pub fn make_available(&self, files: Handed) {
        match self.are_handed() {
            true => drop(self.in_handed(|handed| *handed = files)),
            false => *self.taken() = Some(files),
        }
    }

    /// Makes files available for a while, in place of any others. Without `--handed` there are none.
    pub fn at_hand(&self, files: Handed) -> AtHand {
        self.in_handed(|handed| *handed = files);
        AtHand(self.clone())
    }

    fn taken(&self) -> MutexGuard<'_, Option<Handed>> {
        self.source.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accesses the passed files, if there are any. `look` must not block, because other threads need them too.
    fn in_handed<T>(&self, look: impl FnOnce(&mut Handed) -> T) -> Option<T> {
        // A thread that panicked while holding the lock has left the value consistent: each change is a single step.
        self.source.handed.as_ref().map(|handed| look(&mut handed.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Returns the file passed for writing whose path ends in this name.
    pub fn handed_as(&self, name: &str) -> Option<io::Result<File>> {
        let find = |handed: &mut Handed| handed.named(name);
        self.in_handed(find).unwrap_or_else(|| self.taken().as_mut().and_then(find))
    }

    /// Closes the file passed for writing at this path, which releases its lock.
    pub fn close_writable(&self, path: &Path) {
        self.in_handed(|handed| handed.files.retain(|file| file.path != path || !file.write));
    }

    /// Opens an image file.
    pub fn open(&self, path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let found = self.taken().as_ref().map(|taken| taken.duplicate(path, options.write));
        let file = match found.or_else(|| self.in_handed(|handed| handed.duplicate(path, options.write))) {
            None => ImageFile::open(path, options),
            Some(found) => ImageFile::from_fd(found?, path, options),
        }?;
        if options.write { self.end_recording(file) } else { Ok(file) }
    }

    /// Declares that this process records the changes of the image at `path` in a map: it stays marked.
    pub fn record(&self, path: &Path) {
        *self.recorded() = Some(Recorded { path: path.to_owned(), opened: None });
    }

    /// Returns the state of the file of the recorded image when it was opened for writing.
    pub fn state_when_opened(&self) -> Option<FileState> {
        self.recorded().as_ref().and_then(|recorded| recorded.opened)
    }

    fn recorded(&self) -> MutexGuard<'_, Option<Recorded>> {
        self.source.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the mark of an image that was opened for writing, unless its changes are recorded: a map of its changed
    /// blocks would miss what is written from now on.
    fn end_recording(&self, file: ImageFile) -> Result<ImageFile, FileOpenError> {
        // A process that works on passed files leaves marks to the sender: it may be another user than the owner, and
        // see none (docs/decisions/0065).
        if file.remote().is_some() || file.device_len().is_some() || self.are_handed() {
            return Ok(file);
        }
        let path = file.path();
        if let Some(recorded) = self.recorded().as_mut().filter(|recorded| recorded.path == path) {
            recorded.opened = Some(mark::state(&file).map_err(|source| failed("examine", path, source))?);
            return Ok(file);
        }
        match mark::end(&file) {
            Ok(None) => {}
            Ok(Some(map)) => say(format_args!(
                "{} is opened for writing without recording what changes in it: as the map of this image, the map of \
                 changed blocks {map} is void, and will be refused",
                path.display()
            )),
            Err(source) => return Err(failed("end the tracking of changed blocks of", path, source)),
        }
        Ok(file)
    }

    /// Opens the file of an image, and its data file if it has one.
    pub fn open_image(&self, name: &ImageName, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let file = self.open(name.path(), options)?;
        match &name.data_file {
            Some(data) => Ok(file.with_data_file(self.open(data, options)?)),
            None => Ok(file),
        }
    }

    /// Opens a file that is open for reading again for writing, and its data file too.
    pub fn reopen_writable(&self, file: &ImageFile) -> Result<ImageFile, FileOpenError> {
        let image = self.reopen_one_writable(file)?;
        let Some(data) = file.data_file() else { return Ok(image) };
        match self.reopen_one_writable(data) {
            Ok(data) => Ok(image.with_data_file(data)),
            Err(refused) => {
                image.return_lock(file)?;
                Err(refused)
            }
        }
    }

    fn reopen_one_writable(&self, file: &ImageFile) -> Result<ImageFile, FileOpenError> {
        let file = match self.in_handed(|handed| handed.swap(file, true)) {
            None => file.reopen_writable(),
            Some(found) => file.reopen_writable_as(found?),
        };
        self.end_recording(file?)
    }

    /// Fails if a file that a verb will need at its end was not passed, or was passed for another use. Without
    /// `--handed` it always succeeds.
    pub fn must_have(&self, path: &Path, write: bool) -> Result<(), FileOpenError> {
        self.in_handed(|handed| handed.has(path, write)).unwrap_or(Ok(()))
    }

    /// Opens a file that is open for writing again for reading only, and its data file too.
    pub fn reopen_read_only(&self, file: &ImageFile) -> Result<ImageFile, FileOpenError> {
        let image = self.reopen_one_read_only(file)?;
        match file.data_file() {
            Some(data) => Ok(image.with_data_file(self.reopen_one_read_only(data)?)),
            None => Ok(image),
        }
    }

    fn reopen_one_read_only(&self, file: &ImageFile) -> Result<ImageFile, FileOpenError> {
        match self.in_handed(|handed| handed.swap(file, false)) {
            None => file.reopen_read_only(),
            Some(found) => file.reopen_read_only_as(found?),
        }
    }

    /// Creates a new file. A passed file has already been created by the caller: it must be empty.
    pub fn create_new(&self, path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        if !self.are_handed() {
            return ImageFile::create_new(path, options);
        }
        let file = self.open(path, OpenOptions { write: true, ..options })?;
        match file.metadata().map_err(|source| failed("examine", path, source))?.len() {
            0 if file.device_len().is_none() => Ok(file),
            _ => Err(FileOpenError::Exists { path: path.to_owned() }),
        }
    }

    /// Returns whether the path for a new file is in use. A passed file exists already; it must be empty.
    pub fn is_taken(&self, path: &Path) -> bool {
        !self.are_handed() && path.symlink_metadata().is_ok()
    }

    /// Returns the path where a new file for `path` is created: a temporary one next to it. A passed file is already in
    /// place.
    pub fn temporary_path(&self, path: &Path) -> Result<PathBuf, Failure> {
        if self.are_handed() { Ok(path.to_owned()) } else { next_to(path) }
    }

    /// Gives a new file its final name, which must not exist. A passed file has had it from the start.
    pub fn name_new(&self, from: &Path, to: &Path) -> Result<(), FileOpenError> {
        if !self.are_handed() {
            let renamed = match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
                // Some file systems, such as those of other hosts, do not support it.
                Err(Errno::INVAL) => name_by_link(from, to),
                renamed => renamed.map_err(io::Error::from),
            };
            renamed.map_err(|error| failed("create", to, error))?;
        }
        Ok(())
    }

    /// Removes a new file that is not needed. If it was passed, the caller must remove it.
    pub fn remove_new(&self, path: &Path) -> io::Result<()> {
        if self.are_handed() { Ok(()) } else { std::fs::remove_file(path) }
    }

    /// Describes what happened to a new file that is not needed, for people.
    pub fn removal_note(&self) -> &'static str {
        match self.are_handed() {
            true => "caller must remove it",
            false => "the unfinished file has been removed",
        }
    }

    /// Makes the directory entry of `path` durable. The sender of a new file has already done so.
    pub fn sync_directory(&self, path: &Path) -> Result<(), FileOpenError> {
        if self.are_handed() { Ok(()) } else { uring::sync_directory(path) }
    }

    /// Returns the metadata of the file at `path`.
    pub fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        match self.in_handed(|handed| handed.duplicate(path, false)) {
            None => std::fs::metadata(path),
            Some(found) => File::from(found.map_err(|why| io::Error::new(io::ErrorKind::NotFound, why))?).metadata(),
        }
    }

    /// Sets a file's modification time, durably.
    pub fn set_modified(&self, path: &Path, modified: SystemTime) -> io::Result<()> {
        let file = match self.in_handed(|handed| handed.duplicate(path, true)) {
            None => File::open(path)?,
            Some(found) => File::from(found.map_err(io::Error::other)?),
        };
        file.set_modified(modified).and(file.sync_all())
    }

    /// Returns the absolute path without symbolic links. A passed file keeps the path that its sender gives it.
    pub fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        if self.are_handed() { Ok(path.to_owned()) } else { path.canonicalize() }
    }

    /// Creates a small unnamed file in the directory of `path`, to test features of the file system; returns `None` if
    /// files are passed.
    pub fn sample(&self, path: &Path) -> io::Result<Option<File>> {
        if self.are_handed() {
            return Ok(None);
        }
        let directory = path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?);
        file.set_len(4096)?;
        Ok(Some(file))
    }

    /// Rejects passed sockets that nothing will listen on: clients would wait there forever.
    pub fn reject_unused_listeners(&self) -> Result<(), Failure> {
        match self.in_handed(|handed| handed.listeners.pop()).flatten() {
            None => Ok(()),
            Some((listens, path, _)) => {
                let tried = format!("listen at {} for {listens:?}", path.display());
                let why = "it was passed to this process, but the command line does not mention it";
                Err(Failure::new(tried, why).of_kind(Kind::Invalid))
            }
        }
    }

    /// Returns a passed descriptor for Xen, or an error if files are passed without it; `None` if the caller should
    /// open it itself.
    pub fn lent(&self, lent: Lent) -> Result<Option<OwnedFd>, Failure> {
        match self.in_handed(|handed| handed.take_lent(lent)) {
            None => Ok(None),
            Some(Some(descriptor)) => Ok(Some(descriptor)),
            Some(None) => {
                let why = format!("{lent:?} was not passed to this process");
                Err(Failure::new("serve a guest of Xen", why).of_kind(Kind::Invalid))
            }
        }
    }

    /// Returns a passed descriptor for Xen that is optional.
    pub fn lent_optional(&self, lent: Lent) -> Option<OwnedFd> {
        self.in_handed(|handed| handed.take_lent(lent)).flatten()
    }

    /// Returns the socket that was passed for `path`; `None` if the caller should bind it itself.
    pub fn listener(&self, listens: Listens, path: &Path) -> Result<Option<OwnedFd>, Failure> {
        match self.in_handed(|handed| handed.take_listener(listens, path)) {
            None => Ok(None),
            Some(Some(socket)) => Ok(Some(socket)),
            Some(None) => {
                let tried = format!("listen at {}", path.display());
                Err(Failure::new(tried, "that socket was not passed to this process").of_kind(Kind::Invalid))
            }
        }
    }
}

impl Handed {
    /// Adds a file: at most one for reading and one for writing per path.
    pub fn add(&mut self, file: HandedFile) -> Result<(), String> {
        if self.file(&file.path, file.write).is_some() {
            return Err(twice(format_args!("{} for {}", file.path.display(), use_of(file.write))));
        }
        self.files.push(file);
        Ok(())
    }

    /// Returns the file for writing whose path ends in this name.
    pub fn named(&self, name: &str) -> Option<io::Result<File>> {
        let named = |file: &&HandedFile| file.write && file.path.file_name().is_some_and(|found| found == name);
        let found = self.files.iter().find(named)?;
        Some(found.descriptor.try_clone().map(File::from))
    }

    /// Returns whether there are no files.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Adds a socket: at most one for each use.
    pub fn add_listener(&mut self, listens: Listens, path: PathBuf, socket: OwnedFd) -> Result<(), String> {
        if self.listeners.iter().any(|(other, ..)| *other == listens) {
            return Err(twice(format_args!("a socket for {listens:?}")));
        }
        self.listeners.push((listens, path, socket));
        Ok(())
    }

    /// Adds a descriptor for Xen: at most one of each kind.
    pub fn add_lent(&mut self, lent: Lent, descriptor: OwnedFd) -> Result<(), String> {
        if self.lent.iter().any(|(other, _)| *other == lent) {
            return Err(twice(format_args!("{lent:?}")));
        }
        self.lent.push((lent, descriptor));
        Ok(())
    }

    fn take_lent(&mut self, lent: Lent) -> Option<OwnedFd> {
        let place = self.lent.iter().position(|(other, _)| *other == lent)?;
        Some(self.lent.swap_remove(place).1)
    }

    fn take_listener(&mut self, listens: Listens, path: &Path) -> Option<OwnedFd> {
        let place = self.listeners.iter().position(|(other, name, _)| *other == listens && name == path)?;
        Some(self.listeners.swap_remove(place).2)
    }

    fn file(&self, path: &Path, write: bool) -> Option<&HandedFile> {
        self.files.iter().find(|file| file.path == path && file.write == write)
    }

    /// Duplicates the descriptor of a file. One for writing also serves for reading.
    fn duplicate(&self, path: &Path, write: bool) -> Result<OwnedFd, FileOpenError> {
        let file = self.file(path, write).or_else(|| self.file(path, true));
        let file = file.ok_or_else(|| FileOpenError::NotHanded { path: path.to_owned(), wanted: use_of(write) })?;
        file.descriptor.try_clone().map_err(|source| failed("duplicate the descriptor of", path, source))
    }

    fn has(&self, path: &Path, write: bool) -> Result<(), FileOpenError> {
        let missing = || FileOpenError::NotHanded { path: path.to_owned(), wanted: use_of(write) };
        self.file(path, write).map(|_| ()).ok_or_else(missing)
    }

    /// Exchanges the open description of a file for the passed one with the other access mode, for a later change back.
    fn swap(&mut self, open: &ImageFile, write: bool) -> Result<OwnedFd, FileOpenError> {
        let path = open.path();
        let present = open.try_clone_fd()?;
        let missing = || FileOpenError::NotHanded { path: path.to_owned(), wanted: use_of(write) };
        let place = self.files.iter_mut().find(|file| file.path == path && file.write == write).ok_or_else(missing)?;
        place.write = open.options().write;
        Ok(std::mem::replace(&mut place.descriptor, present))
    }
}

fn use_of(write: bool) -> AccessMode {
    if write { AccessMode::Writing } else { AccessMode::Reading }
}

fn failed(tried: &'static str, path: &Path, source: io::Error) -> FileOpenError {
    FileOpenError::Failed { tried, path: path.to_owned(), source }
}

/// Returns the temporary path of the image that will be `path`: in the same directory, and thus file system. The name
/// is reserved for us: an unused file there was left by a killed job, and is removed.
pub fn next_to(path: &Path) -> Result<PathBuf, Failure> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tapline-new");
    let temporary = PathBuf::from(name);
    if temporary.symlink_metadata().is_ok_and(|found| found.is_file()) {
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let _locked = ImageFile::open(&temporary, options).map_err(Failure::said)?;
        let tried = || format!("remove {}, left behind by a killed job", temporary.display());
        std::fs::remove_file(&temporary).map_err(|error| Failure::new(tried(), error))?;
    }
    Ok(temporary)
}

/// Renames a file by a second hard link; fails if the new name exists. A kill may leave both names.
fn name_by_link(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::hard_link(from, to).and_then(|()| std::fs::remove_file(from))
}

/// Returns what the unused end of a file reads as: in a file system zeroes, on a block device its old contents.
pub fn tail(file: &ImageFile) -> Tail {
    if file.device_len().is_some() { Tail::Stale } else { Tail::Zeroes }
}

/// Makes the message about something passed twice.
pub fn twice(what: impl Display) -> String {
    format!("{what} was passed twice")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn renaming_by_link_never_replaces_a_file() {
        let room = tempfile::tempdir().unwrap();
        let [new, named] = ["new", "named"].map(|name| room.path().join(name));
        std::fs::write(&new, "a").unwrap();
        name_by_link(&new, &named).unwrap();
        assert!(!new.exists() && std::fs::read(&named).unwrap() == b"a");
        std::fs::write(&new, "b").unwrap();
        assert_eq!(name_by_link(&new, &named).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(new.exists() && std::fs::read(&named).unwrap() == b"a");
    }
}
