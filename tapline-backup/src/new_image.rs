//! A new image under a temporary name, which gets its final one when it is complete and durable.
//!
//! 1. Create `NAME.restoring-XXXXXX` in the same directory. A crash leaves it there; nothing else has such a name.
//! 2. Write all of it, and sync it.
//! 3. Rename it without replacing, and sync the directory. A crash before leaves no image under the final name, one
//!    after it a complete one.
//!
//! Knows nothing of backups; of formats only that a raw image has the bytes of the disk.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use backup::Sink;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::failure::{Exit, Failure};

/// A name that a new image has until it is complete.
pub struct Temporary {
    path: PathBuf,
    name: PathBuf,
    is_done: bool,
}

impl Temporary {
    /// A name in the directory of the final one, where nothing may be.
    pub fn new(name: &Path) -> Result<Temporary, Failure> {
        if fs::symlink_metadata(name).is_ok() {
            return Err(taken(name));
        }
        let mut path = name.as_os_str().to_owned();
        path.push(format!(".restoring-{}", backup::Id::random()));
        Ok(Temporary { path: path.into(), name: name.to_owned(), is_done: false })
    }

    /// The temporary name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the image, which is durable, its final name.
    pub fn finish(mut self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::cannot(format_args!("name the image {}", self.name.display()), error);
        match renameat_with(CWD, &self.path, CWD, &self.name, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(taken(&self.name)),
            // NFS: a link does not replace either.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => match fs::hard_link(&self.path, &self.name) {
                Ok(()) => fs::remove_file(&self.path).map_err(failed)?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(taken(&self.name)),
                Err(error) => return Err(failed(error)),
            },
            Err(errno) => return Err(failed(errno.into())),
        }
        let synced = uring::sync_directory(&self.name);
        synced.map_err(|error| Failure::cannot(format_args!("name the image {}", self.name.display()), error))?;
        self.is_done = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_done {
            // It may not exist yet. One that stays is of no harm, and has a name that says what it is.
            fs::remove_file(&self.path).unwrap_or_default();
        }
    }
}

fn taken(name: &Path) -> Failure {
    Failure::new(Exit::Conflict, format!("{} exists already", name.display())).advise("choose another name")
}

/// A new raw image. What is not written is a hole.
pub struct RawImage(File);

impl RawImage {
    /// Creates it under its temporary name.
    pub fn create(path: &Path, len: u64) -> Result<RawImage, Failure> {
        let created = File::create_new(path).and_then(|file| file.set_len(len).map(|()| file));
        created.map(RawImage).map_err(|error| Failure::cannot(format_args!("create {}", path.display()), error))
    }

    /// Makes it durable.
    pub fn finish(self) -> Result<(), Failure> {
        self.0.sync_all().map_err(|error| Failure::cannot("sync the image", error))
    }
}

impl Sink for RawImage {
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn zero(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
}
