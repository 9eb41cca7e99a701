//! A new file for a disk that keeps running: an empty child of a layer. Runs on a separate thread.
//!
//! The file is created completely under a temporary name, synced, renamed, and its directory synced: it exists
//! completely or not at all, and never replaces another file.
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
    options: OpenOptions,
}

/// What was created.
#[derive(Debug)]
pub struct Child {
    /// The file, open as the disk's own.
    pub file: ImageFile,
    /// What is in it.
    pub image: Image,
    /// Its redo log.
    pub log: Option<RedoLog>,
    /// The time that making it took, but for
    pub work: Duration,
    /// the time that the storage took to make it durable.
    pub sync: Duration,
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
        Ok(Wanted { files: work.files.clone(), name: name.clone(), plan, options: work.options()? })
    }

    /// Makes it.
    pub fn make(self) -> Result<Child, Failure> {
        let (begun, files) = (Instant::now(), &self.files);
        let creation = create::lay_out(&self.name, &self.plan)?;
        let new = Unnamed::create(files, self.name.path())?;
        let mut file = new.file()?;
        let failed = |error| Failure::failed(format!("write the new image {}", self.name), &error);
        create::write(&mut file, &creation).map_err(failed)?;
        let synced = Instant::now();
        file.sync().map_err(failed)?;
        let named = new.name(self.name.path())?;
        let sync = synced.elapsed();
        // The lock of this description would be in the way of the next one's.
        drop(file);
        let mut file = files.open(self.name.path(), self.options)?;
        let image = open_image(files, &self.name, &mut file, true)?;
        let log = redo_log::open(files, &self.name, &mut file)?;
        named.keep();
        Ok(Child { file, image, log, work: begun.elapsed().saturating_sub(sync), sync })
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

/// A file beside the name that it is to have, removed again unless it gets it.
#[derive(Debug)]
pub struct Unnamed {
    files: Files,
    path: Option<PathBuf>,
}

/// A file that has got its name, removed again unless it is kept.
#[derive(Debug)]
pub struct Named(Unnamed);

impl Unnamed {
    /// An empty file beside `path`, where nothing may be.
    pub fn create(files: &Files, path: &Path) -> Result<Unnamed, Failure> {
        if files.is_taken(path) {
            let what = format!("cannot create {}: it already exists", path.display());
            return Err(Failure::of(Kind::Exists, what).advise("choose another name"));
        }
        let beside = files.unnamed(path)?;
        drop(files.create_new(&beside, THROUGH_CACHE)?);
        Ok(Unnamed { files: files.clone(), path: Some(beside) })
    }

    /// The file, open through the page cache, which takes any alignment.
    pub fn file(&self) -> Result<ImageFile, Failure> {
        Ok(self.files.open(self.path.as_deref().unwrap_or(Path::new("")), THROUGH_CACHE)?)
    }

    /// Gives it its name, durably.
    pub fn name(mut self, path: &Path) -> Result<Named, Failure> {
        let Some(beside) = &self.path else { unreachable!("it is renamed only once") };
        self.files.name_new(beside, path)?;
        self.path = Some(path.to_owned());
        self.files.sync_directory(path)?;
        Ok(Named(self))
    }
}

impl Named {
    /// It stays.
    pub fn keep(mut self) {
        self.0.path = None;
    }
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            remove(&self.files, &path);
        }
    }
}

/// Removes an unneeded new file, durably: if it existed after a crash, it would be taken for the finished one.
pub fn remove(files: &Files, path: &Path) {
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
