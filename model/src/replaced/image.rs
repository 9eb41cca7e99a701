//! Images of a round: their formats and their files.
//!
//! Invariant: what a stored image shows is known exactly.

use std::path::{Path, PathBuf};

use super::site::{Medium, Method, Site, copy_with_time, is_device};
use crate::content::Content;

/// Kinds of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Kind {
    /// Raw.
    Raw,
    /// VHD that grows.
    Vhd,
    /// VHD with all of its space.
    FixedVhd,
    /// VHD on a VHD.
    VhdChild,
    /// VHD on a raw file.
    VhdOnRaw,
    /// VHD as QEMU makes it.
    VhdByQemu,
    /// qcow2.
    Qcow2,
    /// qcow2 with small clusters, as QEMU makes it.
    Qcow2ByQemu,
    /// qcow2 on a qcow2.
    Qcow2Child,
    /// qcow2 on a raw file.
    Qcow2OnRaw,
    /// qcow2 with a data file.
    DataFile,
}

impl Kind {
    /// The word in front of its file.
    pub fn format(self) -> &'static str {
        match self {
            Kind::Raw => "raw",
            Kind::Vhd | Kind::FixedVhd | Kind::VhdChild | Kind::VhdOnRaw | Kind::VhdByQemu => "vhd",
            Kind::Qcow2 | Kind::Qcow2ByQemu | Kind::Qcow2Child | Kind::Qcow2OnRaw | Kind::DataFile => "qcow2",
        }
    }

    /// The word in front of its parent's file, if it has one.
    pub fn parent(self) -> Option<&'static str> {
        match self {
            Kind::VhdChild => Some("vhd"),
            Kind::Qcow2Child => Some("qcow2"),
            Kind::VhdOnRaw | Kind::Qcow2OnRaw => Some("raw"),
            _ => None,
        }
    }

    /// Whether such an image can be at such a place.
    pub fn fits(self, medium: Medium) -> bool {
        // A device has one size: QEMU makes VHDs in files, and a data file has its image's name.
        medium != Medium::Loop || !matches!(self, Kind::FixedVhd | Kind::VhdByQemu | Kind::DataFile)
    }

    /// QEMU's words for such an image, without parents.
    pub fn qemu_options(self) -> Option<(&'static str, &'static str)> {
        match self {
            Kind::Raw => Some(("raw", "")),
            Kind::VhdByQemu => Some(("vpc", "subformat=dynamic,force_size=on")),
            Kind::Qcow2ByQemu => Some(("qcow2", "cluster_size=4k")),
            Kind::Qcow2 => Some(("qcow2", "lazy_refcounts=on")),
            _ => None,
        }
    }
}

/// An image at its place.
#[derive(Clone, Debug)]
pub struct Image {
    /// The word in front of its file.
    pub format: &'static str,
    /// Its file or device.
    pub leaf: PathBuf,
    /// Its data file.
    pub data: Option<PathBuf>,
    /// Its parents, the nearest first.
    pub parents: Vec<Layer>,
    /// Units that are used of it.
    pub units: u64,
    /// It is a VHD that has all of its space.
    pub is_fixed: bool,
}

/// An image below another one.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The word in front of its file.
    pub format: &'static str,
    /// Its file or device.
    pub leaf: PathBuf,
    /// Its data file.
    pub data: Option<PathBuf>,
}

impl Layer {
    /// Its name on the command line.
    pub fn name(&self) -> String {
        name(self.format, &self.leaf, self.data.as_deref())
    }
}

fn name(format: &str, leaf: &Path, data: Option<&Path>) -> String {
    match data {
        Some(data) => format!("{format}:{},data-file={}", leaf.display(), data.display()),
        None => format!("{format}:{}", leaf.display()),
    }
}

impl Image {
    /// Its name on the command line.
    pub fn name(&self) -> String {
        name(self.format, &self.leaf, self.data.as_deref())
    }

    /// Its parents on the command line.
    pub fn parent_words(&self) -> Vec<String> {
        self.parents.iter().flat_map(|parent| ["--parent".to_owned(), parent.name()]).collect()
    }

    /// The files that a process locks for writing.
    pub fn written(&self) -> Vec<&Path> {
        std::iter::once(self.leaf.as_path()).chain(self.data.as_deref()).collect()
    }
}

/// An image that is kept, and what it shows.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The word in front of its file.
    pub format: &'static str,
    /// A copy of its file or device.
    pub leaf: PathBuf,
    /// A copy of its data file.
    pub data: Option<PathBuf>,
    /// Its parents; where they are not those that are there already, copies.
    pub parents: Vec<Layer>,
    /// What it shows.
    pub content: Content,
    /// Units that are used of it.
    pub units: u64,
    /// It is a VHD that has all of its space.
    pub is_fixed: bool,
}

impl Stored {
    /// Puts it in the place of an image, or where there is none yet.
    pub fn put(&self, site: &mut Site, method: Method, leaf: &Path) -> Result<Option<Image>, String> {
        let mut parents = Vec::new();
        for parent in &self.parents {
            let name = parent.leaf.file_name().ok_or("a parent without a name")?;
            let at = if is_device(&parent.leaf) { parent.leaf.clone() } else { site.files.join(name) };
            if parent.leaf != at {
                copy_with_time(&parent.leaf, &at)?;
            }
            parents.push(Layer { leaf: at, ..parent.clone() });
        }
        if !site.put(method, &self.leaf, leaf)? {
            return Ok(None);
        }
        let data = match &self.data {
            Some(from) => {
                let at = site.files.join("leaf.data");
                let method = if at.exists() { method } else { Method::Renamed };
                site.put(method, from, &at)?;
                Some(at)
            }
            None => None,
        };
        let Stored { format, units, is_fixed, .. } = *self;
        Ok(Some(Image { format, leaf: leaf.to_owned(), data, parents, units, is_fixed }))
    }
}
