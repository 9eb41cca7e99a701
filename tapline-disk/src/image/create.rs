//! Creates new image files, completely or not at all.
//!
//! Order: the file is created under a temporary name, gets its length and metadata, and is synced, with the sectors
//! that identify it as an image last. When it is complete, [`Target::keep`] gives it its final name, which must not
//! exist by then, and makes that durable by a sync of the directory. Until then a failure removes the file, and a kill
//! leaves it under the temporary name. The executor of a plan ([`plan::clone`]) does each of these as a step.
//!
//! The replacement of an image is renamed in the same way: at every moment the name refers either to the complete old
//! image or to the complete new one. The old one stays locked.
//!
//! A passed file has its final name from the beginning: its sender removes it if the command fails.
//!
//! A block device already exists: see [`device`].

mod device;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use control::{FormatName, ImageName, Kind};
use disk::qcow2::Compression;
use disk::raw::Raw;
use disk::size::{in_memory, on_disk};
use disk::{Creation, FileOffset, Image, Link, MetaWrite, qcow2, vhd};
use rustix::fs::FallocateFlags;
use uring::{Cache, FileOpenError, ImageFile, OpenOptions};

use crate::files::identity::FileIdentity;
use crate::files::{Files, next_to};
use crate::image::remote;
use crate::image::uuid;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The block size of new VHDs, which all other tools use too.
const BLOCK_SIZE: u32 = 2 << 20;

/// Properties of a new image.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The size of the disk in bytes.
    pub len: u64,
    /// Its allocation and its parent; ignored for raw, except for [`Allocation::Fixed`].
    pub allocation: Allocation,
    /// The unit of allocation: the blocks of a VHD, the clusters of qcow2. `None`: the format's default.
    pub unit: Option<u32>,
    /// The compression of a qcow2 image.
    pub compression: Compression,
    /// The identity of the image that this one replaces.
    pub identity: Option<Identity>,
}

/// How an image allocates its space, and whether it has a parent.
#[derive(Clone, Debug)]
pub enum Allocation {
    /// Completely when it is created.
    Fixed,
    /// On demand.
    Thin,
    /// On demand, on top of a parent.
    Child(Link),
}

/// The identity of an image, which stays when it is rewritten.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// The uuid.
    pub uuid: [u8; 16],
    /// The creation time in seconds since 1970, if the format records it.
    pub created: Option<u64>,
}

/// Refuses to create an image in place of one of its sources.
pub fn must_differ<'a>(
    files: &Files,
    target: &ImageName,
    sources: impl IntoIterator<Item = &'a ImageName>,
) -> Result<(), Failure> {
    let mut sources = sources.into_iter();
    if target.uri().is_some() {
        return sources.try_for_each(|source| remote::must_differ(files, target, source));
    }
    let Some(there) = FileIdentity::of(files, target) else { return Ok(()) };
    match sources.find(|source| FileIdentity::of(files, source) == Some(there)) {
        None => Ok(()),
        Some(source) => Err(Failure::new(format!("create {target}"), format!("it is the file of {source} itself"))
            .advise("give the new image another name")
            .of_kind(Kind::Invalid)),
    }
}

/// A new image, which is removed when it is dropped unless it has been kept.
pub struct Target {
    files: Files,
    /// Its current name: temporary until it is kept.
    name: ImageName,
    place: Place,
    /// A new file whose contents are not durable yet.
    unsynced: Option<ImageFile>,
    kept: bool,
}

/// The final place of a new image.
enum Place {
    /// A path where no file exists yet.
    New(PathBuf),
    /// The path of an image that is replaced.
    Replaced {
        path: PathBuf,
        /// The old image, open and locked.
        _locked: ImageFile,
    },
    /// The named device, which exists already.
    Device,
}

impl Target {
    /// Creates the image `name`. With `replace`, [`Target::keep`] replaces a file of that name.
    pub fn create(files: &Files, name: &ImageName, plan: &Plan, replace: bool) -> Result<Target, Failure> {
        let mut target = Target::begin(files, name, plan, replace)?;
        target.sync()?;
        Ok(target)
    }

    /// Like [`Target::create`], without making it durable.
    fn begin(files: &Files, name: &ImageName, plan: &Plan, replace: bool) -> Result<Target, Failure> {
        let creation = lay_out(name, plan)?;
        let path = name.path().to_owned();
        let place = match if replace { lock_old(name)? } else { None } {
            Some((path, _locked)) => Place::Replaced { path, _locked },
            None if files.is_taken(&path) => return Err(Failure::said(FileOpenError::Exists { path })),
            None => Place::New(path),
        };
        let path = match &place {
            Place::Replaced { path, .. } => next_to(path)?,
            _ => files.temporary_path(name.path())?,
        };
        // The page cache accepts any alignment; the file is synced later.
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let created = files.create_new(&path, options);
        let mut file = created.map_err(|error| Failure::said(as_named(error, name.path())))?;
        let (files, unkept) = (files.clone(), ImageName { path, ..name.clone() });
        let written = fill(&mut file, &creation, matches!(plan.allocation, Allocation::Fixed));
        let target = Target { files, name: unkept, place, unsynced: Some(file), kept: false };
        written.map_err(|error| {
            Failure::new(format!("write the new image {name}"), error).advise(target.files.removal_note())
        })?;
        Ok(target)
    }

    /// Like [`Target::create`], or on an existing block device of that name, which must be blank unless `force`.
    pub fn create_anywhere(files: &Files, name: &ImageName, plan: &Plan, force: bool) -> Result<Target, Failure> {
        let mut target = Target::begin_anywhere(files, name, plan, force)?;
        target.sync()?;
        Ok(target)
    }

    /// Like [`Target::create_anywhere`], without making a new file durable.
    pub fn begin_anywhere(files: &Files, name: &ImageName, plan: &Plan, force: bool) -> Result<Target, Failure> {
        let Some(mut found) = device::open(files, name)? else { return Target::begin(files, name, plan, force) };
        if name.format == FormatName::Vhd && matches!(plan.allocation, Allocation::Fixed) {
            return Err(Failure::new(format!("create {name}"), "a fixed VHD cannot be created on a block device")
                .advise("use a dynamic VHD, or use the device as a raw image")
                .of_kind(Kind::Invalid));
        }
        let creation = lay_out(name, plan)?;
        device::check(name, &mut found, &creation, force)?;
        device::fill(files, name, &mut found, creation)?;
        let (files, name) = (files.clone(), name.clone());
        Ok(Target { files, name, place: Place::Device, unsynced: None, kept: false })
    }

    /// Returns the current name, to write to.
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// Makes the contents of a new file durable.
    pub fn sync(&mut self) -> Result<(), Failure> {
        let Some(mut file) = self.unsynced.take() else { return Ok(()) };
        file.sync().map_err(|error| {
            Failure::new(format!("write the new image {}", self.name), error).advise(self.files.removal_note())
        })
    }

    /// Keeps the image, which must be complete and synced, under its final name.
    pub fn keep(mut self) -> Result<(), Failure> {
        self.give_name()?;
        self.sync_name()
    }

    /// Renames the file to its final name.
    pub fn give_name(&mut self) -> Result<(), Failure> {
        let path = match &self.place {
            Place::New(path) => {
                self.files.name_new(self.name.path(), path).map_err(Failure::said)?;
                path.clone()
            }
            Place::Replaced { path, .. } => {
                let failed = |error| Failure::new(format!("replace {} with {}", path.display(), self.name), error);
                std::fs::rename(self.name.path(), path).map_err(failed)?;
                // The rename cannot be undone: the old image is gone.
                self.kept = true;
                path.clone()
            }
            Place::Device => return Ok(()),
        };
        self.name.path = path;
        Ok(())
    }

    /// Makes the final name durable; the image is then kept.
    pub fn sync_name(&mut self) -> Result<(), Failure> {
        if !matches!(self.place, Place::Device) {
            self.files.sync_directory(self.name.path()).map_err(Failure::said)?;
        }
        self.kept = true;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if matches!(self.place, Place::Device) {
            device::abandon(&self.files, &self.name);
        } else if let Err(error) = self.files.remove_new(self.name.path()) {
            say(format_args!("the unfinished image {} could not be removed: {error}", self.name));
        }
    }
}

/// Replaces the temporary path in an error by the final one, which users know.
fn as_named(error: FileOpenError, named: &Path) -> FileOpenError {
    let path = named.to_owned();
    match error {
        FileOpenError::Failed { tried, source, .. } => FileOpenError::Failed { tried, path, source },
        FileOpenError::NotPermitted { wanted, why, .. } => FileOpenError::NotPermitted { path, wanted, why },
        other => other,
    }
}

/// Returns the bytes of a new image.
pub fn lay_out(name: &ImageName, plan: &Plan) -> Result<Creation, Failure> {
    if name.data_file.is_some() {
        let why = "a new image cannot have an external data file";
        return Err(Failure::new(format!("create {name}"), why)
            .advise("omit 'data-file'; `qemu-img create -f qcow2 -o data_file=FILE` creates an image with one")
            .of_kind(Kind::Invalid));
    }
    match layout(name, plan)? {
        Layout::Raw => Raw::new(plan.len, 512, false).map(|_| Creation { len: plan.len, writes: Vec::new() }),
        Layout::Vhd(spec) => vhd::create(&spec),
        Layout::Qcow2(spec) => qcow2::create(&spec),
    }
    .map_err(|error| Failure::new(format!("create {name}"), error))
}

/// The parameters of a new image, by format.
pub enum Layout {
    /// The file contains the disk as it is.
    Raw,
    /// A VHD.
    Vhd(vhd::Spec),
    /// A qcow2 image.
    Qcow2(qcow2::Spec),
}

/// Returns the parameters of a new image of this format.
pub fn layout(name: &ImageName, plan: &Plan) -> Result<Layout, Failure> {
    Ok(match name.format {
        FormatName::Raw => Layout::Raw,
        FormatName::Vhd => Layout::Vhd(vhd_spec(plan, identity(plan)?)),
        FormatName::Qcow2 => Layout::Qcow2(qcow2_spec(plan, identity(plan)?)),
        FormatName::Vmdk | FormatName::Vhdx | FormatName::Null | FormatName::Model => {
            let why = format!("{} images are only read", name.format);
            let failure = Failure::new(format!("create {name}"), why).of_kind(Kind::Invalid);
            return Err(failure.advise("create a qcow2, vhd or raw image"));
        }
    })
}

/// Returns the identity of the image that is replaced, or makes a new one.
fn identity(plan: &Plan) -> Result<Identity, Failure> {
    match plan.identity {
        Some(kept) => Ok(kept),
        None => {
            let uuid = uuid::new().map_err(|error| Failure::new("get random bytes for a new uuid", error))?;
            Ok(Identity { uuid, created: None })
        }
    }
}

fn vhd_spec(plan: &Plan, identity: Identity) -> vhd::Spec {
    vhd::Spec {
        len: plan.len,
        kind: match &plan.allocation {
            Allocation::Fixed => vhd::Kind::Fixed,
            Allocation::Thin => vhd::Kind::Dynamic,
            Allocation::Child(link) => vhd::Kind::Differencing(vhd::Parent::from(link)),
        },
        block_size: plan.unit.unwrap_or(BLOCK_SIZE),
        uuid: identity.uuid,
        created: identity.created.unwrap_or_else(|| seconds(SystemTime::now())),
    }
}

fn qcow2_spec(plan: &Plan, identity: Identity) -> qcow2::Spec {
    qcow2::Spec {
        len: plan.len,
        cluster_size: plan.unit.unwrap_or(qcow2::CLUSTER_SIZE),
        uuid: identity.uuid,
        parent: match &plan.allocation {
            Allocation::Child(link) => Some(link.clone()),
            Allocation::Fixed | Allocation::Thin => None,
        },
        compression: plan.compression,
    }
}

fn fill(file: &mut ImageFile, creation: &Creation, allocate: bool) -> std::io::Result<()> {
    file.set_len(creation.len)?;
    if allocate {
        // If the file system cannot reserve the requested space, the command fails.
        rustix::fs::fallocate(&*file, FallocateFlags::empty(), 0, creation.len)?;
    }
    write(file, creation)
}

/// Writes a new image into its empty file; everything is durable except the sectors that identify it as an image
/// ([`Part`]).
pub fn write(file: &mut ImageFile, creation: &Creation) -> std::io::Result<()> {
    file.set_len(creation.len)?;
    for part in [Part::Body, Part::Head] {
        for write in writes_of(creation, part) {
            file.write_at(write.at, &write.bytes)?;
        }
        if part == Part::Body {
            file.sync()?;
        }
    }
    Ok(())
}

/// The two parts of a new image. The head is the first sector, and the last one, which in a VHD repeats it. Programs
/// identify an image by these, so they are written when all else is durable: no crash leaves a file that opens as an
/// image with other contents than the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Body,
    Head,
}

/// Returns the writes of one part.
fn writes_of(creation: &Creation, wanted: Part) -> Vec<MetaWrite> {
    const SECTOR: u64 = 512;
    let (first, last) = (FileOffset(SECTOR), FileOffset(creation.len.saturating_sub(SECTOR)));
    let mut found = Vec::new();
    for write in &creation.writes {
        let mut at = write.at;
        let mut bytes = write.bytes.as_slice();
        while !bytes.is_empty() {
            // Up to the next of the two boundaries of the parts.
            let border = [first, last].into_iter().filter(|&border| border > at).min().unwrap_or(FileOffset(u64::MAX));
            let len = in_memory(border - at).min(bytes.len());
            let (piece, rest) = bytes.split_at(len);
            let part = if at < first || at >= last { Part::Head } else { Part::Body };
            if part == wanted {
                found.push(MetaWrite { at, bytes: piece.to_vec() });
            }
            at += on_disk(len);
            bytes = rest;
        }
    }
    found
}

/// Locks a regular file that will be replaced, so that no process has it open as an image until then.
fn lock_old(name: &ImageName) -> Result<Option<(PathBuf, ImageFile)>, Failure> {
    if !name.path().exists() {
        return Ok(None);
    }
    // If the path is a symbolic link, its target is replaced.
    let path = name.path().canonicalize().map_err(|error| Failure::new(format!("find {name}"), error))?;
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let locked = ImageFile::open(name.path(), options).map_err(Failure::said)?;
    if locked.device_len().is_some() {
        let why = "it is a block device, so no new file can be created next to it";
        return Err(Failure::new(format!("replace {name}"), why).advise("convert it to another target"));
    }
    Ok(Some((path, locked)))
}

/// Returns seconds since 1970.
pub fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the allocation unit for an image that is created on top of this one, or replaces it: the same. Smaller qcow2
/// clusters than our minimum, which other programs create, become our minimum.
pub fn unit_of(image: &Image) -> Option<u32> {
    match image {
        Image::Raw(_) | Image::Foreign(_) => None,
        Image::Vhd(vhd) => vhd.info().block_size,
        Image::Qcow2(qcow2) => {
            u32::try_from(qcow2.info().cluster_size).ok().map(|size| size.max(disk::qcow2::CLUSTER_SIZE))
        }
    }
}

#[cfg(test)]
mod test {
    use disk::{Access, DiskOffset, Format, Image, Mapping, Span, Tail};

    use super::*;

    const LEN: u64 = 64 << 20;

    fn link(format: &'static str) -> Link {
        Link {
            format: Some(format),
            uuid: [7; 16],
            relative: "a".into(),
            absolute: "/srv/a".into(),
            len: Some(LEN),
            modified: None,
        }
    }

    fn creation(format: FormatName, unit: Option<u32>) -> Creation {
        let identity = Some(Identity { uuid: [9; 16], created: Some(1_000_000_000) });
        let plan = Plan {
            len: LEN,
            allocation: Allocation::Child(link(format.word())),
            unit,
            compression: Compression::default(),
            identity,
        };
        lay_out(&ImageName { format, path: "/srv/b".into(), data_file: None }, &plan).unwrap()
    }

    /// Opens the file as another program would after a crash; returns the image, if it is one.
    fn look(format: FormatName, bytes: &[u8]) -> Option<Image> {
        let mut source = bytes;
        match format {
            FormatName::Vhd => disk::vhd::Vhd::open(&mut source, Access::ReadOnly, Tail::Zeroes)
                .ok()
                .map(|image| Image::Vhd(Box::new(image))),
            FormatName::Qcow2 => disk::qcow2::Qcow2::open(&mut source, Access::ReadOnly, Tail::Zeroes)
                .ok()
                .map(|image| Image::Qcow2(Box::new(image))),
            FormatName::Raw | FormatName::Vmdk | FormatName::Vhdx | FormatName::Null | FormatName::Model => None,
        }
    }

    /// Checks that it has the right parent, and that all of the disk is the parent's.
    fn is_the_new_one(format: FormatName, bytes: &[u8], whole: &[u8]) {
        let mut image = look(format, bytes).unwrap();
        assert_eq!(image.link(), look(format, whole).unwrap().link());
        assert_eq!(image.link().unwrap().uuid, [7; 16]);
        assert_eq!((image.geometry().len, image.identity()), (LEN, [9; 16]));
        let mut at = 0;
        while at < LEN {
            match image.map(Span { at: DiskOffset(at), len: LEN - at }) {
                Ok(Mapping::Parent { len }) => at += len,
                Ok(place) => panic!("{place:?} at {at}"),
                Err(disk::Wait::Load(block)) => {
                    let from = usize::try_from(block.at.0).unwrap();
                    let to = from + usize::try_from(block.len).unwrap();
                    image.load(block, &bytes[from..to]).unwrap();
                }
                Err(wait) => panic!("{wait:?}"),
            }
        }
    }

    fn put(file: &mut Vec<u8>, write: &MetaWrite) {
        let from = usize::try_from(write.at.0).unwrap();
        file.resize(file.len().max(from + write.bytes.len()), 0);
        file[from..from + write.bytes.len()].copy_from_slice(&write.bytes);
    }

    fn sectors(writes: &[MetaWrite]) -> Vec<MetaWrite> {
        let cut = |write: &MetaWrite| -> Vec<MetaWrite> {
            let pieces = write.bytes.chunks(512).zip(0..);
            pieces.map(|(bytes, n)| MetaWrite { at: write.at + n * 512, bytes: bytes.to_vec() }).collect()
        };
        writes.iter().flat_map(cut).collect()
    }

    /// Calls `judge` with the states that a crash may leave while `unsynced` is written over `before`. Exhaustive over
    /// the subsets of writes that are complete; in single sectors: each alone, all but each, and each prefix.
    fn each_crash(before: &[u8], unsynced: &[MetaWrite], judge: &dyn Fn(&[u8])) {
        let judge = |kept: &[&MetaWrite]| {
            let mut file = before.to_vec();
            kept.iter().for_each(|write| put(&mut file, write));
            judge(&file);
        };
        for subset in 0..1u32 << unsynced.len() {
            let kept = unsynced.iter().enumerate().filter(|(n, _)| subset & (1 << n) != 0);
            judge(&kept.map(|(_, write)| write).collect::<Vec<_>>());
        }
        let sectors = sectors(unsynced);
        for n in 0..sectors.len() {
            judge(&[&sectors[n]]);
            judge(
                &sectors
                    .iter()
                    .enumerate()
                    .filter(|&(other, _)| other != n)
                    .map(|(_, write)| write)
                    .collect::<Vec<_>>(),
            );
            judge(&sectors[..n].iter().collect::<Vec<_>>());
        }
    }

    /// Starts from an empty passed file, and from one that already has its length.
    #[test]
    fn a_crash_leaves_no_image_or_the_right_one() {
        for (format, unit) in [(FormatName::Vhd, None), (FormatName::Vhd, Some(512 << 10)), (FormatName::Qcow2, None)] {
            let creation = creation(format, unit);
            let (body, head) = (writes_of(&creation, Part::Body), writes_of(&creation, Part::Head));
            assert!(!body.is_empty() && !head.is_empty() && head.iter().all(|write| write.bytes.len() == 512));
            let full = vec![0; usize::try_from(creation.len).unwrap()];
            for before in [&[][..], &full] {
                each_crash(before, &body, &|file| assert!(look(format, file).is_none()));
            }
            let mut whole = full.clone();
            creation.writes.iter().for_each(|write| put(&mut whole, write));
            is_the_new_one(format, &whole, &whole);
            let mut made = full;
            body.iter().for_each(|write| put(&mut made, write));
            each_crash(&made, &head, &|file| {
                if look(format, file).is_some() {
                    is_the_new_one(format, file, &whole);
                }
            });
            head.iter().for_each(|write| put(&mut made, write));
            assert!(made == whole, "{format}: the parts are not the whole");
        }
    }
}
