//! The formats and files of the images of a round.
//!
//! Invariant: the content of a stored image is known exactly.

use std::path::{Path, PathBuf};

use super::site::{Medium, Method, Site, copy_with_time, is_device};
use crate::content::Content;

/// Kinds of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum ImageKind {
    /// A raw image.
    Raw,
    /// A dynamic VHD.
    Vhd,
    /// A fixed VHD.
    FixedVhd,
    /// A VHD on a VHD parent.
    VhdChild,
    /// A VHD on a raw parent.
    VhdOnRaw,
    /// A dynamic VHD created by QEMU.
    VhdByQemu,
    /// A qcow2 image.
    Qcow2,
    /// A qcow2 image with small clusters, created by QEMU.
    Qcow2ByQemu,
    /// A qcow2 image on a qcow2 parent.
    Qcow2Child,
    /// A qcow2 image on a raw parent.
    Qcow2OnRaw,
    /// A qcow2 image with an external data file.
    DataFile,
}

impl ImageKind {
    /// Its format on the command line.
    pub fn format(self) -> &'static str {
        match self {
            ImageKind::Raw => "raw",
            ImageKind::Vhd | ImageKind::FixedVhd | ImageKind::VhdChild | ImageKind::VhdOnRaw | ImageKind::VhdByQemu => {
                "vhd"
            }
            ImageKind::Qcow2
            | ImageKind::Qcow2ByQemu
            | ImageKind::Qcow2Child
            | ImageKind::Qcow2OnRaw
            | ImageKind::DataFile => "qcow2",
        }
    }

    /// The format of its parent, if it has one.
    pub fn parent(self) -> Option<&'static str> {
        match self {
            ImageKind::VhdChild => Some("vhd"),
            ImageKind::Qcow2Child => Some("qcow2"),
            ImageKind::VhdOnRaw | ImageKind::Qcow2OnRaw => Some("raw"),
            _ => None,
        }
    }

    /// Whether such an image can be on this medium.
    pub fn fits(self, medium: Medium) -> bool {
        // A device has a fixed size, QEMU creates VHDs only in files, and a data file is named after its image.
        medium != Medium::Loop || !matches!(self, ImageKind::FixedVhd | ImageKind::VhdByQemu | ImageKind::DataFile)
    }

    /// The format and options of `qemu-img create` for such an image without parents.
    pub fn qemu_options(self) -> Option<(&'static str, &'static str)> {
        match self {
            ImageKind::Raw => Some(("raw", "")),
            ImageKind::VhdByQemu => Some(("vpc", "subformat=dynamic,force_size=on")),
            ImageKind::Qcow2ByQemu => Some(("qcow2", "cluster_size=4k")),
            ImageKind::Qcow2 => Some(("qcow2", "lazy_refcounts=on")),
            _ => None,
        }
    }
}

/// An image in its place.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its format on the command line.
    pub format: &'static str,
    /// The path of its file or device.
    pub leaf: PathBuf,
    /// The path of its data file.
    pub data: Option<PathBuf>,
    /// Its parents, the nearest first.
    pub parents: Vec<Layer>,
    /// Number of units of the disk that are used.
    pub units: u64,
    /// Whether it is a fixed VHD.
    pub is_fixed: bool,
}

/// A parent of an image.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its format on the command line.
    pub format: &'static str,
    /// The path of its file or device.
    pub leaf: PathBuf,
    /// The path of its data file.
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

    /// Its `--parent` arguments.
    pub fn parent_words(&self) -> Vec<String> {
        self.parents.iter().flat_map(|parent| ["--parent".to_owned(), parent.name()]).collect()
    }

    /// The files that a process locks for writing.
    pub fn written(&self) -> Vec<&Path> {
        std::iter::once(self.leaf.as_path()).chain(self.data.as_deref()).collect()
    }
}

/// A stored image and its content.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its format on the command line.
    pub format: &'static str,
    /// A copy of its file or device.
    pub leaf: PathBuf,
    /// A copy of its data file.
    pub data: Option<PathBuf>,
    /// Its parents: copies, unless they are in their place already.
    pub parents: Vec<Layer>,
    /// The content of its disk.
    pub content: Content,
    /// Number of units of the disk that are used.
    pub units: u64,
    /// Whether it is a fixed VHD.
    pub is_fixed: bool,
}

impl Stored {
    /// Puts it in the place of an image, or into a free place.
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
