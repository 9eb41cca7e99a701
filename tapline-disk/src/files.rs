//! The source of files and listening sockets: the file system, or the descriptors passed to this process.
//!
//! A command has one, made of its command line, for all that it opens, creates, removes and syncs. It knows nothing
//! about images. Invariant: with `--handed` no path is opened, created, renamed, removed or looked up: a name stands
//! for the descriptor that came with it, or for nothing.
//!
//! Passed files stay available until [`Files::forget`]: a file may be opened several times, each time with the same
//! open file description and its single lock. A served disk forgets them after opening its files, and after each verb
//! ([`AtHand`]), so that a description exists, and keeps its lock, exactly as long as it is used.

pub mod access;
pub mod identity;
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
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use uring::{AccessMode, Cache, FileOpenError, ImageFile, OpenOptions};

use crate::process::failure::Failure;

/// Where a command's files come from. Clones are of the same source.
#[derive(Clone, Debug)]
pub struct Files {
    source: Arc<Source>,
    trust: Trust,
}

#[derive(Debug)]
struct Source {
    /// The passed files, if there is nothing else.
    handed: Option<Mutex<Handed>>,
    /// Files taken over from another process by a process that also uses the file system.
    taken: Mutex<Option<Handed>>,
}

/// Which raw images are what they are called ([`crate::image::raw_lookalike`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    /// All of them: the user is sure (`--really-raw`).
    All,
    /// Those whose files were handed over.
    Handed,
    /// None.
    Nothing,
}

/// Files and listening sockets by the names that others have for them.
#[derive(Debug, Default)]
pub struct Handed {
    files: Vec<HandedFile>,
    listeners: Vec<(Listens, PathBuf, OwnedFd)>,
    lent: Vec<(Lent, OwnedFd)>,
}

/// A file that was handed over.
#[derive(Debug)]
pub struct HandedFile {
    /// The file's path.
    pub path: PathBuf,
    /// Whether it is also open for writing.
    pub write: bool,
    /// The file.
    pub descriptor: OwnedFd,
}

/// Files that came for one verb, at hand as long as this is.
#[derive(Debug)]
pub struct AtHand(Files);

impl Drop for AtHand {
    fn drop(&mut self) {
        self.0.forget();
    }
}

impl Files {
    /// The file system.
    pub fn of_system() -> Files {
        Files::of(None)
    }

    /// Nothing but these.
    pub fn handed(handed: Handed) -> Files {
        Files::of(Some(Mutex::new(handed)))
    }

    fn of(handed: Option<Mutex<Handed>>) -> Files {
        Files { source: Arc::new(Source { handed, taken: Mutex::default() }), trust: Trust::Handed }
    }

    /// The same, whose raw images are all what they are called.
    pub fn trusting(self) -> Files {
        Files { trust: Trust::All, ..self }
    }

    /// The same, whose raw images are not trusted because they were handed over.
    pub fn suspicious(&self) -> Files {
        let trust = if self.trust == Trust::All { Trust::All } else { Trust::Nothing };
        Files { trust, ..self.clone() }
    }

    /// Whether raw images are what they are called.
    pub fn are_trusted(&self) -> bool {
        match self.trust {
            Trust::All => true,
            Trust::Handed => self.are_handed(),
            Trust::Nothing => false,
        }
    }

    /// Whether this process works on passed files.
    pub fn are_handed(&self) -> bool {
        self.source.handed.is_some()
    }

    /// Closes what was handed and is not in use.
    pub fn forget(&self) {
        self.in_handed(|handed| *handed = Handed::default());
        *self.taken() = None;
    }

    /// Makes files taken over from another process available until [`Files::forget`].
    pub fn have_at_hand(&self, files: Handed) {
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

    /// Accesses the passed files, if there are any. Must not block, because others need them too.
    fn in_handed<T>(&self, look: impl FnOnce(&mut Handed) -> T) -> Option<T> {
        // A thread that panicked while it held the lock has left it whole: it is changed by single steps.
        self.source.handed.as_ref().map(|handed| look(&mut handed.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// The file passed for writing under a path that ends in this name.
    pub fn handed_as(&self, name: &str) -> Option<io::Result<File>> {
        let find = |handed: &mut Handed| handed.named(name);
        self.in_handed(find).unwrap_or_else(|| self.taken().as_mut().and_then(find))
    }

    /// Closes what was handed for writing to this path, and with it its lock.
    pub fn close_writable(&self, path: &Path) {
        self.in_handed(|handed| handed.files.retain(|file| file.path != path || !file.write));
    }

    /// Opens an image file.
    pub fn open(&self, path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let found = self.taken().as_ref().map(|taken| taken.duplicate(path, options.write));
        match found.or_else(|| self.in_handed(|handed| handed.duplicate(path, options.write))) {
            None => ImageFile::open(path, options),
            Some(found) => ImageFile::from_fd(found?, path, options),
        }
    }

    /// Opens the file of an image, and its data file if one is named.
    pub fn open_image(&self, name: &ImageName, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let file = self.open(name.path(), options)?;
        match &name.data_file {
            Some(data) => Ok(file.with_data_file(self.open(data, options)?)),
            None => Ok(file),
        }
    }

    /// Opens a file again that is open for reading, for writing; and its data file.
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
        match self.in_handed(|handed| handed.swap(file, true)) {
            None => file.reopen_writable(),
            Some(found) => file.reopen_writable_as(found?),
        }
    }

    /// Rejects a verb in advance if a file that it will need at its end was not passed, or was passed for another use.
    /// Without `--handed` the file system is assumed to have it.
    pub fn must_have(&self, path: &Path, write: bool) -> Result<(), FileOpenError> {
        self.in_handed(|handed| handed.has(path, write)).unwrap_or(Ok(()))
    }

    /// Opens a file again that is open for writing, for reading only; and its data file.
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

    /// Whether the name for a new file is taken. A passed file already exists, and must be empty.
    pub fn is_taken(&self, path: &Path) -> bool {
        !self.are_handed() && path.symlink_metadata().is_ok()
    }

    /// Where a new file for `path` is created: next to it, until it is complete. A passed file is already in place.
    pub fn unnamed(&self, path: &Path) -> Result<PathBuf, Failure> {
        if self.are_handed() { Ok(path.to_owned()) } else { beside(path) }
    }

    /// Gives a new file its final name, which must not exist. A passed file has had it from the start.
    pub fn name_new(&self, from: &Path, to: &Path) -> Result<(), FileOpenError> {
        if !self.are_handed() {
            let renamed = match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
                // File systems of other hosts do not know it.
                Err(Errno::INVAL) => name_by_link(from, to),
                renamed => renamed.map_err(io::Error::from),
            };
            renamed.map_err(|error| failed("create", to, error))?;
        }
        Ok(())
    }

    /// Removes a new file that is not needed. A passed file must be removed by the caller.
    pub fn remove_new(&self, path: &Path) -> io::Result<()> {
        if self.are_handed() { Ok(()) } else { std::fs::remove_file(path) }
    }

    /// What happened to a new file that is not needed, for people.
    pub fn what_is_left(&self) -> &'static str {
        match self.are_handed() {
            true => "caller must remove it",
            false => "the unfinished file has been removed",
        }
    }

    /// Makes durable that `path` exists. Whoever hands a new file has done so before.
    pub fn sync_directory(&self, path: &Path) -> Result<(), FileOpenError> {
        if self.are_handed() { Ok(()) } else { uring::sync_directory(path) }
    }

    /// The metadata of the file at `path`.
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

    /// Where a name leads, as seen from the root. The name of a file that was handed is what others call it, links and
    /// all.
    pub fn whole(&self, path: &Path) -> io::Result<PathBuf> {
        if self.are_handed() { Ok(path.to_owned()) } else { path.canonicalize() }
    }

    /// A small unnamed file in the directory of `path`, to test features of the file system. Nothing can be created
    /// with passed files.
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
    pub fn no_listener_left(&self) -> Result<(), Failure> {
        match self.in_handed(|handed| handed.listeners.pop()).flatten() {
            None => Ok(()),
            Some((listens, path, _)) => {
                let tried = format!("listen at {} for {listens:?}", path.display());
                let why = "it was passed to this process, but the command line does not mention it";
                Err(Failure::new(tried, why).of_kind(Kind::Invalid))
            }
        }
    }

    /// A passed descriptor for Xen, or an error if files are passed without it; `None` if the caller should open it
    /// itself.
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

    /// A passed descriptor for Xen that is optional.
    pub fn lent_perhaps(&self, lent: Lent) -> Option<OwnedFd> {
        self.in_handed(|handed| handed.take_lent(lent)).flatten()
    }

    /// The socket that was handed for `path`, which would be bound otherwise.
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
    /// Adds a file, which may be there once for reading and once for writing.
    pub fn add(&mut self, file: HandedFile) -> Result<(), String> {
        if self.file(&file.path, file.write).is_some() {
            return Err(twice(format_args!("{} for {}", file.path.display(), use_of(file.write))));
        }
        self.files.push(file);
        Ok(())
    }

    /// The file for writing under a path that ends in this name.
    pub fn named(&self, name: &str) -> Option<io::Result<File>> {
        let named = |file: &&HandedFile| file.write && file.path.file_name().is_some_and(|found| found == name);
        let found = self.files.iter().find(named)?;
        Some(found.descriptor.try_clone().map(File::from))
    }

    /// Whether there are no files.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Adds a socket, one for each use.
    pub fn add_listener(&mut self, listens: Listens, path: PathBuf, socket: OwnedFd) -> Result<(), String> {
        if self.listeners.iter().any(|(other, ..)| *other == listens) {
            return Err(twice(format_args!("a socket for {listens:?}")));
        }
        self.listeners.push((listens, path, socket));
        Ok(())
    }

    /// Adds what is lent of Xen, each once.
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

    /// A second descriptor of a file. What may be written may be read as well.
    fn duplicate(&self, path: &Path, write: bool) -> Result<OwnedFd, FileOpenError> {
        let file = self.file(path, write).or_else(|| self.file(path, true));
        let file = file.ok_or_else(|| FileOpenError::NotHanded { path: path.to_owned(), wanted: use_of(write) })?;
        file.descriptor.try_clone().map_err(|source| failed("duplicate the descriptor of", path, source))
    }

    fn has(&self, path: &Path, write: bool) -> Result<(), FileOpenError> {
        let missing = || FileOpenError::NotHanded { path: path.to_owned(), wanted: use_of(write) };
        self.file(path, write).map(|_| ()).ok_or_else(missing)
    }

    /// The description of a file for that use; its present one takes its place, for the way back.
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

/// The temporary path of the image that will be `path`: in the same directory, and thus file system. The name is
/// reserved for us: an unused file there was left by a killed job, and is removed.
pub fn beside(path: &Path) -> Result<PathBuf, Failure> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tapline-new");
    let beside = PathBuf::from(name);
    if beside.symlink_metadata().is_ok_and(|found| found.is_file()) {
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let _locked = ImageFile::open(&beside, options).map_err(Failure::said)?;
        let tried = || format!("remove {}, left behind by a killed job", beside.display());
        std::fs::remove_file(&beside).map_err(|error| Failure::new(tried(), error))?;
    }
    Ok(beside)
}

/// Gives a file another name, which must not exist, by way of two names: a kill leaves both.
fn name_by_link(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::hard_link(from, to).and_then(|()| std::fs::remove_file(from))
}

/// What the unused end of a file reads as: a file system returns zeroes where nothing was written; a block device its
/// old contents.
pub fn tail(file: &ImageFile) -> Tail {
    if file.device_len().is_some() { Tail::Stale } else { Tail::Zeroes }
}

/// The message about something passed twice.
pub fn twice(what: impl Display) -> String {
    format!("{what} was passed twice")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_file_is_named_by_a_link_where_no_other_has_the_name() {
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
