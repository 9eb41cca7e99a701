//! A new image file: made in full or not at all.
//!
//! Order: the file is created (nothing may be there), gets its length and metadata, and is synced; then its name
//! is made durable by a sync of its directory. Until [`Target::keep`] a failure removes the file again.
//!
//! What replaces another image is made beside it, and takes its name when it is complete: at every moment that name
//! stands for the whole old image or for the whole new one. The old one is locked meanwhile.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use disk::{Creation, ImageError, Link, qcow2, vhd};
use rustix::fs::FallocateFlags;
use uring::{Cache, ImageFile, OpenOptions};

use crate::failure::Failure;
use crate::image_name::{FormatName, ImageName};
use crate::log::say;
use crate::uuid;

/// The block size of new VHDs: what every other tool writes.
const BLOCK_SIZE: u32 = 2 << 20;

/// What to make.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bytes of the disk.
    pub len: u64,
    /// How it takes its space, and what it stands on; of no meaning for raw but for [`Shape::Fixed`].
    pub shape: Shape,
    /// Unit of allocation: the blocks of a VHD, the clusters of qcow2; what the format prefers unless named.
    pub unit: Option<u32>,
    /// What the new image takes over from one that it replaces.
    pub identity: Option<Identity>,
}

/// How an image takes its space.
#[derive(Clone, Debug)]
pub enum Shape {
    /// All of it now.
    Fixed,
    /// As it is written.
    Thin,
    /// As it is written, on top of a parent.
    Child(Link),
}

/// What stays when an image is rewritten.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Its uuid.
    pub uuid: [u8; 16],
    /// When it was made, in seconds since 1970, where the format records that.
    pub created: Option<u64>,
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
            Some(old) => ImageName { path: beside(&old.path)?, ..name.clone() },
            None => name.clone(),
        };
        // The page cache takes any alignment; what is written here is synced below.
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let mut file = ImageFile::create_new(name.path(), options).map_err(Failure::said)?;
        let target = Target { name: name.clone(), old, kept: false };
        fill(&mut file, &creation, matches!(plan.shape, Shape::Fixed)).map_err(|error| {
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
    let laid_out = match name.format {
        FormatName::Raw => {
            disk::raw::Raw::new(plan.len, 512, false).map(|_| Creation { len: plan.len, writes: Vec::new() })
        }
        FormatName::Vhd => lay_out_vhd(plan, identity(plan)?),
        FormatName::Qcow2 => lay_out_qcow2(plan, identity(plan)?),
    };
    laid_out.map_err(|error| Failure::new(format!("create {name}"), error))
}

/// What the new image is to be known by.
fn identity(plan: &Plan) -> Result<Identity, Failure> {
    match plan.identity {
        Some(kept) => Ok(kept),
        None => {
            let uuid = uuid::new().map_err(|error| Failure::new("get random bytes for a new uuid", error))?;
            Ok(Identity { uuid, created: None })
        }
    }
}

fn lay_out_vhd(plan: &Plan, identity: Identity) -> Result<Creation, ImageError> {
    vhd::create(&vhd::Spec {
        len: plan.len,
        kind: match &plan.shape {
            Shape::Fixed => vhd::Kind::Fixed,
            Shape::Thin => vhd::Kind::Dynamic,
            Shape::Child(link) => vhd::Kind::Differencing(vhd::Parent::from(link)),
        },
        block_size: plan.unit.unwrap_or(BLOCK_SIZE),
        uuid: identity.uuid,
        created: identity.created.unwrap_or_else(|| seconds(SystemTime::now())),
    })
}

fn lay_out_qcow2(plan: &Plan, identity: Identity) -> Result<Creation, ImageError> {
    qcow2::create(&qcow2::Spec {
        len: plan.len,
        cluster_size: plan.unit.unwrap_or(qcow2::CLUSTER_SIZE),
        uuid: identity.uuid,
        parent: match &plan.shape {
            Shape::Child(link) => Some(link.clone()),
            Shape::Fixed | Shape::Thin => None,
        },
    })
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

/// Where the image is made that will be `path`: in the same directory, and thus file system. The name is ours alone: what
/// is found there and not in use was left by a job that was killed, and is removed.
pub fn beside(path: &Path) -> Result<PathBuf, Failure> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tapline-new");
    let beside = PathBuf::from(name);
    if beside.symlink_metadata().is_ok_and(|found| found.is_file()) {
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let _locked = ImageFile::open(&beside, options).map_err(Failure::said)?;
        let tried = || format!("remove {}, which a job has left that was killed", beside.display());
        std::fs::remove_file(&beside).map_err(|error| Failure::new(tried(), error))?;
    }
    Ok(beside)
}

/// Seconds since 1970.
pub fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
