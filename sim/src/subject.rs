//! The images to explore: each kind is small and contains data.
//!
//! `kind` defines their layers. This module creates, opens and checks such images; it knows nothing about crashes.

mod kind;

use std::collections::BTreeMap;
use std::fmt;

use disk::qcow2::Qcow2;
use disk::raw::Raw;
use disk::vhd::{self, Parent, Spec, Vhd};
use disk::{Access, FileId, FileOffset, Image, ImageError, Link, ReadFault, Severity, ShapePolicy, Source, Tail};

use crate::changes::Tracked;
use crate::cluster::{COUNTED, DEVICE};
use crate::compressed;
use crate::link;
use crate::media::{Media, Unwritten};
use crate::planted::Planted;
use crate::qcow2::{self, Holds};
use crate::random::Random;
use crate::sector::{PARENTS, SECTOR, Sector, Word, Words};
use crate::shared;
use crate::subclusters;
use crate::theme::{BLOCK, Theme};

pub use kind::Kind;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// A raw image.
    Raw,
    /// A VHD of any type.
    Vhd,
    /// A qcow2 image.
    Qcow2,
}

/// A layer of the initial chain of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// How the layer is created.
    pub made: LayerType,
    /// The workload that its first life writes and flushes.
    pub preparation: &'static str,
}

/// How a layer is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// A raw file with zeroes.
    Raw,
    /// A fixed VHD with zeroes.
    Fixed,
    /// A fixed VHD with the data of [`IN_PARENT`], laid out without the code under test.
    Given,
    /// A dynamic VHD or, on another layer, a differencing VHD.
    Vhd,
    /// A differencing VHD whose locator is misspelt after its first life ([`misspell`]).
    MisspeltVhd,
    /// A qcow2 file; on another layer, a child.
    Qcow2,
    /// A qcow2 file whose first refcount block is nearly full.
    FullQcow2,
    /// A qcow2 file with compressed clusters ([`compressed`]).
    CompressedQcow2,
    /// A qcow2 file with an internal snapshot ([`shared`]).
    SharedQcow2,
    /// A qcow2 file with extended L2 entries ([`subclusters`]).
    SubclusterQcow2,
    /// A qcow2 file with an external data file.
    DataFileQcow2,
    /// A qcow2 file with extended L2 entries and an external data file.
    SubclusterDataFileQcow2,
    /// A qcow2 file of version 2.
    OldQcow2,
    /// A qcow2 file of version 2 with an internal snapshot.
    OldSharedQcow2,
}

impl LayerType {
    /// How layers of a format are created; `None` if it has no layers.
    pub fn of_format(format: &str) -> Option<LayerType> {
        match format {
            "vhd" => Some(LayerType::Vhd),
            "qcow2" => Some(LayerType::Qcow2),
            _ => None,
        }
    }

    /// The initial content of such a layer; zeroes in it hide the parent.
    pub fn given(self) -> Vec<(u64, Word)> {
        match self {
            LayerType::Given => given().collect(),
            LayerType::CompressedQcow2 => compressed::given().collect(),
            LayerType::SharedQcow2 => shared::given(3).collect(),
            LayerType::OldSharedQcow2 => shared::given(2).collect(),
            LayerType::SubclusterQcow2 => subclusters::given().collect(),
            LayerType::Raw | LayerType::Fixed | LayerType::Vhd | LayerType::MisspeltVhd => Vec::new(),
            LayerType::Qcow2 | LayerType::FullQcow2 | LayerType::OldQcow2 => Vec::new(),
            LayerType::DataFileQcow2 | LayerType::SubclusterDataFileQcow2 => Vec::new(),
        }
    }

    /// Whether such a file grows when it is written to.
    fn is_sparse(self) -> bool {
        !matches!(self, LayerType::Raw | LayerType::Fixed | LayerType::Given)
    }

    /// The format of such a file.
    pub fn form(self) -> Form {
        match self {
            LayerType::Raw => Form::Raw,
            LayerType::Fixed | LayerType::Given | LayerType::Vhd | LayerType::MisspeltVhd => Form::Vhd,
            LayerType::Qcow2 | LayerType::FullQcow2 | LayerType::CompressedQcow2 | LayerType::SubclusterQcow2 => {
                Form::Qcow2
            }
            LayerType::DataFileQcow2 | LayerType::SubclusterDataFileQcow2 => Form::Qcow2,
            LayerType::SharedQcow2 | LayerType::OldQcow2 | LayerType::OldSharedQcow2 => Form::Qcow2,
        }
    }
}

/// A kind of image on a kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// The kind of image.
    pub kind: Kind,
    /// The content of unwritten sectors of the storage.
    pub tail: Unwritten,
    /// The same as passed to the format; differs only for a planted bug.
    pub told: Unwritten,
    /// The unit of the storage in bytes, which is the smallest write and atomic: [`SECTOR`] or [`LARGE`].
    pub unit: u64,
    /// The size of a device, for storage with stale unwritten sectors.
    pub device: Device,
    /// How transfers are split and merged.
    pub shape: ShapePolicy,
}

/// The size of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// Larger than any disk needs.
    Roomy,
    /// Too small for the disk: there is room for one block, or for some clusters.
    Small,
    /// Too small, but reported to the format as larger, for a planted bug.
    Mistaken,
}

/// The size of large sectors in bytes.
pub const LARGE: u64 = 4096;

/// The files of a chain, leaf first, and the content of their disk; zero where nothing is recorded.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// The files, leaf first.
    pub files: Vec<Media>,
    /// The format of each file.
    pub forms: Vec<Form>,
    /// The content of the disk.
    pub base: BTreeMap<u64, Words>,
    /// The map of changed blocks, and what it must name.
    pub map: Option<(Media, Tracked)>,
}

/// Bytes of a small device after a new image: one and a half blocks of a VHD.
const ROOM: u64 = 3 * BLOCK * SECTOR / 2;

/// A device that seems to be longer than it is, by zeroes before its last sector.
struct Longer<'a> {
    file: &'a mut dyn Source,
    by: u64,
}

impl Source for Longer<'_> {
    fn has_data_file(&self) -> bool {
        self.file.has_data_file()
    }

    fn len(&self) -> u64 {
        self.file.len() + self.by
    }

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        if self.by == 0 || at.0 >= self.len() - SECTOR {
            return self.file.read_at(at - self.by, bytes);
        }
        let there = (self.file.len() - SECTOR).saturating_sub(at.0);
        let (there, behind) = bytes.split_at_mut(bytes.len().min(usize::try_from(there).unwrap_or(0)));
        behind.fill(0);
        if there.is_empty() { Ok(()) } else { self.file.read_at(at, there) }
    }
}

/// Clusters used in a new image whose first refcount block is nearly full: it has room for a preparation and one more
/// cluster.
const FULL: u64 = COUNTED - 6;
/// Sectors of the parent with data: in each of its blocks, some before and some after those that the leaf's workloads
/// touch.
const IN_PARENT: [(u64, u64); 4] = [(0, 10), (BLOCK - 2, 4), (BLOCK + 9, 2), (2 * BLOCK, 3)];

/// The UUID of the `number`th image, counted from the base.
fn identity(number: u8) -> [u8; 16] {
    [0xb0 | number; 16]
}

impl fmt::Display for Subject {
    /// The arguments of the command that explores this subject.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Subject { kind, tail, unit, device, shape, .. } = self;
        let tail = if *tail == Unwritten::Stale { "stale" } else { "zeroes" };
        write!(f, "--format {} --kind {kind} --tail {tail}", kind.format())?;
        if *unit > SECTOR {
            write!(f, " --unit {unit}")?;
        }
        shape.split.map_or(Ok(()), |piece| write!(f, " --split {piece}"))?;
        shape.merge.map_or(Ok(()), |most| write!(f, " --merge {most}"))?;
        if *device == Device::Roomy { Ok(()) } else { write!(f, " --small-device") }
    }
}

impl Subject {
    /// A subject whose format is given the actual state of unwritten storage.
    pub fn new(kind: Kind, tail: Unwritten) -> Subject {
        Subject { kind, tail, told: tail, unit: SECTOR, device: Device::Roomy, shape: ShapePolicy::default() }
    }

    /// The subject with transfers split into pieces of `split` bytes and merged up to `merge` bytes.
    pub fn shaped(self, split: Option<u64>, merge: Option<u64>) -> Subject {
        Subject { shape: ShapePolicy { split, merge }, ..self }
    }

    /// The subject with transfers that are split, merged or both, at random.
    pub fn shaped_at_random(self, random: &mut Random) -> Subject {
        let sectors = |count: u64| Some(count * SECTOR);
        let split = [None, sectors(1), sectors(2), sectors(8)][random.index(4)];
        let merge = [None, sectors(2), sectors(8), sectors(64)][random.index(4)];
        self.shaped(split, merge)
    }

    /// The subject on storage with [`LARGE`] sectors; `None` for a growing raw image, which must be a file, whose
    /// unwritten sectors are zero.
    pub fn on_large_sectors(self) -> Option<Subject> {
        let grows = self.kind != Kind::Raw && self.kind.layers().iter().any(|layer| layer.made == LayerType::Raw);
        (self.tail == Unwritten::Zeroes || !grows).then_some(Subject { unit: LARGE, ..self })
    }

    /// The subject on a device that is too small; `None` if it has a preparation, is a file, or needs space that must
    /// not run out.
    pub fn on_small_device(self) -> Option<Subject> {
        let is_new =
            self.kind.layers().first().is_some_and(|leaf| leaf.preparation.is_empty() && leaf.made.is_sparse());
        let fits = self.tail == Unwritten::Stale && self.kind.theme() == Theme::Image && is_new;
        fits.then_some(Subject { device: Device::Small, ..self })
    }

    /// Size in bytes of a device with an image of this initial size.
    fn device_len(&self, begins_with: u64) -> u64 {
        match self.device {
            Device::Roomy => DEVICE,
            Device::Small | Device::Mistaken => (begins_with + ROOM).next_multiple_of(LARGE),
        }
    }

    /// Creates the `number`th file, for a disk of `sectors`, with a link to its parent.
    pub fn create(
        &self,
        made: LayerType,
        number: usize,
        parent: Option<&Link>,
        sectors: u64,
    ) -> Result<Media, ImageError> {
        let uuid = identity(u8::try_from(number).unwrap_or(u8::MAX));
        match made {
            LayerType::Raw => {
                // An unwritten raw image has the content of its storage; it begins as zeros to have a known one.
                let mut media = Media::empty(self.tail);
                media.set_len(sectors * SECTOR);
                media.zero(0, sectors);
                Ok(media)
            }
            LayerType::Fixed => self.image(vhd::Kind::Fixed, uuid, sectors),
            LayerType::Given => {
                let mut media = self.image(vhd::Kind::Fixed, uuid, sectors)?;
                for (sector, word) in given() {
                    media.set(sector, Sector::Word(word));
                }
                Ok(media)
            }
            LayerType::Vhd | LayerType::MisspeltVhd => {
                let child_of = |parent| vhd::Kind::Differencing(Parent::from(parent));
                self.image(parent.map_or(vhd::Kind::Dynamic, child_of), uuid, sectors)
            }
            // A qcow2 file with clusters as small as here has room only for the parent's name.
            LayerType::Qcow2
            | LayerType::FullQcow2
            | LayerType::CompressedQcow2
            | LayerType::SharedQcow2
            | LayerType::SubclusterQcow2
            | LayerType::DataFileQcow2
            | LayerType::SubclusterDataFileQcow2
            | LayerType::OldQcow2
            | LayerType::OldSharedQcow2 => Ok(self.create_qcow2(made, parent.is_some(), sectors)),
        }
    }

    /// Creates a file on an existing chain.
    pub fn create_above(&self, made: LayerType, below: &Start) -> Result<Media, ImageError> {
        let (number, sectors) = (below.files.len(), self.kind.sectors());
        let (Some(file), Some(form)) = (below.files.first(), below.forms.first()) else {
            return self.create(made, number, None, sectors);
        };
        let parent = self.open_one(&mut file.clone(), *form, Access::ReadOnly)?;
        let parent_file = FileId(u8::try_from(number - 1).unwrap_or(u8::MAX));
        self.create(made, number, Some(&link::to(&parent, parent_file, Some(file.modified()))), sectors)
    }

    /// Creates a VHD of `sectors`.
    fn image(&self, kind: vhd::Kind, uuid: [u8; 16], sectors: u64) -> Result<Media, ImageError> {
        let block_size = u32::try_from(BLOCK * SECTOR).unwrap_or(u32::MAX);
        let fixed = kind == vhd::Kind::Fixed;
        let creation = vhd::create(&Spec { len: sectors * SECTOR, kind, block_size, uuid, created: 1_000_000_000 })?;
        let mut media = Media::empty(self.tail);
        // A device has a fixed size, which a fixed image fills.
        let is_device = self.tail == Unwritten::Stale && !fixed;
        media.set_len(if is_device { self.device_len(creation.len) } else { creation.len });
        if fixed {
            // Sectors not written at creation must read as zero, whatever the storage contains.
            media.zero(0, sectors);
        }
        for write in creation.writes {
            media.write(write.at, &write.bytes);
        }
        Ok(media)
    }

    fn create_qcow2(&self, made: LayerType, is_child: bool, sectors: u64) -> Media {
        let parent = is_child.then_some("base");
        let used = if made == LayerType::FullQcow2 { FULL } else { 0 };
        let version = if matches!(made, LayerType::OldQcow2 | LayerType::OldSharedQcow2) { 2 } else { 3 };
        let holds = match made {
            LayerType::CompressedQcow2 => Holds::Compressed,
            LayerType::SharedQcow2 | LayerType::OldSharedQcow2 => Holds::Snapshot,
            LayerType::SubclusterQcow2 => Holds::Subclusters,
            LayerType::DataFileQcow2 => Holds::DataFile,
            LayerType::SubclusterDataFileQcow2 => Holds::SubclustersInDataFile,
            _ => Holds::Nothing,
        };
        let mut media = qcow2::create(&qcow2::Spec { sectors, parent, version, used, holds }, self.tail);
        if self.tail == Unwritten::Stale {
            media.set_len(self.device_len(holds.bytes()));
        }
        media
    }

    /// Applies the part of a bug that concerns how the image is opened.
    pub fn plant(self, bug: Option<Planted>) -> Subject {
        match bug {
            // A kind with blocks to free.
            Some(Planted::UnprovenPlace) => Subject::new(Kind::Used, Unwritten::Stale),
            Some(Planted::TrustedTail) => Subject { tail: Unwritten::Stale, told: Unwritten::Zeroes, ..self },
            // On a device, because the storage rejects concurrent writes at a file's end.
            Some(Planted::UnitNotAlone) => {
                Subject { unit: LARGE, tail: Unwritten::Stale, told: Unwritten::Stale, ..self }
            }
            Some(Planted::DeviceEndForgotten) => {
                let subject = Subject::new(self.kind, Unwritten::Stale).on_small_device().unwrap_or(self);
                Subject { device: Device::Mistaken, ..subject }
            }
            Some(Planted::UnitAnsweredEarly) => Subject { unit: LARGE, ..self },
            Some(Planted::SplitAnsweredEarly) => self.shaped(Some(SECTOR), None),
            Some(Planted::FailedPartHidden) => self.shaped(None, Some(LARGE)),
            _ => self,
        }
    }

    /// Opens the files as a chain, leaf first; the first `writable` of them for writing.
    pub fn open(&self, files: &mut [Media], forms: &[Form], writable: usize) -> Result<Vec<Image>, ImageError> {
        let access = |layer| if layer < writable { Access::ReadWrite } else { Access::ReadOnly };
        let files = files.iter_mut().zip(forms).enumerate();
        files.map(|(layer, (file, form))| self.open_one(file, *form, access(layer))).collect()
    }

    /// Opens one file as an image.
    pub fn open_one(&self, file: &mut dyn Source, form: Form, access: Access) -> Result<Image, ImageError> {
        let mut longer = Longer { file, by: if self.device == Device::Mistaken { 4 * ROOM } else { 0 } };
        let file = &mut longer;
        let tail = match self.told {
            Unwritten::Zeroes => Tail::Zeroes,
            Unwritten::Stale => Tail::Stale,
        };
        Ok(match form {
            Form::Raw => Image::Raw(Raw::new(file.len(), 512, access == Access::ReadOnly)?),
            Form::Vhd => Image::Vhd(Box::new(Vhd::open(file, access, tail)?)),
            Form::Qcow2 => Image::Qcow2(Box::new(Qcow2::open(file, access, tail)?)),
        })
    }
}

/// Gives the locator of a new differencing VHD the wrong code that Tapline once wrote, with a matching header checksum.
pub fn misspell(file: &mut Media) {
    const HEADER_AT: u64 = 512;
    let mut header = [0; 1024];
    let read = file.read_at(FileOffset(HEADER_AT), &mut header);
    let code = header.windows(4).position(|bytes| bytes == b"MacX").filter(|_| read.is_ok());
    let Some(place) = code.and_then(|at| header.get_mut(at..at + 4)) else { panic!("the child has no locator") };
    place.copy_from_slice(b"MACX");
    header[36..40].fill(0);
    let sum = header.iter().fold(0u32, |sum, &byte| sum.wrapping_add(byte.into()));
    header[36..40].copy_from_slice(&(!sum).to_be_bytes());
    file.write(FileOffset(HEADER_AT), &header);
}

/// The initial content of such a layer.
fn given() -> impl Iterator<Item = (u64, Word)> {
    let sectors = IN_PARENT.into_iter().flat_map(|(at, count)| at..at + count);
    sectors.map(|sector| (sector, Word::guest(PARENTS, sector)))
}

/// The damage of a file, if any. Leaks are not damage, nor is what a VHD's redundancy repairs.
pub fn damage(file: &mut Media, form: Form) -> Option<String> {
    let (problems, tolerated) = match form {
        Form::Raw => return None,
        Form::Vhd => (vhd::check(file, Tail::Zeroes).map(|report| report.problems), Severity::Repairable),
        Form::Qcow2 => (disk::qcow2::check(file).map(|report| report.problems), Severity::Leak),
    };
    match problems {
        Ok(problems) => {
            let damage = problems.into_iter().find(|problem| problem.severity > tolerated);
            damage.map(|problem| format!("{} (at byte {})", problem.what, problem.at))
        }
        Err(error) => Some(error.to_string()),
    }
}
