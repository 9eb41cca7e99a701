//! Images of a round: their formats, their files, and sound ones to begin with.
//!
//! Invariant: what a stored image shows is known exactly.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use super::life::{self, Served, UNITS};
use super::oracle::Oracle;
use super::program::Programs;
use super::site::{DEVICE_LEN, Medium, Method, Site, copy_with_time, is_device, run};
use crate::content::{Content, UNIT};

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

    fn parent(self) -> Option<&'static str> {
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

/// Sound images, each made when it is first needed.
#[derive(Debug)]
pub struct Library {
    directory: PathBuf,
    numbers: (u32, u32),
    made: Mutex<BTreeMap<(Kind, bool, u64), Arc<Stored>>>,
}

impl Library {
    /// An empty one.
    pub fn new(directory: PathBuf, numbers: (u32, u32)) -> Library {
        Library { directory, numbers, made: Mutex::default() }
    }

    /// An image for such a place; of each kind there are several variants.
    pub fn image(&self, programs: &Programs, kind: Kind, medium: Medium, variant: u64) -> Result<Arc<Stored>, String> {
        let is_device = medium == Medium::Loop;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stored) = made.get(&(kind, is_device, variant)) {
            return Ok(Arc::clone(stored));
        }
        let stored = Arc::new(self.make(programs, kind, is_device, variant)?);
        made.insert((kind, is_device, variant), Arc::clone(&stored));
        Ok(stored)
    }

    fn make(&self, programs: &Programs, kind: Kind, is_device: bool, variant: u64) -> Result<Stored, String> {
        let word = format!("{kind:?}-{}-{variant}", if is_device { "device" } else { "file" }).to_lowercase();
        let room = self.directory.join(&word);
        let medium = if is_device { Medium::Loop } else { Medium::Tmpfs };
        let mut site = Site::make(medium, room.clone(), room.join("room"), self.numbers)?;
        let mut oracle = Oracle::default();
        // Of each image its own stamps, so that a foreign byte is known by its looks.
        let number = 1 + variant + 10 * u64::from(is_device) + 100 * u64::try_from(word.len()).unwrap_or(0);
        let seed = word.bytes().fold(number, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let mut stamps = (seed % 100_000) << 12;
        let mut parents = Vec::new();
        if let Some(format) = kind.parent() {
            let base = room.join(format!("base-{word}"));
            let image =
                Image { format, leaf: base.clone(), data: None, parents: Vec::new(), units: UNITS, is_fixed: false };
            programs.done(&site, &["image", "create", &image.name(), "--size", &(UNITS * UNIT).to_string()])?;
            fill(programs, &site, &image, &mut oracle, seed ^ 1, &mut stamps)?;
            parents.push(Layer { format, leaf: base, data: None });
        }
        if is_device {
            let empty = room.join("empty");
            fs::File::create(&empty).and_then(|file| file.set_len(DEVICE_LEN)).map_err(|error| error.to_string())?;
            site.attach_copy(&empty)?;
        }
        let leaf = site.first_path();
        let data = (kind == Kind::DataFile).then(|| room.join("leaf.data"));
        let (format, is_fixed) = (kind.format(), kind == Kind::FixedVhd);
        let image = Image { format, leaf: leaf.clone(), data, parents, units: UNITS, is_fixed };
        create(programs, &site, kind, &image)?;
        fill(programs, &site, &image, &mut oracle, seed, &mut stamps)?;
        let kept = match is_device {
            false => leaf,
            true => {
                let kept = room.join("kept");
                super::site::copy(&leaf, &kept)?;
                kept
            }
        };
        let Image { format, data, parents, units, is_fixed, .. } = image;
        Ok(Stored { format, leaf: kept, data, parents, content: oracle.live, units, is_fixed })
    }
}

/// Creates an empty image.
fn create(programs: &Programs, site: &Site, kind: Kind, image: &Image) -> Result<(), String> {
    let size = (UNITS * UNIT).to_string();
    let by_qemu = |format: &str, options: &str| {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", format, "-o", options]).arg(&image.leaf).arg(&size);
        run(command.current_dir(&site.files))
    };
    let name = image.name();
    let mut words = vec!["image", "create", &name];
    let parents = image.parent_words();
    match kind {
        Kind::Raw if site.devices.is_some() => return Ok(()),
        Kind::VhdByQemu | Kind::Qcow2ByQemu => {
            let (format, options) = kind.qemu_options().ok_or("QEMU does not make it")?;
            return by_qemu(format, options);
        }
        Kind::DataFile => return by_qemu("qcow2", "data_file=leaf.data"),
        Kind::FixedVhd => words.extend(["--size", &size, "--fixed"]),
        Kind::Vhd => words.extend(["--size", &size, "--block-size", "512K"]),
        _ if image.parents.is_empty() => words.extend(["--size", &size]),
        _ => words.extend(parents.iter().map(String::as_str)),
    }
    programs.done(site, &words)
}

/// Writes at random, and leaves the image as a process does that is stopped.
fn fill(
    programs: &Programs,
    site: &Site,
    image: &Image,
    oracle: &mut Oracle,
    seed: u64,
    stamps: &mut u64,
) -> Result<(), String> {
    let mut random = sim::random::Random::new(seed);
    let mut served = Served::start(programs, site, image, false)?.map_err(|said| format!("a new image: {said}"))?;
    for _ in 0..12 {
        life::write(&mut served.client, oracle, &mut random, stamps)?;
    }
    // What discards have left is known then.
    let bytes = served.read(image.units).map_err(|error| format!("a new image: {error}"))?;
    oracle.see(&bytes).map_err(|wrong| format!("a new image: {wrong:?}"))?;
    served.stop()?;
    oracle.flushed();
    Ok(())
}
