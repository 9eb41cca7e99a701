//! What is explored: images of each kind, small and with something in them.
//!
//! `kind` says of which layers. Knows how such an image is made, opened and checked; nothing of crashes.

mod kind;

use std::collections::BTreeMap;
use std::fmt;

use disk::qcow2::Qcow2;
use disk::raw::Raw;
use disk::vhd::{self, Parent, Spec, Vhd};
use disk::{Access, FileId, FileOffset, Image, ImageError, Link, ReadFault, Severity, ShapePolicy, Source, Tail};

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

/// How the bytes of a file are to be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Form {
    /// A raw image.
    Raw,
    /// A VHD of any kind.
    Vhd,
    /// A qcow2 image.
    Qcow2,
}

/// One layer of what a kind begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its form, and which kind of it.
    pub made: Made,
    /// What its first life writes and flushes.
    pub preparation: &'static str,
}

/// How a layer is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// A raw file of zeroes.
    Raw,
    /// A fixed VHD of zeroes.
    Fixed,
    /// A fixed VHD that holds [`IN_PARENT`]: what is in it is where it is, so that no code under test is needed to
    /// make it.
    Given,
    /// A dynamic VHD or, on another layer, a differencing one.
    Vhd,
    /// A differencing VHD with a misspelt locator, when its first life is over ([`misspell`]).
    MisspeltVhd,
    /// A qcow2 file, on another layer a child.
    Qcow2,
    /// The same, with a refcount block that has few counts left.
    FullQcow2,
    /// The same, with compressed clusters ([`compressed`]).
    CompressedQcow2,
    /// The same, with an internal snapshot ([`shared`]).
    SharedQcow2,
    /// The same, with extended L2 entries ([`subclusters`]).
    SubclusterQcow2,
    /// The same, with an external data file.
    DataFileQcow2,
    /// The same, with extended L2 entries and an external data file.
    SubclusterDataFileQcow2,
    /// A qcow2 file of version 2.
    OldQcow2,
    /// The same, with an internal snapshot.
    OldSharedQcow2,
}

impl Made {
    /// How layers of a format are made that has layers.
    pub fn of_format(format: &str) -> Option<Made> {
        match format {
            "vhd" => Some(Made::Vhd),
            "qcow2" => Some(Made::Qcow2),
            _ => None,
        }
    }

    /// What such a layer holds from the beginning; zeroes among it hide what is below.
    pub fn given(self) -> Vec<(u64, Word)> {
        match self {
            Made::Given => given().collect(),
            Made::CompressedQcow2 => compressed::given().collect(),
            Made::SharedQcow2 => shared::given(3).collect(),
            Made::OldSharedQcow2 => shared::given(2).collect(),
            Made::SubclusterQcow2 => subclusters::given().collect(),
            Made::Raw | Made::Fixed | Made::Vhd | Made::MisspeltVhd => Vec::new(),
            Made::Qcow2 | Made::FullQcow2 | Made::OldQcow2 => Vec::new(),
            Made::DataFileQcow2 | Made::SubclusterDataFileQcow2 => Vec::new(),
        }
    }

    /// Whether such a file takes more room as it is written to.
    fn is_sparse(self) -> bool {
        !matches!(self, Made::Raw | Made::Fixed | Made::Given)
    }

    /// How such a file is to be understood.
    pub fn form(self) -> Form {
        match self {
            Made::Raw => Form::Raw,
            Made::Fixed | Made::Given | Made::Vhd | Made::MisspeltVhd => Form::Vhd,
            Made::Qcow2 | Made::FullQcow2 | Made::CompressedQcow2 | Made::SubclusterQcow2 => Form::Qcow2,
            Made::DataFileQcow2 | Made::SubclusterDataFileQcow2 => Form::Qcow2,
            Made::SharedQcow2 | Made::OldQcow2 | Made::OldSharedQcow2 => Form::Qcow2,
        }
    }
}

/// A kind of image on a kind of storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// The kind of image.
    pub kind: Kind,
    /// What the storage holds where nobody wrote.
    pub tail: Unwritten,
    /// What the format is told of it; another only for a planted bug.
    pub told: Unwritten,
    /// What the storage writes whole or not at all, and takes nothing smaller than: [`SECTOR`], or [`LARGE`].
    pub unit: u64,
    /// How large a device is: storage that holds rubbish where nobody wrote.
    pub device: Device,
    /// How transfers are split and merged on their way to it.
    pub shape: ShapePolicy,
}

/// How large a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Device {
    /// As large as anybody needs.
    Roomy,
    /// So small that the disk does not fit: there is room for one block, or for some clusters.
    Small,
    /// The same, and the format believes in more: only for a planted bug.
    Mistaken,
}

/// The sectors that some drives have.
pub const LARGE: u64 = 4096;

/// Files, leaf first, and what the disk they make holds; zero where nothing is said.
#[derive(Clone, Debug, Default)]
pub struct Start {
    /// The files.
    pub files: Vec<Media>,
    /// How each is to be understood.
    pub forms: Vec<Form>,
    /// The content.
    pub base: BTreeMap<u64, Words>,
}

/// Bytes that a small device has behind a new image: a block of a VHD, and half of one.
const ROOM: u64 = 3 * BLOCK * SECTOR / 2;

/// A device that seems to be longer than it is, by zeroes in front of its last sector.
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

/// Clusters of a new image whose first refcount block has few counts left: what a preparation takes, and one more.
const FULL: u64 = COUNTED - 6;
/// Sectors of the parent that hold data: in each of its blocks, some before and some behind those that the leaf's
/// workloads touch.
const IN_PARENT: [(u64, u64); 4] = [(0, 10), (BLOCK - 2, 4), (BLOCK + 9, 2), (2 * BLOCK, 3)];

/// The identity of the `number`th image, from the base up.
fn identity(number: u8) -> [u8; 16] {
    [0xb0 | number; 16]
}

impl fmt::Display for Subject {
    /// The arguments of the command that explores just this.
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
    /// A subject whose format knows what it stands on.
    pub fn new(kind: Kind, tail: Unwritten) -> Subject {
        Subject { kind, tail, told: tail, unit: SECTOR, device: Device::Roomy, shape: ShapePolicy::default() }
    }

    /// The same with transfers that are split into pieces of so many bytes, and merged up to so many.
    pub fn shaped(self, split: Option<u64>, merge: Option<u64>) -> Subject {
        Subject { shape: ShapePolicy { split, merge }, ..self }
    }

    /// The same with transfers that are split, merged or both.
    pub fn shaped_at_random(self, random: &mut Random) -> Subject {
        let sectors = |count: u64| Some(count * SECTOR);
        let split = [None, sectors(1), sectors(2), sectors(8)][random.index(4)];
        let merge = [None, sectors(2), sectors(8), sectors(64)][random.index(4)];
        self.shaped(split, merge)
    }

    /// The same on storage of [`LARGE`] sectors. `None`: a raw image that becomes longer, with zeroes, is a file, and
    /// lies on none of the devices that hold rubbish.
    pub fn on_large_sectors(self) -> Option<Subject> {
        let grows = self.kind != Kind::Raw && self.kind.layers().iter().any(|layer| layer.made == Made::Raw);
        (self.tail == Unwritten::Zeroes || !grows).then_some(Subject { unit: LARGE, ..self })
    }

    /// The same on a device on which the disk does not fit. `None`: something is written to it before, or it is a file,
    /// or is done to that takes room and may not fail.
    pub fn on_small_device(self) -> Option<Subject> {
        let is_new =
            self.kind.layers().first().is_some_and(|leaf| leaf.preparation.is_empty() && leaf.made.is_sparse());
        let fits = self.tail == Unwritten::Stale && self.kind.theme() == Theme::Image && is_new;
        fits.then_some(Subject { device: Device::Small, ..self })
    }

    /// Bytes of a device whose image begins with so many.
    fn device_len(&self, begins_with: u64) -> u64 {
        match self.device {
            Device::Roomy => DEVICE,
            Device::Small | Device::Mistaken => (begins_with + ROOM).next_multiple_of(LARGE),
        }
    }

    /// A new file for a disk of `sectors` that is made in such a way: the `number`th, on a parent that it records so.
    pub fn create(&self, made: Made, number: usize, parent: Option<&Link>, sectors: u64) -> Result<Media, ImageError> {
        let uuid = identity(u8::try_from(number).unwrap_or(u8::MAX));
        match made {
            Made::Raw => {
                // A raw image is whatever its storage is; it begins as zeros so that there is something to say.
                let mut media = Media::empty(self.tail);
                media.set_len(sectors * SECTOR);
                media.zero(0, sectors);
                Ok(media)
            }
            Made::Fixed => self.image(vhd::Kind::Fixed, uuid, sectors),
            Made::Given => {
                let mut media = self.image(vhd::Kind::Fixed, uuid, sectors)?;
                for (sector, word) in given() {
                    media.set(sector, Sector::Word(word));
                }
                Ok(media)
            }
            Made::Vhd | Made::MisspeltVhd => {
                let child_of = |parent| vhd::Kind::Differencing(Parent::from(parent));
                self.image(parent.map_or(vhd::Kind::Dynamic, child_of), uuid, sectors)
            }
            // A qcow2 file of clusters as small as those explored here has no room for more than a name.
            Made::Qcow2
            | Made::FullQcow2
            | Made::CompressedQcow2
            | Made::SharedQcow2
            | Made::SubclusterQcow2
            | Made::DataFileQcow2
            | Made::SubclusterDataFileQcow2
            | Made::OldQcow2
            | Made::OldSharedQcow2 => Ok(self.create_qcow2(made, parent.is_some(), sectors)),
        }
    }

    /// The same on the files that there are.
    pub fn create_above(&self, made: Made, below: &Start) -> Result<Media, ImageError> {
        let (number, sectors) = (below.files.len(), self.kind.sectors());
        let (Some(file), Some(form)) = (below.files.first(), below.forms.first()) else {
            return self.create(made, number, None, sectors);
        };
        let parent = self.open_one(&mut file.clone(), *form, Access::ReadOnly)?;
        let parent_file = FileId(u8::try_from(number - 1).unwrap_or(u8::MAX));
        self.create(made, number, Some(&link::to(&parent, parent_file, Some(file.modified()))), sectors)
    }

    /// A new VHD of `sectors`.
    fn image(&self, kind: vhd::Kind, uuid: [u8; 16], sectors: u64) -> Result<Media, ImageError> {
        let block_size = u32::try_from(BLOCK * SECTOR).unwrap_or(u32::MAX);
        let fixed = kind == vhd::Kind::Fixed;
        let creation = vhd::create(&Spec { len: sectors * SECTOR, kind, block_size, uuid, created: 1_000_000_000 })?;
        let mut media = Media::empty(self.tail);
        // A device is as large as it is; a fixed image fills it.
        let is_device = self.tail == Unwritten::Stale && !fixed;
        media.set_len(if is_device { self.device_len(creation.len) } else { creation.len });
        if fixed {
            // What is not written at creation is to read as zero, whatever the storage held.
            media.zero(0, sectors);
        }
        for write in creation.writes {
            media.write(write.at, &write.bytes);
        }
        Ok(media)
    }

    fn create_qcow2(&self, made: Made, is_child: bool, sectors: u64) -> Media {
        let parent = is_child.then_some("base");
        let used = if made == Made::FullQcow2 { FULL } else { 0 };
        let version = if matches!(made, Made::OldQcow2 | Made::OldSharedQcow2) { 2 } else { 3 };
        let holds = match made {
            Made::CompressedQcow2 => Holds::Compressed,
            Made::SharedQcow2 | Made::OldSharedQcow2 => Holds::Snapshot,
            Made::SubclusterQcow2 => Holds::Subclusters,
            Made::DataFileQcow2 => Holds::DataFile,
            Made::SubclusterDataFileQcow2 => Holds::SubclustersInDataFile,
            _ => Holds::Nothing,
        };
        let mut media = qcow2::create(&qcow2::Spec { sectors, parent, version, used, holds }, self.tail);
        if self.tail == Unwritten::Stale {
            media.set_len(self.device_len(holds.bytes()));
        }
        media
    }

    /// Plants the bug's part that lies in how the image is opened.
    pub fn plant(self, bug: Option<Planted>) -> Subject {
        match bug {
            // One that has blocks to give up.
            Some(Planted::UnprovenPlace) => Subject::new(Kind::Used, Unwritten::Stale),
            Some(Planted::TrustedTail) => Subject { tail: Unwritten::Stale, told: Unwritten::Zeroes, ..self },
            // On a device: what is at a file's end is refused by the storage itself unless it is alone.
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

    /// Opens the files as a chain, leaf first, the first `writable` of them for writing.
    pub fn open(&self, files: &mut [Media], forms: &[Form], writable: usize) -> Result<Vec<Image>, ImageError> {
        let access = |layer| if layer < writable { Access::ReadWrite } else { Access::ReadOnly };
        let files = files.iter_mut().zip(forms).enumerate();
        files.map(|(layer, (file, form))| self.open_one(file, *form, access(layer))).collect()
    }

    /// Opens one file.
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

/// Gives the locator of a new differencing VHD the code that Tapline wrote once, and its header the sum that goes with
/// it.
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

/// What a layer that is made so holds from the beginning.
fn given() -> impl Iterator<Item = (u64, Word)> {
    let sectors = IN_PARENT.into_iter().flat_map(|(at, count)| at..at + count);
    sectors.map(|sector| (sector, Word::guest(PARENTS, sector)))
}

/// What is damaged in a file, if anything. Leaks are no damage, nor is what the redundancy of a VHD mends.
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
