//! A new image file: created completely or not at all.
//!
//! Order: the file is created under a temporary name, gets its length and metadata, and is synced, with the sectors
//! that make it an image last. [`Target::keep`], when it is complete, gives it its name, which no other file may have
//! by then, and makes that durable by a sync of its directory. Until then a failure removes the file again, and a kill
//! leaves it under the temporary name. For who carries out a plan ([`plan::clone`]) each of these is a step.
//!
//! The replacement of an image is renamed to that in the same way: at every moment the name refers either to the
//! complete old image or to the complete new one. The old one stays locked.
//!
//! A file that was handed over has its name from the beginning: its creator removes it if the command fails.
//!
//! A block device already exists: see [`device`].

mod device;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use control::{FormatName, ImageName, Kind};
use disk::qcow2::Compression;
use disk::raw::Raw;
use disk::{Creation, FileOffset, Image, Link, MetaWrite, qcow2, vhd};
use rustix::fs::FallocateFlags;
use uring::{Cache, FileOpenError, ImageFile, OpenOptions};

use crate::files::identity::FileIdentity;
use crate::files::{Files, beside};
use crate::image::uuid;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The block size of new VHDs: what every other tool writes.
const BLOCK_SIZE: u32 = 2 << 20;

/// What to create.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bytes of the disk.
    pub len: u64,
    /// Its allocation and its parent; ignored for raw, except for [`Shape::Fixed`].
    pub shape: Shape,
    /// Unit of allocation: the blocks of a VHD, the clusters of qcow2; what the format prefers unless named.
    pub unit: Option<u32>,
    /// How a qcow2 image compresses.
    pub compression: Compression,
    /// The identity that the new image inherits from the one that it replaces.
    pub identity: Option<Identity>,
}

/// How an image allocates its space.
#[derive(Clone, Debug)]
pub enum Shape {
    /// All of it now.
    Fixed,
    /// When it is written.
    Thin,
    /// When it is written, on top of a parent.
    Child(Link),
}

/// What is kept when an image is rewritten.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// The uuid.
    pub uuid: [u8; 16],
    /// The creation time in seconds since 1970, if the format records it.
    pub created: Option<u64>,
}

/// Refuses to create an image in place of one that it is made from.
pub fn must_differ<'a>(
    files: &Files,
    target: &ImageName,
    sources: impl IntoIterator<Item = &'a ImageName>,
) -> Result<(), Failure> {
    let Some(there) = FileIdentity::of(files, target) else { return Ok(()) };
    match sources.into_iter().find(|source| FileIdentity::of(files, source) == Some(there)) {
        None => Ok(()),
        Some(source) => Err(Failure::new(format!("create {target}"), format!("it is the file of {source} itself"))
            .advise("give the new image another name")
            .of_kind(Kind::Invalid)),
    }
}

/// A file that is removed again unless it is kept.
pub struct Target {
    files: Files,
    /// Its name until it is kept.
    name: ImageName,
    place: Place,
    /// A new file, until what was written to it is durable.
    unsynced: Option<ImageFile>,
    kept: bool,
}

/// Where it will be.
enum Place {
    /// At this path, where nothing is yet.
    New(PathBuf),
    /// At this path, in place of an image.
    Replaced {
        path: PathBuf,
        /// The image, open and locked.
        _locked: ImageFile,
    },
    /// On this device, which is there already.
    Device,
}

impl Target {
    /// Creates the image `name`. With `replace`, a file that exists gives way to it in [`Target::keep`].
    pub fn create(files: &Files, name: &ImageName, plan: &Plan, replace: bool) -> Result<Target, Failure> {
        let mut target = Target::begin(files, name, plan, replace)?;
        target.sync()?;
        Ok(target)
    }

    /// The same, not durable yet.
    fn begin(files: &Files, name: &ImageName, plan: &Plan, replace: bool) -> Result<Target, Failure> {
        let creation = lay_out(name, plan)?;
        let path = name.path().to_owned();
        let place = match if replace { lock_old(name)? } else { None } {
            Some((path, _locked)) => Place::Replaced { path, _locked },
            None if files.is_taken(&path) => return Err(Failure::said(FileOpenError::Exists { path })),
            None => Place::New(path),
        };
        let path = match &place {
            Place::Replaced { path, .. } => beside(path)?,
            _ => files.unnamed(name.path())?,
        };
        // The page cache takes any alignment; what is written here is synced below.
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let created = files.create_new(&path, options);
        let mut file = created.map_err(|error| Failure::said(as_named(error, name.path())))?;
        let (files, unkept) = (files.clone(), ImageName { path, ..name.clone() });
        let written = fill(&mut file, &creation, matches!(plan.shape, Shape::Fixed));
        let target = Target { files, name: unkept, place, unsynced: Some(file), kept: false };
        written.map_err(|error| {
            Failure::new(format!("write the new image {name}"), error).advise(target.files.what_is_left())
        })?;
        Ok(target)
    }

    /// The same, or on an existing block device of that name, which must be empty unless `force`.
    pub fn create_anywhere(files: &Files, name: &ImageName, plan: &Plan, force: bool) -> Result<Target, Failure> {
        let mut target = Target::begin_anywhere(files, name, plan, force)?;
        target.sync()?;
        Ok(target)
    }

    /// The same. A new file is not durable yet.
    pub fn begin_anywhere(files: &Files, name: &ImageName, plan: &Plan, force: bool) -> Result<Target, Failure> {
        let Some(mut found) = device::open(files, name)? else { return Target::begin(files, name, plan, force) };
        if name.format == FormatName::Vhd && matches!(plan.shape, Shape::Fixed) {
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

    /// The image to write to.
    pub fn name(&self) -> &ImageName {
        &self.name
    }

    /// Makes durable what was written to a new file.
    pub fn sync(&mut self) -> Result<(), Failure> {
        let Some(mut file) = self.unsynced.take() else { return Ok(()) };
        file.sync().map_err(|error| {
            Failure::new(format!("write the new image {}", self.name), error).advise(self.files.what_is_left())
        })
    }

    /// The image is complete and flushed: it is kept, under its final name.
    pub fn keep(mut self) -> Result<(), Failure> {
        self.give_name()?;
        self.sync_name()
    }

    /// Gives it its final name.
    pub fn give_name(&mut self) -> Result<(), Failure> {
        let path = match &self.place {
            Place::New(path) => {
                self.files.name_new(self.name.path(), path).map_err(Failure::said)?;
                path.clone()
            }
            Place::Replaced { path, .. } => {
                let failed = |error| Failure::new(format!("replace {} with {}", path.display(), self.name), error);
                std::fs::rename(self.name.path(), path).map_err(failed)?;
                // There is nothing else of that name any more.
                self.kept = true;
                path.clone()
            }
            Place::Device => return Ok(()),
        };
        self.name.path = path;
        Ok(())
    }

    /// Makes durable that it has its final name, under which it stays.
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

/// The same about the name that was asked for, which is what people know.
fn as_named(error: FileOpenError, named: &Path) -> FileOpenError {
    let path = named.to_owned();
    match error {
        FileOpenError::Failed { tried, source, .. } => FileOpenError::Failed { tried, path, source },
        FileOpenError::NotPermitted { wanted, why, .. } => FileOpenError::NotPermitted { path, wanted, why },
        other => other,
    }
}

/// The bytes of a new image.
pub fn lay_out(name: &ImageName, plan: &Plan) -> Result<Creation, Failure> {
    if name.data_file.is_some() {
        let why = "a new image cannot have an external data file";
        return Err(Failure::new(format!("create {name}"), why)
            .advise("omit 'data-file'; `qemu-img create -f qcow2 -o data_file=FILE` creates an image with one")
            .of_kind(Kind::Invalid));
    }
    match lay_out_as(name, plan)? {
        Laid::Raw => Raw::new(plan.len, 512, false).map(|_| Creation { len: plan.len, writes: Vec::new() }),
        Laid::Vhd(spec) => vhd::create(&spec),
        Laid::Qcow2(spec) => qcow2::create(&spec),
    }
    .map_err(|error| Failure::new(format!("create {name}"), error))
}

/// How a new image is laid out.
pub enum Laid {
    /// As the disk is.
    Raw,
    /// As a VHD.
    Vhd(vhd::Spec),
    /// As a qcow2 image.
    Qcow2(qcow2::Spec),
}

/// How a new image of that name is laid out.
pub fn lay_out_as(name: &ImageName, plan: &Plan) -> Result<Laid, Failure> {
    Ok(match name.format {
        FormatName::Raw => Laid::Raw,
        FormatName::Vhd => Laid::Vhd(vhd_spec(plan, identity(plan)?)),
        FormatName::Qcow2 => Laid::Qcow2(qcow2_spec(plan, identity(plan)?)),
        FormatName::Vmdk | FormatName::Vhdx | FormatName::Null | FormatName::Model => {
            let why = format!("{} images are only read", name.format);
            let failure = Failure::new(format!("create {name}"), why).of_kind(Kind::Invalid);
            return Err(failure.advise("create a qcow2, vhd or raw image"));
        }
    })
}

/// The identity of the new image.
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
        kind: match &plan.shape {
            Shape::Fixed => vhd::Kind::Fixed,
            Shape::Thin => vhd::Kind::Dynamic,
            Shape::Child(link) => vhd::Kind::Differencing(vhd::Parent::from(link)),
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
        parent: match &plan.shape {
            Shape::Child(link) => Some(link.clone()),
            Shape::Fixed | Shape::Thin => None,
        },
        compression: plan.compression,
    }
}

fn fill(file: &mut ImageFile, creation: &Creation, allocate: bool) -> std::io::Result<()> {
    file.set_len(creation.len)?;
    if allocate {
        // If the file system cannot reserve space, this fails, and so does the command, because the space was
        // requested.
        rustix::fs::fallocate(&*file, FallocateFlags::empty(), 0, creation.len)?;
    }
    write(file, creation)
}

/// Writes a new image into its empty file; everything is durable except the sectors that make it an image ([`Part`]).
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

/// The two parts of a new image. By its first sector, or its last one, which in a VHD repeats that, a file is taken for
/// an image: they are written when all else is durable, so that no crash leaves what opens as an image and shows
/// something else than the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Body,
    Head,
}

/// The writes of one part.
fn writes_of(creation: &Creation, wanted: Part) -> Vec<MetaWrite> {
    const SECTOR: u64 = 512;
    let (first, last) = (FileOffset(SECTOR), FileOffset(creation.len.saturating_sub(SECTOR)));
    let mut found = Vec::new();
    for write in &creation.writes {
        let mut at = write.at;
        let mut bytes = write.bytes.as_slice();
        while !bytes.is_empty() {
            // Up to the next of the two borders.
            let border = [first, last].into_iter().filter(|&border| border > at).min().unwrap_or(FileOffset(u64::MAX));
            let len = usize::try_from(border.saturating_sub(at)).unwrap_or(usize::MAX).min(bytes.len());
            let (piece, rest) = bytes.split_at(len);
            let part = if at < first || at >= last { Part::Head } else { Part::Body };
            if part == wanted {
                found.push(MetaWrite { at, bytes: piece.to_vec() });
            }
            at = at.saturating_add(u64::try_from(len).unwrap_or(u64::MAX));
            bytes = rest;
        }
    }
    found
}

/// Locks a regular file that is to be replaced: no process has it open as an image, nor can open it in the meantime.
fn lock_old(name: &ImageName) -> Result<Option<(PathBuf, ImageFile)>, Failure> {
    if !name.path().exists() {
        return Ok(None);
    }
    // The target of a link is replaced, not the link.
    let path = name.path().canonicalize().map_err(|error| Failure::new(format!("find {name}"), error))?;
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let locked = ImageFile::open(name.path(), options).map_err(Failure::said)?;
    if locked.device_len().is_some() {
        let why = "it is a block device, so no new file can be created next to it";
        return Err(Failure::new(format!("replace {name}"), why).advise("convert it to another target"));
    }
    Ok(Some((path, locked)))
}

/// Seconds since 1970.
pub fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The allocation unit of an image created on top of another, or to replace it: the same. qcow2 clusters smaller than
/// our minimum, which other programs create, become our minimum.
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
            shape: Shape::Child(link(format.word())),
            unit,
            compression: Compression::default(),
            identity,
        };
        lay_out(&ImageName { format, path: "/srv/b".into(), data_file: None }, &plan).unwrap()
    }

    /// What a program sees after a crashed creation: no image, or which one.
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

    /// It has the right parent, and all of the disk is the parent's.
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

    /// The states that a crash may leave while `unsynced` is written over `before`, and what becomes of each:
    /// exhaustive over which of the writes have landed whole; over single sectors, each alone, all but each, and each
    /// prefix.
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

    /// The passed file is empty, or already has its length.
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
