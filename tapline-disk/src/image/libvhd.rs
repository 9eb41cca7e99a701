//! Notes about VHDs that libvhd rejects; vhd-util, tapdisk and XenServer read VHDs with it.
//!
//! Such an image is intact, and Tapline and QEMU can read it, so it is not rejected (decision 0029).

use control::{FormatName, ImageName};
use disk::Image;

use crate::process::log::say;

/// The only block size that libvhd supports.
const BLOCK: u32 = 2 << 20;

/// The images whose metadata is located behind their blocks, at a point in time.
#[derive(Debug, Default)]
pub struct MovedMetadata(Vec<ImageName>);

impl MovedMetadata {
    /// Finds the `images` whose metadata is behind their blocks.
    pub fn of<'a>(images: impl IntoIterator<Item = (ImageName, &'a Image)>) -> MovedMetadata {
        let is_behind = |image: &Image| matches!(image, Image::Vhd(vhd) if vhd.is_behind_blocks());
        MovedMetadata(images.into_iter().filter(|(_, image)| is_behind(image)).map(|(name, _)| name).collect())
    }

    /// Logs the images that have been added since `before`.
    pub fn log_new_since(&self, before: &MovedMetadata) {
        for name in self.0.iter().filter(|name| !before.0.contains(name)) {
            say(format_args!(
                "the metadata of {name} had to be moved behind its blocks: `vhd-util check` rejects such a VHD; \
                 `tapline image convert` creates one that it accepts"
            ));
        }
    }
}

/// Logs a note if a new image was requested with a block size that libvhd does not support.
pub fn note_block_size(image: &ImageName, unit: Option<u32>) {
    if let Some(unit) = unit.filter(|&unit| image.format == FormatName::Vhd && unit != BLOCK) {
        say(format_args!(
            "{image} has blocks of {unit} bytes: vhd-util and tapdisk read VHDs with blocks of {BLOCK} bytes only"
        ));
    }
}
