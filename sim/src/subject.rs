//! What is explored: images of each kind, small and with something in them.
//!
//! Knows how such an image is made, opened and checked; nothing of crashes.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use disk::qcow2::Qcow2;
use disk::raw::Raw;
use disk::vhd::{self, Parent, Spec, Vhd};
use disk::{Access, Image, ImageError, Severity, Source, Tail};

use crate::media::{Media, Unwritten};
use crate::packed;
use crate::planted::Planted;
use crate::qcow2::{self, COUNTED};
use crate::sector::{PARENTS, SECTOR, Sector, Word, Words};
use crate::theme::{BLOCK, Theme};

/// A kind of image, or of chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A raw file.
    Raw,
    /// A fixed VHD.
    Fixed,
    /// A new dynamic VHD.
    Dynamic,
    /// A dynamic VHD whose first and last blocks hold data.
    Used,
    /// A new differencing VHD on a parent that holds data.
    Child,
    /// The same with some sectors of its own in the first and last blocks.
    UsedChild,
    /// The same as Tapline made them once: opening it for writing mends its header.
    MisspeltChild,
    /// A raw file that grows.
    GrowingRaw,
    /// A new qcow2 file.
    Qcow2,
    /// A qcow2 file that holds data, and whose first refcount block is nearly full.
    UsedQcow2,
    /// A new qcow2 file on a parent that holds data.
    ChildQcow2,
    /// The same with some clusters of its own.
    UsedChildQcow2,
    /// A qcow2 file with compressed clusters, and one that reads as zero and has a place.
    PackedQcow2,
    /// The same on a parent that holds data.
    PackedChildQcow2,
    /// A VHD on a VHD, both used: to be merged.
    VhdOnVhd,
    /// A new VHD on a used one.
    NewVhdOnVhd,
    /// A new qcow2 file on a used one.
    NewQcow2OnQcow2,
    /// A qcow2 file with compressed clusters on a used one.
    PackedOnQcow2,
    /// A used qcow2 file on one with compressed clusters.
    Qcow2OnPacked,
    /// A VHD on a raw file.
    VhdOnRaw,
    /// A qcow2 file on another.
    Qcow2OnQcow2,
    /// A qcow2 file on a raw one.
    Qcow2OnRaw,
    /// A VHD on a qcow2 file.
    VhdOnQcow2,
    /// A qcow2 file on a VHD.
    Qcow2OnVhd,
    /// A VHD on a qcow2 file on a raw one.
    VhdOnQcow2OnRaw,
    /// A qcow2 file on a VHD on a raw file.
    Qcow2OnVhdOnRaw,
}

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
    /// The same, with compressed clusters ([`packed`]).
    PackedQcow2,
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
            Made::PackedQcow2 => packed::given().collect(),
            Made::Raw | Made::Fixed | Made::Vhd | Made::MisspeltVhd | Made::Qcow2 | Made::FullQcow2 => Vec::new(),
        }
    }

    /// How such a file is to be understood.
    pub fn form(self) -> Form {
        match self {
            Made::Raw => Form::Raw,
            Made::Fixed | Made::Given | Made::Vhd | Made::MisspeltVhd => Form::Vhd,
            Made::Qcow2 | Made::FullQcow2 | Made::PackedQcow2 => Form::Qcow2,
        }
    }
}

const fn layer(made: Made, preparation: &'static str) -> Layer {
    Layer { made, preparation }
}

/// What the first life of a leaf and of its parent wrote, where the two are to be merged: in the same block and each
/// alone, and on both sides of a grain's border.
const IN_SOURCE: &str = "w1+2 w4094+4 w2050+1 f";
const IN_TARGET: &str = "w0+2 w6+2 w4095+4 w1030+1 f";
/// The same of a layer below both, with something that neither hides.
const IN_BASE: &str = "w0+9 w1030+2 w4090+10 f";

impl Kind {
    /// Those of a format.
    pub fn of_format(format: &str) -> Option<&'static [Kind]> {
        match format {
            "raw" => Some(&[Kind::Raw, Kind::GrowingRaw]),
            "vhd" => Some(&[Kind::Dynamic, Kind::Used, Kind::Child, Kind::UsedChild, Kind::MisspeltChild, Kind::Fixed]),
            "qcow2" => Some(&[
                Kind::Qcow2,
                Kind::UsedQcow2,
                Kind::ChildQcow2,
                Kind::UsedChildQcow2,
                Kind::PackedQcow2,
                Kind::PackedChildQcow2,
            ]),
            "chain" => Some(&[
                Kind::VhdOnVhd,
                Kind::VhdOnRaw,
                Kind::Qcow2OnQcow2,
                Kind::Qcow2OnRaw,
                Kind::PackedOnQcow2,
                Kind::Qcow2OnPacked,
                Kind::VhdOnQcow2,
                Kind::Qcow2OnVhd,
                Kind::VhdOnQcow2OnRaw,
                Kind::Qcow2OnVhdOnRaw,
            ]),
            _ => None,
        }
    }

    /// The format's name.
    pub fn format(self) -> &'static str {
        match self {
            Kind::Raw | Kind::GrowingRaw => "raw",
            Kind::Qcow2 | Kind::UsedQcow2 | Kind::ChildQcow2 | Kind::UsedChildQcow2 => "qcow2",
            Kind::PackedQcow2 | Kind::PackedChildQcow2 => "qcow2",
            Kind::VhdOnVhd | Kind::VhdOnRaw | Kind::Qcow2OnQcow2 | Kind::Qcow2OnRaw => "chain",
            Kind::NewVhdOnVhd | Kind::NewQcow2OnQcow2 | Kind::PackedOnQcow2 | Kind::Qcow2OnPacked => "chain",
            Kind::VhdOnQcow2 | Kind::Qcow2OnVhd | Kind::VhdOnQcow2OnRaw | Kind::Qcow2OnVhdOnRaw => "chain",
            Kind::Fixed | Kind::Dynamic | Kind::Used | Kind::Child | Kind::UsedChild | Kind::MisspeltChild => "vhd",
        }
    }

    /// Whether its layers are of VHD and of qcow2.
    pub fn is_mixed(self) -> bool {
        let forms: Vec<Form> = self.layers().iter().map(|layer| layer.made.form()).collect();
        self.theme() == Theme::Chain && forms.contains(&Form::Vhd) && forms.contains(&Form::Qcow2)
    }

    /// Whether some layer has compressed clusters.
    pub fn is_packed(self) -> bool {
        self.layers().iter().any(|layer| layer.made == Made::PackedQcow2)
    }

    /// Whether it is a chain of so many layers that all of its workloads are too many.
    pub fn is_deep(self) -> bool {
        self.layers().len() > 2
    }

    /// How a new leaf is made on top of a layer of such a form: alike or, in a mixed chain, by turns.
    pub fn leaf_on(self, below: Form) -> Made {
        match (below, self.is_mixed()) {
            (Form::Raw | Form::Vhd, false) | (Form::Raw | Form::Qcow2, true) => Made::Vhd,
            (Form::Qcow2, false) | (Form::Vhd, true) => Made::Qcow2,
        }
    }

    /// What its workloads are about.
    pub fn theme(self) -> Theme {
        match self.format() {
            "chain" => Theme::Chain,
            "qcow2" => Theme::Growing,
            "raw" if self == Kind::GrowingRaw => Theme::Growing,
            _ => Theme::Image,
        }
    }

    /// Sectors of its disk.
    pub fn sectors(self) -> u64 {
        self.theme().sectors()
    }

    /// Sectors of its disk when it has been made larger.
    pub fn grown(self) -> u64 {
        self.theme().grown()
    }

    /// Its layers, leaf first.
    pub fn layers(self) -> Vec<Layer> {
        match self {
            Kind::Raw | Kind::GrowingRaw => vec![layer(Made::Raw, "")],
            Kind::Fixed => vec![layer(Made::Fixed, "")],
            Kind::Dynamic => vec![layer(Made::Vhd, "")],
            Kind::Used => vec![layer(Made::Vhd, "w0+6 w2050+2 f")],
            Kind::Child => vec![layer(Made::Vhd, ""), layer(Made::Given, "")],
            Kind::UsedChild => vec![layer(Made::Vhd, "w1+2 w5+1 w2049+1 f"), layer(Made::Given, "")],
            Kind::MisspeltChild => {
                vec![layer(Made::MisspeltVhd, "w1+2 w5+1 w2049+1 f"), layer(Made::Given, "")]
            }
            Kind::Qcow2 => vec![layer(Made::Qcow2, "")],
            Kind::UsedQcow2 => vec![layer(Made::FullQcow2, "w0+6 w2050+2 f")],
            Kind::ChildQcow2 => vec![layer(Made::Qcow2, ""), layer(Made::Given, "")],
            Kind::UsedChildQcow2 => vec![layer(Made::Qcow2, "w1+2 w5+1 w2049+1 f"), layer(Made::Given, "")],
            Kind::PackedQcow2 => vec![layer(Made::PackedQcow2, "")],
            Kind::PackedChildQcow2 => vec![layer(Made::PackedQcow2, "w5+1 w2049+1 f"), layer(Made::Given, "")],
            Kind::PackedOnQcow2 => vec![layer(Made::PackedQcow2, "w2050+1 f"), layer(Made::Qcow2, IN_TARGET)],
            Kind::Qcow2OnPacked => vec![layer(Made::Qcow2, IN_SOURCE), layer(Made::PackedQcow2, "")],
            Kind::VhdOnVhd => vec![layer(Made::Vhd, IN_SOURCE), layer(Made::Vhd, IN_TARGET)],
            Kind::NewVhdOnVhd => vec![layer(Made::Vhd, ""), layer(Made::Vhd, IN_TARGET)],
            Kind::NewQcow2OnQcow2 => vec![layer(Made::Qcow2, ""), layer(Made::Qcow2, IN_TARGET)],
            Kind::VhdOnRaw => vec![layer(Made::Vhd, IN_SOURCE), layer(Made::Raw, IN_TARGET)],
            Kind::Qcow2OnQcow2 => vec![layer(Made::Qcow2, IN_SOURCE), layer(Made::Qcow2, IN_TARGET)],
            Kind::Qcow2OnRaw => vec![layer(Made::Qcow2, IN_SOURCE), layer(Made::Raw, IN_TARGET)],
            Kind::VhdOnQcow2 => vec![layer(Made::Vhd, IN_SOURCE), layer(Made::Qcow2, IN_TARGET)],
            Kind::Qcow2OnVhd => vec![layer(Made::Qcow2, IN_SOURCE), layer(Made::Vhd, IN_TARGET)],
            Kind::VhdOnQcow2OnRaw => [Kind::VhdOnQcow2.layers(), vec![layer(Made::Raw, IN_BASE)]].concat(),
            Kind::Qcow2OnVhdOnRaw => [Kind::Qcow2OnVhd.layers(), vec![layer(Made::Raw, IN_BASE)]].concat(),
        }
    }
}

const KINDS: [(Kind, &str); 26] = [
    (Kind::Raw, "raw"),
    (Kind::GrowingRaw, "growing-raw"),
    (Kind::Fixed, "fixed"),
    (Kind::Dynamic, "dynamic"),
    (Kind::Used, "used"),
    (Kind::Child, "child"),
    (Kind::UsedChild, "used-child"),
    (Kind::MisspeltChild, "misspelt-child"),
    (Kind::VhdOnVhd, "vhd-on-vhd"),
    (Kind::NewVhdOnVhd, "new-vhd-on-vhd"),
    (Kind::NewQcow2OnQcow2, "new-qcow2-on-qcow2"),
    (Kind::VhdOnRaw, "vhd-on-raw"),
    (Kind::Qcow2, "qcow2"),
    (Kind::UsedQcow2, "used-qcow2"),
    (Kind::ChildQcow2, "child-qcow2"),
    (Kind::UsedChildQcow2, "used-child-qcow2"),
    (Kind::PackedQcow2, "packed-qcow2"),
    (Kind::PackedChildQcow2, "packed-child-qcow2"),
    (Kind::PackedOnQcow2, "packed-on-qcow2"),
    (Kind::Qcow2OnPacked, "qcow2-on-packed"),
    (Kind::Qcow2OnQcow2, "qcow2-on-qcow2"),
    (Kind::Qcow2OnRaw, "qcow2-on-raw"),
    (Kind::VhdOnQcow2, "vhd-on-qcow2"),
    (Kind::Qcow2OnVhd, "qcow2-on-vhd"),
    (Kind::VhdOnQcow2OnRaw, "vhd-on-qcow2-on-raw"),
    (Kind::Qcow2OnVhdOnRaw, "qcow2-on-vhd-on-raw"),
];

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(kind, _)| kind == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        let found = KINDS.iter().find(|(_, name)| *name == text).map(|(kind, _)| *kind);
        found.ok_or_else(|| {
            let names: Vec<_> = KINDS.iter().map(|(_, name)| *name).collect();
            format!("'{text}' is not a kind of image; there are {}", names.join(", "))
        })
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
}

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

/// Clusters of a new image whose first refcount block has few counts left: what a preparation takes, and one more.
const FULL: u64 = COUNTED - 6;
/// Sectors of the parent that hold data: in each of its blocks, some before and some behind those that the leaf's
/// workloads touch.
const IN_PARENT: [(u64, u64); 4] = [(0, 10), (BLOCK - 2, 4), (BLOCK + 9, 2), (2 * BLOCK, 3)];

/// The identity of the `number`th image, from the base up.
fn identity(number: u8) -> [u8; 16] {
    [0xb0 | number; 16]
}

/// A new VHD of `sectors`.
fn image(kind: vhd::Kind, uuid: [u8; 16], sectors: u64, tail: Unwritten) -> Result<Media, ImageError> {
    let block_size = u32::try_from(BLOCK * SECTOR).unwrap_or(u32::MAX);
    let fixed = kind == vhd::Kind::Fixed;
    let creation = vhd::create(&Spec { len: sectors * SECTOR, kind, block_size, uuid, created: 1_000_000_000 })?;
    let mut media = Media::empty(tail);
    media.set_len(creation.len);
    if fixed {
        // What is not written at creation is to read as zero, whatever the storage held.
        media.zero(0, sectors);
    }
    for write in creation.writes {
        media.write(write.at, &write.bytes);
    }
    Ok(media)
}

/// The kind of a new layer on top of the image with this identity.
fn child_of(uuid: [u8; 16]) -> vhd::Kind {
    let (relative, absolute) = ("base.vhd".into(), "/srv/base.vhd".into());
    vhd::Kind::Differencing(Parent { uuid, modified: 1_000_000_000, relative, absolute })
}

impl Subject {
    /// A subject whose format knows what it stands on.
    pub fn new(kind: Kind, tail: Unwritten) -> Subject {
        Subject { kind, tail, told: tail }
    }

    /// A new file for a disk of `sectors` that is made in such a way, on top of `below` others.
    pub fn create(&self, made: Made, below: usize, sectors: u64) -> Result<Media, ImageError> {
        let number = u8::try_from(below).unwrap_or(u8::MAX);
        match made {
            Made::Raw => {
                // A raw image is whatever its storage is; it begins as zeros so that there is something to say.
                let mut media = Media::empty(self.tail);
                media.set_len(sectors * SECTOR);
                media.zero(0, sectors);
                Ok(media)
            }
            Made::Fixed => image(vhd::Kind::Fixed, identity(number), sectors, self.tail),
            Made::Given => {
                let mut media = image(vhd::Kind::Fixed, identity(number), sectors, self.tail)?;
                for (sector, word) in given() {
                    media.set(sector, Sector::Word(word));
                }
                Ok(media)
            }
            Made::Vhd | Made::MisspeltVhd => {
                let below = number.checked_sub(1);
                let kind = below.map_or(vhd::Kind::Dynamic, |below| child_of(identity(below)));
                image(kind, identity(number), sectors, self.tail)
            }
            Made::Qcow2 | Made::FullQcow2 | Made::PackedQcow2 => {
                let parent = (below > 0).then_some("base");
                let used = if made == Made::FullQcow2 { FULL } else { 0 };
                let packed = made == Made::PackedQcow2;
                Ok(qcow2::create(&qcow2::Spec { sectors, parent, used, packed }, self.tail))
            }
        }
    }

    /// Plants the bug's part that lies in how the image is opened.
    pub fn plant(self, bug: Option<Planted>) -> Subject {
        match bug {
            Some(Planted::TrustedTail) => Subject { tail: Unwritten::Stale, told: Unwritten::Zeroes, ..self },
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
    let read = file.read_at(HEADER_AT, &mut header);
    let code = header.windows(4).position(|bytes| bytes == b"MacX").filter(|_| read.is_ok());
    let Some(place) = code.and_then(|at| header.get_mut(at..at + 4)) else { panic!("the child has no locator") };
    place.copy_from_slice(b"MACX");
    header[36..40].fill(0);
    let sum = header.iter().fold(0u32, |sum, &byte| sum.wrapping_add(byte.into()));
    header[36..40].copy_from_slice(&(!sum).to_be_bytes());
    file.write(HEADER_AT, &header);
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
        Form::Vhd => (vhd::check(file).map(|report| report.problems), Severity::Repairable),
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
