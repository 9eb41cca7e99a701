//! What is explored: images of each kind, small and with something in them.
//!
//! Knows how such an image is made, opened and checked; nothing of crashes.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use disk::raw::Raw;
use disk::vhd::{self, Parent, Severity, Spec, Vhd};
use disk::{Access, Image, ImageError, Tail};

use crate::media::{Media, Unwritten};
use crate::planted::Planted;
use crate::sector::{PARENTS, SECTOR, Word};
use crate::workload::{BLOCK, DISK};

/// A kind of image.
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
}

impl Kind {
    /// Those of a format.
    pub fn of_format(format: &str) -> Option<&'static [Kind]> {
        match format {
            "raw" => Some(&[Kind::Raw]),
            "vhd" => Some(&[Kind::Dynamic, Kind::Used, Kind::Child, Kind::UsedChild, Kind::Fixed]),
            _ => None,
        }
    }

    /// The format's name.
    pub fn format(self) -> &'static str {
        if self == Kind::Raw { "raw" } else { "vhd" }
    }

    /// The kind that this one is made from by [`Kind::preparation`].
    fn fresh(self) -> Kind {
        match self {
            Kind::Used => Kind::Dynamic,
            Kind::UsedChild => Kind::Child,
            other => other,
        }
    }

    /// What the image's first life wrote and flushed.
    pub fn preparation(self) -> &'static str {
        match self {
            Kind::Used => "w0+6 w2050+2 f",
            Kind::UsedChild => "w1+2 w5+1 w2049+1 f",
            _ => "",
        }
    }
}

const KINDS: [(Kind, &str); 6] = [
    (Kind::Raw, "raw"),
    (Kind::Fixed, "fixed"),
    (Kind::Dynamic, "dynamic"),
    (Kind::Used, "used"),
    (Kind::Child, "child"),
    (Kind::UsedChild, "used-child"),
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
#[derive(Clone, Debug)]
pub struct Start {
    /// The files.
    pub files: Vec<Media>,
    /// The content.
    pub base: BTreeMap<u64, Word>,
}

/// Identities of the images.
const LEAF: [u8; 16] = [0x1e; 16];
const BASE: [u8; 16] = [0xba; 16];
/// Sectors of the parent that hold data: in each of its blocks, some before and some behind those that the leaf's
/// workloads touch.
const IN_PARENT: [(u64, u64); 4] = [(0, 10), (BLOCK - 2, 4), (BLOCK + 9, 2), (2 * BLOCK, 3)];

/// A new VHD of the simulated size.
pub fn image(kind: vhd::Kind, uuid: [u8; 16], tail: Unwritten) -> Result<Media, ImageError> {
    let block_size = u32::try_from(BLOCK * SECTOR).unwrap_or(u32::MAX);
    let fixed = kind == vhd::Kind::Fixed;
    let creation = vhd::create(&Spec { len: DISK * SECTOR, kind, block_size, uuid, created: 1_000_000_000 })?;
    let mut media = Media::empty(tail);
    media.set_len(creation.len);
    if fixed {
        // What is not written at creation is to read as zero, whatever the storage held.
        media.zero(0, DISK);
    }
    for write in creation.writes {
        media.write(write.at, &write.bytes);
    }
    Ok(media)
}

/// The kind of a new layer on top of the image with this identity.
pub fn child_of(uuid: [u8; 16]) -> vhd::Kind {
    let (relative, absolute) = ("base.vhd".into(), "/srv/base.vhd".into());
    vhd::Kind::Differencing(Parent { uuid, modified: 1_000_000_000, relative, absolute })
}

impl Subject {
    /// A subject whose format knows what it stands on.
    pub fn new(kind: Kind, tail: Unwritten) -> Subject {
        Subject { kind, tail, told: tail }
    }

    /// The image as created, before its preparation.
    pub fn create(&self) -> Result<Start, ImageError> {
        let (mut files, mut base) = (Vec::new(), BTreeMap::new());
        match self.kind.fresh() {
            Kind::Raw => {
                // A raw image is whatever its storage is; it begins as zeros so that there is something to say.
                let mut media = Media::empty(self.tail);
                media.set_len(DISK * SECTOR);
                media.zero(0, DISK);
                files.push(media);
            }
            Kind::Fixed => files.push(image(vhd::Kind::Fixed, LEAF, self.tail)?),
            Kind::Child | Kind::UsedChild => {
                files.push(image(child_of(BASE), LEAF, self.tail)?);
                files.push(self.parent(&mut base)?);
            }
            Kind::Dynamic | Kind::Used => files.push(image(vhd::Kind::Dynamic, LEAF, self.tail)?),
        }
        Ok(Start { files, base })
    }

    /// A fixed image: what is in it is where it is, so that no code under test is needed to make it.
    fn parent(&self, base: &mut BTreeMap<u64, Word>) -> Result<Media, ImageError> {
        let mut media = image(vhd::Kind::Fixed, BASE, self.tail)?;
        for sector in IN_PARENT.into_iter().flat_map(|(at, count)| at..at + count) {
            let word = Word::guest(PARENTS, sector);
            media.set(sector, crate::sector::Sector::Word(word));
            base.insert(sector, word);
        }
        Ok(media)
    }

    /// Plants the bug's part that lies in how the image is opened.
    pub fn plant(self, bug: Option<Planted>) -> Subject {
        match bug {
            Some(Planted::TrustedTail) => Subject { tail: Unwritten::Stale, told: Unwritten::Zeroes, ..self },
            _ => self,
        }
    }

    /// Opens the files as a chain, leaf first.
    pub fn open(&self, files: &mut [Media]) -> Result<Vec<Image>, ImageError> {
        if self.kind == Kind::Raw {
            return Ok(vec![Image::Raw(Raw::new(DISK * SECTOR, 512, false)?)]);
        }
        let tail = match self.told {
            Unwritten::Zeroes => Tail::Zeroes,
            Unwritten::Stale => Tail::Stale,
        };
        let mut layers = Vec::new();
        for (layer, file) in files.iter_mut().enumerate() {
            let access = if layer == 0 { Access::ReadWrite } else { Access::ReadOnly };
            layers.push(Image::Vhd(Box::new(Vhd::open(file, access, tail)?)));
        }
        Ok(layers)
    }

    /// What is damaged in the leaf, if anything. Leaks and what redundancy mends are no damage.
    pub fn damage(&self, leaf: &mut Media) -> Option<String> {
        if self.kind == Kind::Raw {
            return None;
        }
        match vhd::check(leaf) {
            Ok(report) => {
                let damage = report.problems.into_iter().find(|problem| problem.severity == Severity::Damage);
                damage.map(|problem| format!("{} (at byte {})", problem.what, problem.at))
            }
            Err(error) => Some(error.to_string()),
        }
    }
}
