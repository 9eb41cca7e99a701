//! A new image file: made in full or not at all.
//!
//! Order: the file is created (nothing may be there), gets its length and metadata, and is synced; then its name
//! is made durable by a sync of its directory. Until [`Target::keep`] a failure removes the file again.
//!
//! What replaces another image is made beside it, and takes its name when it is complete: at every moment that name
//! stands for the whole old image or for the whole new one. The old one is locked meanwhile.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use disk::Creation;
use disk::vhd;
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
    /// What it is named until it is kept.
    name: ImageName,
    /// What gives way to it.
    old: Option<Old>,
    kept: bool,
}

/// An image that is to be replaced: where it lies, open and locked.
struct Old {
    path: PathBuf,
    _locked: ImageFile,
}

impl Target {
    /// Creates the image `name`. With `replace`, a file that exists gives way to it in [`Target::keep`].
    pub fn create(name: &ImageName, plan: &Plan, replace: bool) -> Result<Target, Failure> {
        let creation = lay_out(name, plan)?;
        let old = if replace { lock_old(name)? } else { None };
        let name = match &old {
            Some(old) => ImageName { path: beside(&old.path), ..name.clone() },
            None => name.clone(),
        };
        // The page cache takes any alignment; what is written here is synced below.
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let mut file = ImageFile::create_new(name.path(), options).map_err(Failure::said)?;
        let target = Target { name: name.clone(), old, kept: false };
        fill(&mut file, &creation, plan.allocate).map_err(|error| {
            Failure::new(format!("write the new image {name}"), error).advise("the unfinished file has been removed")
        })?;
        uring::sync_directory(name.path()).map_err(Failure::said)?;
        Ok(target)
    }

    /// The image to write to.
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// The image is complete and flushed: it stays, under the name that was asked for.
    pub fn keep(mut self) -> Result<(), Failure> {
        if let Some(old) = &self.old {
            let failed = |error| Failure::new(format!("replace {} by {}", old.path.display(), self.name), error);
            std::fs::rename(self.name.path(), &old.path).map_err(failed)?;
            self.kept = true;
            uring::sync_directory(&old.path).map_err(Failure::said)?;
        }
        self.kept = true;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.kept {
            if let Err(error) = std::fs::remove_file(self.name.path()) {
                say(format_args!("the unfinished image {} could not be removed: {error}", self.name));
            }
        }
    }
}

/// The bytes of a new image.
pub fn lay_out(name: &ImageName, plan: &Plan) -> Result<Creation, Failure> {
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
    write(file, creation)?;
    file.sync()
}

/// Writes a new image into its empty file; nothing is synced.
pub fn write(file: &mut ImageFile, creation: &Creation) -> std::io::Result<()> {
    file.set_len(creation.len)?;
    for write in &creation.writes {
        file.write_at(write.at, &write.bytes)?;
    }
    Ok(())
}

/// Locks a regular file that is to be replaced: nobody has it open as an image, nor will while this goes on.
fn lock_old(name: &ImageName) -> Result<Option<Old>, Failure> {
    if !name.path().exists() {
        return Ok(None);
    }
    // What a link leads to is replaced, not the link.
    let path = name.path().canonicalize().map_err(|error| Failure::new(format!("find {name}"), error))?;
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let locked = ImageFile::open(name.path(), options).map_err(Failure::said)?;
    if locked.device_len().is_some() {
        let why = "it is a block device, and images are only created as files";
        return Err(Failure::new(format!("replace {name}"), why).advise("serve the device and copy onto it instead"));
    }
    Ok(Some(Old { path, _locked: locked }))
}

/// Where the image is made that will replace `path`: in the same directory, and thus file system.
pub fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
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
