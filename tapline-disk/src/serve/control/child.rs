//! A new file for a disk that keeps running: an empty child of a layer, or a copy. Runs on a separate thread.
//!
//! The file is created under a temporary name, synced, renamed, and its directory synced; each of these is a step of a
//! plan. So it exists completely or not at all, and never replaces another file.
//!
//! With `--handed` the sender has created it empty and durably under its final name: it is filled in place, and the
//! sectors that identify it as an image are written when all others are durable ([`crate::image::create`]). *If killed
//! before that:* the file does not open as an image. *After:* it is complete, and empty on top of its parent. If this
//! is refused, the file is left as it is.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control::{FormatName, ImageName, Kind};
use disk::qcow2::Compression;
use disk::{Format, Image, RedoLog};
use uring::{Cache, ImageFile, OpenOptions};

use super::work::Work;
use crate::files::Files;
use crate::image::chain::open_image;
use crate::image::create::{self, Allocation, Plan, unit_of};
use crate::image::parent_link;
use crate::image::redo_log;
use crate::process::failure::Failure;
use crate::process::log::say;

/// A child to be created.
#[derive(Clone, Debug)]
pub struct NewChild {
    files: Files,
    name: ImageName,
    plan: Plan,
}

/// A new child, opened for the disk.
#[derive(Debug)]
pub struct Child {
    /// The file, open as the disk's leaf.
    pub file: ImageFile,
    /// The image in it.
    pub image: Image,
    /// Its redo log.
    pub log: Option<RedoLog>,
}

impl NewChild {
    /// Prepares a child of the layer at `depth`. `live`: that layer will still be written to for a while.
    pub fn on(work: &Work<'_>, depth: usize, name: &ImageName, live: bool) -> Result<NewChild, Failure> {
        if name.format == FormatName::Raw {
            return Err(Failure::of(Kind::Unsupported, "a raw image cannot have a parent")
                .advise("use another format: qcow2:PATH or vhd:PATH"));
        }
        let parent = work.name(depth)?;
        let plan = plan(work.files, name, &parent, (work.image(depth)?, work.file(depth)?.1), live)?;
        Ok(NewChild { files: work.files.clone(), name: name.clone(), plan })
    }

    /// Creates the child completely, but not durably.
    pub fn make(self) -> Result<NewFile, Failure> {
        let begun = Instant::now();
        let creation = create::lay_out(&self.name, &self.plan)?;
        let mut new = NewFile::create(&self.files, &self.name)?;
        let written = create::write(new.file_mut(), &creation);
        written.map_err(|error| Failure::failed(format!("write the new image {}", self.name), &error))?;
        new.took.0 += begun.elapsed();
        Ok(new)
    }
}

/// Returns the properties of a child. It does not record the modification time of a parent that is still written to.
fn plan(
    files: &Files,
    name: &ImageName,
    parent: &ImageName,
    (image, file): (&Image, &ImageFile),
    live: bool,
) -> Result<Plan, Failure> {
    let mut link = parent_link::record(files, name.path(), parent, image, file)?;
    if live {
        link.modified = None;
    }
    let unit = if name.format == parent.format { unit_of(image) } else { None };
    Ok(Plan {
        len: image.geometry().len,
        allocation: Allocation::Child(link),
        unit,
        compression: Compression::default(),
        identity: None,
    })
}

/// A new file under a temporary name until it gets its final one. It is removed when it is dropped unless it is kept.
#[derive(Debug)]
pub struct NewFile {
    files: Files,
    name: ImageName,
    /// The current path; `None` once it is kept.
    path: Option<PathBuf>,
    /// Open through the page cache, which accepts any alignment, until the disk opens it.
    file: Option<ImageFile>,
    /// The time for creating it, and for making it durable.
    took: (Duration, Duration),
}

impl NewFile {
    /// Creates an empty file for `name`, which must not exist.
    pub fn create(files: &Files, name: &ImageName) -> Result<NewFile, Failure> {
        let path = name.path();
        if files.is_taken(path) {
            let what = format!("cannot create {}: it already exists", path.display());
            return Err(Failure::of(Kind::Exists, what).advise("choose another name"));
        }
        let temporary = files.temporary_path(path)?;
        drop(files.create_new(&temporary, THROUGH_CACHE)?);
        let (path, took) = (Some(temporary.clone()), Default::default());
        let mut new = NewFile { files: files.clone(), name: name.clone(), path, file: None, took };
        new.file = Some(files.open(&temporary, THROUGH_CACHE)?);
        Ok(new)
    }

    /// Returns the file, which the disk must not have opened yet.
    pub fn file_mut(&mut self) -> &mut ImageFile {
        let Some(file) = &mut self.file else { unreachable!("the disk has opened {}", self.name) };
        file
    }

    /// Makes the contents durable.
    pub fn sync(mut self) -> Result<NewFile, Failure> {
        let begun = Instant::now();
        let synced = self.file_mut().sync();
        synced.map_err(|error| Failure::failed(format!("sync {}", self.name), &error))?;
        self.took.1 += begun.elapsed();
        Ok(self)
    }

    /// Renames it to its final name.
    pub fn give_name(mut self) -> Result<NewFile, Failure> {
        let begun = Instant::now();
        let Some(temporary) = &self.path else { unreachable!("it is not kept before it has its name") };
        self.files.name_new(temporary, self.name.path())?;
        self.path = Some(self.name.path().to_owned());
        self.took.1 += begun.elapsed();
        Ok(self)
    }

    /// Makes the final name durable.
    pub fn sync_name(mut self) -> Result<NewFile, Failure> {
        let begun = Instant::now();
        self.files.sync_directory(self.name.path())?;
        self.took.1 += begun.elapsed();
        Ok(self)
    }

    /// Opens it for the disk.
    pub fn open(mut self, options: OpenOptions) -> Result<(NewFile, Child), Failure> {
        let begun = Instant::now();
        // This releases its lock, which would conflict with the next one.
        drop(self.file.take());
        let mut file = self.files.open(self.name.path(), options)?;
        let image = open_image(&self.files, &self.name, &mut file, true)?;
        let log = redo_log::open(&self.files, &self.name, &mut file)?;
        self.took.0 += begun.elapsed();
        Ok((self, Child { file, image, log }))
    }

    /// Keeps the file; returns the time for creating it, and for making it durable.
    pub fn keep(mut self) -> (Duration, Duration) {
        self.path = None;
        self.took
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            remove(&self.files, &path);
        }
    }
}

/// Removes an unneeded new file, durably: after a crash it would be mistaken for the finished one.
fn remove(files: &Files, path: &Path) {
    let removed = files.remove_new(path).map_err(|error| error.to_string());
    let removed = removed.and_then(|()| files.sync_directory(path).map_err(|error| error.to_string()));
    if let Err(error) = removed {
        say(format_args!("the unfinished file {} could not be removed: {error}", path.display()));
    }
}

const THROUGH_CACHE: OpenOptions = OpenOptions { write: true, cache: Cache::Writeback, lock: true };

impl Child {
    /// Checks that it can become the disk's leaf on top of `below`.
    pub fn fits_on(&self, below: &Image) -> Result<(), Failure> {
        let (above, below) = (self.image.geometry(), below.geometry());
        if above.len == below.len && above.block <= below.block {
            return Ok(());
        }
        let what = "the new file is on storage whose block size is too large for the layers below it";
        Err(Failure::of(Kind::Unsupported, what).advise("choose a path on the file system of the other layers"))
    }
}
