//! Notes about VHDs that libvhd rejects, which vhd-util, tapdisk and XenServer use to read VHDs.
//!
//! Such an image is intact, and Tapline and QEMU can read it, so nothing is refused because of it (decision 0029).

use control::{FormatName, ImageName};
use disk::Image;

use crate::process::log::say;

/// Bytes of a block, as libvhd has them.
const BLOCK: u32 = 2 << 20;

/// Images whose metadata is located behind their blocks, at a point in time.
#[derive(Debug, Default)]
pub struct Behind(Vec<ImageName>);

impl Behind {
    /// Those of `images` with their metadata behind their blocks.
    pub fn of<'a>(images: impl IntoIterator<Item = (ImageName, &'a Image)>) -> Behind {
        let is_behind = |image: &Image| matches!(image, Image::Vhd(vhd) if vhd.is_behind_blocks());
        Behind(images.into_iter().filter(|(_, image)| is_behind(image)).map(|(name, _)| name).collect())
    }

    /// Tells of those that are among them now and were not `before`.
    pub fn tell_since(&self, before: &Behind) {
        for name in self.0.iter().filter(|name| !before.0.contains(name)) {
            say(format_args!(
                "the metadata of {name} had to be moved behind its blocks: `vhd-util check` rejects such a VHD; \
                 `tapline image convert` creates one that it accepts"
            ));
        }
    }
}

/// Prints a note if a new image was requested with a block size that libvhd does not support.
pub fn tell_of_block_size(image: &ImageName, unit: Option<u32>) {
    if let Some(unit) = unit.filter(|&unit| image.format == FormatName::Vhd && unit != BLOCK) {
        say(format_args!(
            "{image} has blocks of {unit} bytes: vhd-util and tapdisk read VHDs with blocks of {BLOCK} bytes only"
        ));
    }
}
