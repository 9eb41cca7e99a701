//! The remains of a merge that was killed at its very end: files of layers without data, below a child that is already
//! based on the merge's target.
//!
//! It knows nothing about how layers are merged. A file is recognized by its own metadata, and only if all of it
//! agrees: it has no data, is based on the layer that was below it, and does not record that one's modification time,
//! as is the case for merged layers only. An empty clone that has not been written yet records it. The files are locked
//! while they are held here, so that they are not in use when they are removed.

use std::path::{Path, PathBuf};

use control::{FormatName, ImageName};
use disk::{DiskOffset, Format, Image, Link, Span};
use uring::{Cache, FileOpenError, ImageFile, OpenOptions};

use crate::files::Files;
use crate::files::identity::FileIdentity;
use crate::image::chain::{metadata_options, open_image};
use crate::image::presence::{ExtentSource, Presence};
use crate::image::redo_log;
use crate::image::replay_redo;
use crate::process::failure::Failure;

/// A layer that other layers may be based on.
#[derive(Clone, Debug)]
pub struct MergeLayer {
    /// The layer's file.
    pub name: ImageName,
    /// The identity known to its children; all zeroes if its format has none.
    pub identity: [u8; 16],
    /// The size of its disk.
    pub len: u64,
}

/// Locked files that no longer contain data.
#[derive(Debug)]
pub struct StaleLayers {
    files: Files,
    layers: Vec<(MergeLayer, ImageFile)>,
    /// The data files of sources that are already gone.
    data_files: Vec<PathBuf>,
}

const TO_REMOVE: OpenOptions = OpenOptions { write: true, cache: Cache::Writeback, lock: true };

impl MergeLayer {
    /// Reads the layer of a file, which may be in use.
    pub fn of(files: &Files, name: &ImageName) -> Result<MergeLayer, Failure> {
        let mut file = files.open_image(name, metadata_options(false)).map_err(Failure::said)?;
        Ok(MergeLayer::in_image(name, &open_image(files, name, &mut file, false)?))
    }

    /// Returns the layer of an open image.
    pub fn in_image(name: &ImageName, image: &Image) -> MergeLayer {
        MergeLayer { name: name.clone(), identity: image.identity(), len: image.geometry().len }
    }

    /// Returns whether the `link` of `child` refers to this layer. A layer without identity is recognized by its path.
    fn is_parent_of(&self, files: &Files, child: &ImageName, link: &Link) -> bool {
        let raw = self.name.format == FormatName::Raw;
        match link.format {
            Some(format) if format != self.name.format.word() => return false,
            // A VHD records no format, and no identity for a raw parent.
            None if child.format == FormatName::Vhd && raw != (link.uuid == [0; 16]) => return false,
            _ => {}
        }
        if link.uuid != [0; 16] {
            return link.uuid == self.identity;
        }
        let directory = child.path().parent().unwrap_or(child.path());
        let recorded = [directory.join(&link.relative), link.absolute.as_str().into()];
        let here = FileIdentity::of(files, &self.name);
        here.is_some() && recorded.iter().any(|path| FileIdentity::of_path(files, path) == here)
    }
}

/// Returns whether the merge of `sources`, the topmost first, into `target` is complete except for its remains: `above`
/// is based on the target, and on none of the sources. Returns false if this cannot be determined.
pub fn is_merge_complete(files: &Files, above: &ImageName, sources: &[ImageName], target: &ImageName) -> bool {
    let Some(link) = open_durable(files, above).ok().and_then(|image| image.link()) else { return false };
    let is_based_on =
        |name: &ImageName| MergeLayer::of(files, name).is_ok_and(|layer| layer.is_parent_of(files, above, &link));
    is_based_on(target) && !sources.iter().any(is_based_on)
}

/// Opens an image and makes durable what a killed process may have left in the page cache: files are removed because of
/// its contents, which must survive a power loss.
fn open_durable(files: &Files, name: &ImageName) -> Result<Image, Failure> {
    replay_redo::image(files, name)?;
    let mut file = files.open_image(name, metadata_options(true)).map_err(Failure::said)?;
    file.sync().map_err(|error| Failure::new(format!("sync {name}"), error))?;
    open_image(files, name, &mut file, false)
}

impl StaleLayers {
    /// Finds the remains of `sources`, the topmost first, after a completed merge into `target`. Fails if one of them
    /// is anything else.
    pub fn of(files: &Files, sources: &[ImageName], target: &MergeLayer) -> Result<StaleLayers, Failure> {
        let (mut left, mut data_files) = (Vec::new(), Vec::new());
        let mut below = Some(target.clone());
        for source in sources.iter().rev() {
            let file = match files.open_image(source, TO_REMOVE) {
                Ok(file) => Some(file),
                Err(FileOpenError::Missing { .. }) => None,
                Err(error) => return Err(Failure::said(error).advise(ADVICE)),
            };
            below = match file {
                None => {
                    data_files.extend(source.data_file.clone().filter(|data| data.exists()));
                    None
                }
                Some(mut file) => {
                    // Its only data may be in a redo log.
                    redo_log::settle(files, source, &mut file)?;
                    let layer =
                        examine(files, source, &mut file, below.as_ref()).map_err(|failure| failure.advise(ADVICE))?;
                    left.push((layer.clone(), file));
                    Some(layer)
                }
            };
        }
        left.reverse();
        Ok(StaleLayers { files: files.clone(), layers: left, data_files })
    }

    /// Returns the layers.
    pub fn layers(&self) -> impl Iterator<Item = &MergeLayer> {
        self.layers.iter().map(|(layer, _)| layer)
    }

    /// Removes the files, durably.
    pub fn remove(self) -> Result<(), Failure> {
        for (MergeLayer { name, .. }, file) in &self.layers {
            let tried = || format!("remove {name}, which was merged and no longer holds data");
            if FileIdentity::of_open(file) != FileIdentity::of(&self.files, name) {
                return Err(Failure::new(tried(), "another file now has its name"));
            }
            name.paths().try_for_each(remove).map_err(|error| Failure::new(tried(), error))?;
        }
        let mut data_files = self.data_files.iter();
        data_files.try_for_each(|path| {
            let tried = || format!("remove {}, the data file of an image that was merged", path.display());
            remove(path).map_err(|error| Failure::new(tried(), error))
        })
    }
}

const ADVICE: &str = "the disk no longer needs it: the layer above it is now based on the merge target. Examine it \
    (tapline image info), and remove it by hand if you do not need it";

/// Removes a file, durably.
pub fn remove(path: &Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    std::fs::remove_file(path)?;
    Ok(uring::sync_directory(path)?)
}

/// Verifies that a source contains no data and is based on `below`.
fn examine(
    files: &Files,
    name: &ImageName,
    file: &mut ImageFile,
    below: Option<&MergeLayer>,
) -> Result<MergeLayer, Failure> {
    let image = open_image(files, name, file, false)?;
    let not = |why: String| Err(Failure::new(format!("treat {name} as left over from the merge"), why));
    let Some(link) = image.link() else { return not("it has no parent".into()) };
    match below {
        Some(below) if !below.is_parent_of(files, name, &link) => {
            return not(format!("it is not based on {}", below.name));
        }
        Some(_) => {}
        None => return not("the layer below it is gone".into()),
    }
    if link.modified.is_some() || link.len.is_some() {
        return not("it records its parent's time or size, which a merged layer does not".into());
    }
    let whole = Span { at: DiskOffset(0), len: image.geometry().len };
    let runs = Presence::of(files, name, metadata_options(false))?.runs(whole)?;
    if let Some((span, _)) = runs.iter().find(|(_, holds)| *holds != ExtentSource::Parent) {
        return not(format!("it holds data, first {} bytes at {}", span.len, span.at));
    }
    Ok(MergeLayer::in_image(name, &image))
}
