//! Where files and listening sockets come from: the file system, or what this process was handed.
//!
//! A process has one file system, and with `--handed` this stands in its place: hence one for the process. It knows nothing
//! about images. Invariant: once something was handed, no path is opened, created, renamed, removed or looked up: a name
//! stands for the descriptor that came with it, or for nothing.
//!
//! What was handed stays at hand until [`forget`]: a file may be opened more than once, each time by the same description,
//! with one lock. A served disk forgets when it has opened its files, and after each verb ([`AtHand`]), so that a
//! description lives, and keeps its lock, just as long as it is used.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use uring::{AccessMode, FileOpenError, ImageFile, OpenOptions};

use crate::failure::{Exit, Failure};
use crate::handed::{Lent, Listens, twice};
use crate::image_name::ImageName;

/// What was handed, if anything ever was.
static HANDED: OnceLock<Mutex<Files>> = OnceLock::new();

/// What a process has taken over that has the file system as well.
static TAKEN: Mutex<Option<Files>> = Mutex::new(None);

/// Files and listening sockets by the names that others have for them.
#[derive(Debug, Default)]
pub struct Files {
    files: Vec<HandedFile>,
    listeners: Vec<(Listens, PathBuf, OwnedFd)>,
    lent: Vec<(Lent, OwnedFd)>,
}

/// A file that was handed over.
#[derive(Debug)]
pub struct HandedFile {
    /// Its name.
    pub path: PathBuf,
    /// Whether it is open for writing too.
    pub write: bool,
    /// The file.
    pub descriptor: OwnedFd,
}

/// Files that came for one verb, at hand as long as this is.
#[derive(Debug, Default)]
pub struct AtHand(());

/// From now on there is nothing but this.
pub fn replace_file_system(files: Files) -> Result<(), Failure> {
    let refused = |_| Failure::new("take over what was handed", "there was something before");
    HANDED.set(Mutex::new(files)).map_err(refused)
}

/// Whether this process works on what it is handed.
pub fn are_handed() -> bool {
    HANDED.get().is_some()
}

/// Closes what was handed and is not in use.
pub fn forget() {
    in_handed(|handed| *handed = Files::default());
    *taken() = None;
}

/// Has files at hand that were taken over from another process, until [`forget`].
pub fn have_at_hand(files: Files) {
    match are_handed() {
        true => drop(in_handed(|handed| *handed = files)),
        false => *taken() = Some(files),
    }
}

fn taken() -> MutexGuard<'static, Option<Files>> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks into what was handed, if files are. Not for what may wait: others look too.
fn in_handed<T>(look: impl FnOnce(&mut Files) -> T) -> Option<T> {
    // Whoever has panicked with it has left it whole: it is changed by single steps.
    HANDED.get().map(|handed| look(&mut handed.lock().unwrap_or_else(PoisonError::into_inner)))
}

impl AtHand {
    /// Has files at hand for a while, beside nothing else. Without `--handed` there are none to have.
    pub fn these(files: Files) -> AtHand {
        in_handed(|handed| *handed = files);
        AtHand(())
    }
}

impl Drop for AtHand {
    fn drop(&mut self) {
        forget();
    }
}

impl Files {
    /// Adds a file, which may be there once for reading and once for writing.
    pub fn add(&mut self, file: HandedFile) -> Result<(), String> {
        if self.file(&file.path, file.write).is_some() {
            return Err(twice(format_args!("{} for {}", file.path.display(), use_of(file.write))));
        }
        self.files.push(file);
        Ok(())
    }

    /// Whether there is no file.
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

/// What was handed for writing under a path that ends in this name.
pub fn handed_as(name: &str) -> Option<io::Result<File>> {
    let found = in_handed(|handed| {
        let named = |file: &&HandedFile| file.write && file.path.file_name().is_some_and(|found| found == name);
        handed.files.iter().find(named).map(|file| file.descriptor.try_clone())
    });
    found.flatten().map(|descriptor| descriptor.map(File::from))
}

/// Closes what was handed for writing to this path, and with it its lock.
pub fn close_writable(path: &Path) {
    in_handed(|handed| handed.files.retain(|file| file.path != path || !file.write));
}

/// Opens an image file.
pub fn open(path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
    let found = taken().as_ref().map(|taken| taken.duplicate(path, options.write));
    match found.or_else(|| in_handed(|handed| handed.duplicate(path, options.write))) {
        None => ImageFile::open(path, options),
        Some(found) => ImageFile::from_fd(found?, path, options),
    }
}

/// Opens the file of an image, and its data file if one is named.
pub fn open_image(name: &ImageName, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
    let file = open(name.path(), options)?;
    match &name.data_file {
        Some(data) => Ok(file.with_data_file(open(data, options)?)),
        None => Ok(file),
    }
}

/// Opens a file again that is open for reading, for writing; and its data file.
pub fn reopen_writable(file: &ImageFile) -> Result<ImageFile, FileOpenError> {
    let image = reopen_one_writable(file)?;
    let Some(data) = file.data_file() else { return Ok(image) };
    match reopen_one_writable(data) {
        Ok(data) => Ok(image.with_data_file(data)),
        Err(refused) => {
            image.return_lock(file)?;
            Err(refused)
        }
    }
}

fn reopen_one_writable(file: &ImageFile) -> Result<ImageFile, FileOpenError> {
    match in_handed(|handed| handed.swap(file, true)) {
        None => file.reopen_writable(),
        Some(found) => file.reopen_writable_as(found?),
    }
}

/// Refuses what a verb will need at its end, before it begins: a file that is open, for another use. The file system has
/// it, whatever it is.
pub fn must_have(path: &Path, write: bool) -> Result<(), FileOpenError> {
    in_handed(|handed| handed.has(path, write)).unwrap_or(Ok(()))
}

/// Opens a file again that is open for writing, for reading only; and its data file.
pub fn reopen_read_only(file: &ImageFile) -> Result<ImageFile, FileOpenError> {
    let image = reopen_one_read_only(file)?;
    match file.data_file() {
        Some(data) => Ok(image.with_data_file(reopen_one_read_only(data)?)),
        None => Ok(image),
    }
}

fn reopen_one_read_only(file: &ImageFile) -> Result<ImageFile, FileOpenError> {
    match in_handed(|handed| handed.swap(file, false)) {
        None => file.reopen_read_only(),
        Some(found) => file.reopen_read_only_as(found?),
    }
}

/// Creates a file where nothing is. Where files are handed, whoever hands it has created it: it is empty.
pub fn create_new(path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
    if !are_handed() {
        return ImageFile::create_new(path, options);
    }
    let file = open(path, OpenOptions { write: true, ..options })?;
    match file.metadata().map_err(|source| failed("examine", path, source))?.len() {
        0 if file.device_len().is_none() => Ok(file),
        _ => Err(FileOpenError::Exists { path: path.to_owned() }),
    }
}

/// Whether a name is taken that a new file is to get. A file that is handed is there already, and is to be empty.
pub fn is_taken(path: &Path) -> bool {
    !are_handed() && path.symlink_metadata().is_ok()
}

/// Where a new file is made that will be `path`: beside it, until it is whole. One that is handed has its place.
pub fn unnamed(path: &Path) -> Result<PathBuf, Failure> {
    if are_handed() { Ok(path.to_owned()) } else { crate::target::beside(path) }
}

/// Gives a new file its name, which nobody else may have. One that is handed has had it from the beginning.
pub fn name_new(from: &Path, to: &Path) -> Result<(), FileOpenError> {
    if !are_handed() {
        let renamed = rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE);
        renamed.map_err(|errno| failed("create", to, errno.into()))?;
    }
    Ok(())
}

/// Removes a file that was made in vain. One that was handed is left to whoever has handed it.
pub fn remove_new(path: &Path) -> io::Result<()> {
    if are_handed() { Ok(()) } else { std::fs::remove_file(path) }
}

/// What has become of a file that was made in vain, for people.
pub fn what_is_left() -> &'static str {
    match are_handed() {
        true => "the unfinished file is left to who has handed it",
        false => "the unfinished file has been removed",
    }
}

/// Makes durable that `path` exists. Whoever hands a new file has done so before.
pub fn sync_directory(path: &Path) -> Result<(), FileOpenError> {
    if are_handed() { Ok(()) } else { uring::sync_directory(path) }
}

/// What is known of the file that `path` leads to.
pub fn metadata(path: &Path) -> io::Result<Metadata> {
    match in_handed(|handed| handed.duplicate(path, false)) {
        None => std::fs::metadata(path),
        Some(found) => File::from(found.map_err(|why| io::Error::new(io::ErrorKind::NotFound, why))?).metadata(),
    }
}

/// Has a file look as if it were last changed at that time, durably.
pub fn set_modified(path: &Path, modified: SystemTime) -> io::Result<()> {
    let file = match in_handed(|handed| handed.duplicate(path, true)) {
        None => File::open(path)?,
        Some(found) => File::from(found.map_err(io::Error::other)?),
    };
    file.set_modified(modified).and(file.sync_all())
}

/// Where a name leads, as seen from the root. The name of a file that was handed is what others call it, links and all.
pub fn whole(path: &Path) -> io::Result<PathBuf> {
    if are_handed() { Ok(path.to_owned()) } else { path.canonicalize() }
}

/// A small file without a name where `path` is, to try out what the file system can do. Nothing can be made where files
/// are handed.
pub fn sample(path: &Path) -> io::Result<Option<File>> {
    if are_handed() {
        return Ok(None);
    }
    let directory = path.parent().unwrap_or(Path::new("/"));
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?);
    file.set_len(4096)?;
    Ok(Some(file))
}

/// Refuses sockets that were handed and that nobody listens at: who connects there would wait for ever.
pub fn no_listener_left() -> Result<(), Failure> {
    match in_handed(|handed| handed.listeners.pop()).flatten() {
        None => Ok(()),
        Some((listens, path, _)) => {
            let tried = format!("listen at {} for {listens:?}", path.display());
            let why = "it was handed to this process, and the command line does not name it";
            Err(Failure::new(tried, why).exit_as(Exit::Usage))
        }
    }
}

/// What is lent of Xen, which would be opened otherwise.
pub fn lent(lent: Lent) -> Result<Option<OwnedFd>, Failure> {
    match in_handed(|handed| handed.take_lent(lent)) {
        None => Ok(None),
        Some(Some(descriptor)) => Ok(Some(descriptor)),
        Some(None) => {
            let why = format!("{lent:?} was not handed to this process");
            Err(Failure::new("serve a guest of Xen", why).exit_as(Exit::Usage))
        }
    }
}

/// What is lent of Xen and can be done without.
pub fn lent_perhaps(lent: Lent) -> Option<OwnedFd> {
    in_handed(|handed| handed.take_lent(lent)).flatten()
}

/// The socket that was handed for `path`, which would be bound otherwise.
pub fn listener(listens: Listens, path: &Path) -> Result<Option<OwnedFd>, Failure> {
    match in_handed(|handed| handed.take_listener(listens, path)) {
        None => Ok(None),
        Some(Some(socket)) => Ok(Some(socket)),
        Some(None) => {
            let tried = format!("listen at {}", path.display());
            Err(Failure::new(tried, "that socket was not handed to this process").exit_as(Exit::Usage))
        }
    }
}
