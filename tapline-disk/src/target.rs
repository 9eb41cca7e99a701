//! A new image file: made in full or not at all.
//!
//! Order: the file is created (nothing may be there), gets its length and metadata, and is synced; then its name
//! is made durable by a sync of its directory. Until [`Target::keep`] a failure removes the file again.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use disk::vhd::{self, Creation};
use rustix::fs::FallocateFlags;
use uring::{Cache, ImageFile, OpenOptions};

use crate::failure::Failure;
use crate::image_name::{FormatName, ImageName};
use crate::log::say;
use crate::uuid;

/// The block size of new VHDs: what every other tool writes.
pub const BLOCK_SIZE: u32 = 2 << 20;

/// What to make.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bytes of the disk.
    pub len: u64,
    /// Fixed, dynamic or differencing; of no meaning for raw.
    pub kind: vhd::Kind,
    /// Unit of allocation of a VHD.
    pub block_size: u32,
    /// Whether the whole disk is allocated now.
    pub allocate: bool,
}

/// A file that is removed again unless it is kept.
pub struct Target {
    path: PathBuf,
    kept: bool,
}

impl Target {
    /// Creates the image `name`. With `replace`, a file that exists gives way; its content is lost at once.
    pub fn create(name: &ImageName, plan: &Plan, replace: bool) -> Result<Target, Failure> {
        let creation = lay_out(name, plan)?;
        if replace {
            remove_old(name)?;
        }
        // The page cache takes any alignment; what is written here is synced below.
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let mut file = ImageFile::create_new(name.path(), options).map_err(Failure::said)?;
        let target = Target { path: name.path().to_owned(), kept: false };
        fill(&mut file, &creation, plan.allocate).map_err(|error| {
            Failure::new(format!("write the new image {name}"), error).advise("the unfinished file has been removed")
        })?;
        uring::sync_directory(name.path()).map_err(Failure::said)?;
        Ok(target)
    }

    /// The image is complete: it stays.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.kept {
            if let Err(error) = std::fs::remove_file(&self.path) {
                say(format_args!("the unfinished image {} could not be removed: {error}", self.path.display()));
            }
        }
    }
}

fn lay_out(name: &ImageName, plan: &Plan) -> Result<Creation, Failure> {
    let failed = |error: disk::ImageError| Failure::new(format!("create {name}"), error);
    match name.format {
        FormatName::Raw => {
            disk::raw::Raw::new(plan.len, 512, false).map_err(failed)?;
            Ok(Creation { len: plan.len, writes: Vec::new() })
        }
        FormatName::Vhd => {
            let spec = vhd::Spec {
                len: plan.len,
                kind: plan.kind.clone(),
                block_size: plan.block_size,
                uuid: uuid::new().map_err(|error| Failure::new("get random bytes for a new uuid", error))?,
                created: seconds(SystemTime::now()),
            };
            vhd::create(&spec).map_err(failed)
        }
    }
}

fn fill(file: &mut ImageFile, creation: &Creation, allocate: bool) -> std::io::Result<()> {
    file.set_len(creation.len)?;
    if allocate {
        // On file systems that cannot reserve space this fails, and so does the command: the space was asked for.
        rustix::fs::fallocate(&*file, FallocateFlags::empty(), 0, creation.len)?;
    }
    for write in &creation.writes {
        file.write_at(write.at, &write.bytes)?;
    }
    file.sync()
}

/// Removes a regular file that is to be replaced, after making sure that nobody has it open as an image.
fn remove_old(name: &ImageName) -> Result<(), Failure> {
    let path = name.path();
    if !path.exists() {
        return Ok(());
    }
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let old = ImageFile::open(path, options).map_err(Failure::said)?;
    if old.device_len().is_some() {
        let why = "it is a block device, and images are only created as files";
        return Err(Failure::new(format!("replace {name}"), why).advise("serve the device and copy onto it instead"));
    }
    std::fs::remove_file(path).map_err(|error| Failure::new(format!("remove the old {name}"), error))
}

/// Seconds since 1970.
pub fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// `to` as seen from the directory of `from`; both absolute and without links.
pub fn relative(from: &Path, to: &Path) -> PathBuf {
    let directory = from.parent().unwrap_or(Path::new("/"));
    let shared = directory.components().zip(to.components()).take_while(|(one, other)| one == other).count();
    let up = directory.components().skip(shared).map(|_| "..");
    up.map(PathBuf::from).chain([to.components().skip(shared).collect()]).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn relative_paths_go_up_as_far_as_they_must() {
        let relative = |from: &str, to: &str| relative(Path::new(from), Path::new(to)).display().to_string();
        assert_eq!(relative("/a/b/child", "/a/b/base"), "base");
        assert_eq!(relative("/a/b/child", "/a/c/base"), "../c/base");
        assert_eq!(relative("/child", "/a/base"), "a/base");
    }
}
