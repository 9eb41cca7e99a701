//! The files of a chain, from the image itself down to its last parent: opened, locked, and found to belong
//! together.
//!
//! Only files that were named on the command line are ever opened. What an image says of its parent is shown, to
//! help find the right name, and compared with the parent that was named.

use std::path::Path;

use disk::vhd::{self, Vhd};
use disk::{Access, Format, Geometry, Image, ImageError, ImageErrorKind, Tail, raw};
use uring::{Cache, ImageFile, OpenOptions};

use crate::failure::{Exit, Failure};
use crate::image_name::{FormatName, ImageName};
use crate::leftovers;
use crate::log;
use crate::output::printable;
use crate::uuid;

/// An open chain: for each layer its file and its format, the image itself first.
#[derive(Debug)]
pub struct Layers {
    /// What it was opened by.
    pub name: ImageName,
    /// The files.
    pub files: Vec<ImageFile>,
    /// The formats.
    pub images: Vec<Image>,
}

impl Layers {
    /// Opens `name` without its parents, which it may have: enough to read its metadata.
    pub fn open_alone(name: &ImageName, options: OpenOptions) -> Result<Layers, Failure> {
        let mut layers = Layers { name: name.clone(), files: Vec::new(), images: Vec::new() };
        layers.add(name, options)?;
        Ok(layers)
    }

    /// Opens `name` and the parents it stands on. Parents are always opened for reading only.
    pub fn open(name: &ImageName, parents: &[ImageName], options: OpenOptions) -> Result<Layers, Failure> {
        named_once(name, parents)?;
        let mut layers = Layers::open_alone(name, options)?;
        for (child, parent) in std::iter::once(name).chain(parents).zip(parents) {
            layers.add(parent, OpenOptions { write: false, ..options })?;
            layers.check_last_pair(child, parent)?;
        }
        let last = parents.last().unwrap_or(name);
        match layers.images.last() {
            Some(Image::Vhd(image)) if image.has_parent() => Err(parent_missing(last, image)),
            _ => Ok(layers),
        }
    }

    /// Size and limits of the disk.
    pub fn geometry(&self) -> Option<Geometry> {
        self.images.first().map(Format::geometry)
    }

    fn add(&mut self, name: &ImageName, options: OpenOptions) -> Result<(), Failure> {
        let mut file = ImageFile::open(name.path(), options).map_err(Failure::said)?;
        if options.write && name.format == FormatName::Vhd {
            leftovers::clear(name, &mut file)?;
        }
        let image = open_image(name, &mut file, options.write)?;
        self.files.push(file);
        self.images.push(image);
        Ok(())
    }

    /// Whether the last layer is the parent of the one above it.
    fn check_last_pair(&self, child: &ImageName, parent: &ImageName) -> Result<(), Failure> {
        let tried = || format!("use {parent} as the parent of {child}");
        match self.images.as_slice() {
            [.., above, below] if above.link().is_some() => match disk::check_parent(above, below, modified(parent)) {
                Ok(None) => Ok(()),
                Ok(Some(note)) => {
                    log::say(format_args!("{child} on {parent}: {note}"));
                    Ok(())
                }
                Err(error) => Err(Failure::new(tried(), error).advise(describe_parent_of(above))),
            },
            _ => Err(Failure::new(tried(), format!("{child} stands on its own, it has no parent"))
                .advise("leave out this --parent and those behind it")
                .exit_as(Exit::Usage)),
        }
    }
}

/// When the file was last changed, in seconds since 1970; `None` where nobody can tell.
fn modified(name: &ImageName) -> Option<u64> {
    let modified = std::fs::metadata(name.path()).and_then(|metadata| metadata.modified()).ok()?;
    modified.duration_since(std::time::UNIX_EPOCH).ok().map(|since| since.as_secs())
}

/// A file that is its own parent would be found in use, by ourselves, and nobody could tell by whom.
fn named_once(name: &ImageName, parents: &[ImageName]) -> Result<(), Failure> {
    let mut seen = Vec::new();
    for layer in std::iter::once(name).chain(parents) {
        // What cannot be found is told when it is opened.
        let Ok(path) = layer.path().canonicalize() else { continue };
        if seen.contains(&path) {
            let why = "it is named twice, and no image is its own parent";
            return Err(Failure::new(format!("use {layer}"), why).exit_as(Exit::Usage));
        }
        seen.push(path);
    }
    Ok(())
}

/// Reads the metadata of an image.
fn open_image(name: &ImageName, file: &mut ImageFile, write: bool) -> Result<Image, Failure> {
    let block = if file.alignment().offset > 512 { 4096 } else { 512 };
    let opened = match name.format {
        FormatName::Raw => raw::Raw::new(disk::Source::len(file), block, !write).map(Image::Raw),
        FormatName::Vhd if block > 512 => return Err(not_in_sectors(name)),
        FormatName::Vhd => open_vhd(file, write).map(|image| Image::Vhd(Box::new(image))),
    };
    opened.map_err(|error| explain(name, error))
}

fn open_vhd(file: &mut ImageFile, write: bool) -> Result<Vhd, ImageError> {
    let access = if write { Access::ReadWrite } else { Access::ReadOnly };
    // A file system gives zeros where nothing was written; a block device what was there before.
    let tail = if file.device_len().is_some() { Tail::Stale } else { Tail::Zeroes };
    Vhd::open(file, access, tail)
}

fn not_in_sectors(name: &ImageName) -> Failure {
    let why = "its storage takes nothing smaller than 4096 bytes with O_DIRECT, and VHD needs sectors of 512";
    Failure::new(format!("open {name}"), why).advise("use --cache writeback, or a raw image on this storage")
}

/// An image error, with what to do about its kind.
pub fn explain(name: &ImageName, error: ImageError) -> Failure {
    let advice = match error.kind {
        ImageErrorKind::WrongFormat => Some(format!(
            "name the format that the file has; if it should be {}, its beginning and end are damaged or cut off",
            name.format
        )),
        ImageErrorKind::Corrupt => Some(format!("`tapline image check {name}` lists all that is wrong with it")),
        ImageErrorKind::Unsupported | ImageErrorKind::Mismatch => None,
        ImageErrorKind::OutOfLimits => None,
        ImageErrorKind::Storage => Some("the storage below it fails; see the kernel's log".into()),
    };
    let failure = Failure::new(format!("open {name}"), error);
    match advice {
        Some(advice) => failure.advise(advice),
        None => failure,
    }
}

fn parent_missing(name: &ImageName, image: &Vhd) -> Failure {
    let recorded = describe_parent(image.info());
    Failure::new(format!("open {name}"), "it stands on a parent, which must be named")
        .advise(format!("{recorded}\n  if that is the one you mean: --parent {}", suggestion(name, image)))
        .exit_as(Exit::Usage)
}

fn describe_parent_of(image: &Image) -> String {
    match image {
        Image::Vhd(image) => describe_parent(image.info()),
        Image::Raw(_) => String::new(),
    }
}

/// What a differencing image says of its parent.
pub fn describe_parent(info: &vhd::Info) -> String {
    let Some(parent) = &info.parent else { return String::new() };
    let mut text = format!("it was made on «{}» with uuid {}", printable(&parent.name), uuid::text(&parent.uuid));
    for locator in &parent.locators {
        text.push_str(&format!("\n    {} {}", printable(&locator.code), printable(&locator.path)));
    }
    text
}

/// The parent's likely name: where the image says that it is as seen from itself, or else a file of the recorded
/// name beside it. Never opened by itself.
fn suggestion(name: &ImageName, image: &Vhd) -> String {
    let recorded = image.info().parent.as_ref();
    // A raw parent has no uuid.
    let format = if recorded.is_some_and(|parent| parent.uuid == [0; 16]) { FormatName::Raw } else { FormatName::Vhd };
    let relative = recorded.and_then(|parent| parent.locators.iter().find(|locator| locator.code == "W2ru"));
    let relative = relative.map(|locator| locator.path.replace('\\', "/"));
    let file = relative.or(recorded.map(|parent| parent.name.clone())).filter(|file| !file.is_empty());
    let file = file.map_or("PATH".into(), |file| printable(file.strip_prefix("./").unwrap_or(&file)));
    let beside = name.path().parent().unwrap_or(Path::new("")).join(file);
    format!("{format}:{}", beside.display())
}

/// Options for looking at metadata: through the page cache, which every file system has.
pub fn to_look_at(lock: bool) -> OpenOptions {
    OpenOptions { write: false, cache: Cache::Writeback, lock }
}
