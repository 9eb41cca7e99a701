//! A new file for a disk that keeps running: an empty child of a layer, or a copy. Runs on a separate thread.
//!
//! The file is created under a temporary name, synced, renamed, and its directory synced, each of which is a step of a
//! plan: it exists completely or not at all, and never replaces another file.
//!
//! With `--handed` it was created empty and durably, under its final name, by the process that passes it: it is filled
//! in place, and the sectors that make it an image are written when all others are durable ([`crate::image::create`]).
//! *If killed before:* the file does not open as an image. *After:* it is complete, and empty on top of its parent. If
//! this is refused, the file is left as it is.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control::{FormatName, ImageName, Kind};
use disk::qcow2::Compression;
use disk::{Format, Image, RedoLog};
use uring::{Cache, ImageFile, OpenOptions};

use super::work::Work;
use crate::files::Files;
use crate::image::chain::open_image;
use crate::image::create::{self, Plan, Shape, unit_of};
use crate::image::parent_link;
use crate::image::redo_log;
use crate::process::failure::Failure;
use crate::process::log::say;

/// What to create.
#[derive(Clone, Debug)]
pub struct Wanted {
    files: Files,
    name: ImageName,
    plan: Plan,
}

/// A child that is the disk's own.
#[derive(Debug)]
pub struct Child {
    /// The file, open as the disk's leaf.
    pub file: ImageFile,
    /// What is in it.
    pub image: Image,
    /// Its redo log.
    pub log: Option<RedoLog>,
}

impl Wanted {
    /// A child of the layer at `depth`, which is written to for a while yet (`live`) or is not any more.
    pub fn on(work: &Work<'_>, depth: usize, name: &ImageName, live: bool) -> Result<Wanted, Failure> {
        if name.format == FormatName::Raw {
            return Err(Failure::of(Kind::Unsupported, "a raw image cannot have a parent")
                .advise("use another format: qcow2:PATH or vhd:PATH"));
        }
        let parent = work.name(depth)?;
        let plan = plan(work.files, name, &parent, (work.image(depth)?, work.file(depth)?.1), live)?;
        Ok(Wanted { files: work.files.clone(), name: name.clone(), plan })
    }

    /// Makes it, whole, but not durable.
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

/// What a child records of its parent. The time of a parent that is written to yet is not fixed.
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
        shape: Shape::Child(link),
        unit,
        compression: Compression::default(),
        identity: None,
    })
}

/// A new file, beside the name that it is to have until it gets it. It is removed again unless it is kept.
#[derive(Debug)]
pub struct NewFile {
    files: Files,
    name: ImageName,
    /// Where it is, until it is kept.
    path: Option<PathBuf>,
    /// Open through the page cache, which takes any alignment, until the disk opens it.
    file: Option<ImageFile>,
    /// The time that making it took, and making it durable.
    took: (Duration, Duration),
}

impl NewFile {
    /// An empty file, for a name under which nothing may be.
    pub fn create(files: &Files, name: &ImageName) -> Result<NewFile, Failure> {
        let path = name.path();
        if files.is_taken(path) {
            let what = format!("cannot create {}: it already exists", path.display());
            return Err(Failure::of(Kind::Exists, what).advise("choose another name"));
        }
        let beside = files.unnamed(path)?;
        drop(files.create_new(&beside, THROUGH_CACHE)?);
        let (path, took) = (Some(beside.clone()), Default::default());
        let mut new = NewFile { files: files.clone(), name: name.clone(), path, file: None, took };
        new.file = Some(files.open(&beside, THROUGH_CACHE)?);
        Ok(new)
    }

    /// The file.
    pub fn file_mut(&mut self) -> &mut ImageFile {
        let Some(file) = &mut self.file else { unreachable!("the disk has opened {}", self.name) };
        file
    }

    /// Makes durable what is in it.
    pub fn sync(mut self) -> Result<NewFile, Failure> {
        let begun = Instant::now();
        let synced = self.file_mut().sync();
        synced.map_err(|error| Failure::failed(format!("sync {}", self.name), &error))?;
        self.took.1 += begun.elapsed();
        Ok(self)
    }

    /// Gives it its name.
    pub fn give_name(mut self) -> Result<NewFile, Failure> {
        let begun = Instant::now();
        let Some(beside) = &self.path else { unreachable!("it is not kept before it has its name") };
        self.files.name_new(beside, self.name.path())?;
        self.path = Some(self.name.path().to_owned());
        self.took.1 += begun.elapsed();
        Ok(self)
    }

    /// Makes durable that it has its name.
    pub fn sync_name(mut self) -> Result<NewFile, Failure> {
        let begun = Instant::now();
        self.files.sync_directory(self.name.path())?;
        self.took.1 += begun.elapsed();
        Ok(self)
    }

    /// Opens it as the disk's own.
    pub fn open(mut self, options: OpenOptions) -> Result<(NewFile, Child), Failure> {
        let begun = Instant::now();
        // The lock of this description would be in the way of the next one's.
        drop(self.file.take());
        let mut file = self.files.open(self.name.path(), options)?;
        let image = open_image(&self.files, &self.name, &mut file, true)?;
        let log = redo_log::open(&self.files, &self.name, &mut file)?;
        self.took.0 += begun.elapsed();
        Ok((self, Child { file, image, log }))
    }

    /// It stays. The time that making it took, and making it durable.
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

/// Removes an unneeded new file, durably: if it existed after a crash, it would be taken for the finished one.
fn remove(files: &Files, path: &Path) {
    let removed = files.remove_new(path).map_err(|error| error.to_string());
    let removed = removed.and_then(|()| files.sync_directory(path).map_err(|error| error.to_string()));
    if let Err(error) = removed {
        say(format_args!("the unfinished file {} could not be removed: {error}", path.display()));
    }
}

const THROUGH_CACHE: OpenOptions = OpenOptions { write: true, cache: Cache::Writeback, lock: true };

impl Child {
    /// Whether the disk may take it for its leaf on `below`.
    pub fn fits_on(&self, below: &Image) -> Result<(), Failure> {
        let (above, below) = (self.image.geometry(), below.geometry());
        if above.len == below.len && above.block <= below.block {
            return Ok(());
        }
        let what = "the new file is on storage whose block size is too large for the layers below it";
        Err(Failure::of(Kind::Unsupported, what).advise("choose a path on the file system of the other layers"))
    }
}
