//! What a merge must know of the layers of a chain, and whether they can be merged.
//!
//! It knows nothing about how they are merged: by a job, or under a guest.

use std::ops::RangeInclusive;

use control::ImageName;
use disk::{Format, Image};
use plan::Layer;

use crate::failure::Failure;

/// What a merge must know of the layers of a chain, leaf first, of which `merged` are merged into the last of them.
/// Refused if they cannot be. If an upper layer is smaller, growing would expose parent data; internal snapshots of a
/// layer would show the changed contents of the layers below it, and be removed with its file.
pub fn of_chain(chain: &[(ImageName, &Image)], merged: RangeInclusive<usize>) -> Result<Vec<Layer>, Failure> {
    let above = chain.iter().take(*merged.end()).skip(*merged.start());
    for ((upper, above), (lower, below)) in above.zip(chain.iter().skip(*merged.start() + 1)) {
        let tried = || format!("merge {upper} into {lower}");
        let (above_len, below_len) = (above.geometry().len, below.geometry().len);
        if below_len > above_len {
            let why = format!("it has {below_len} bytes, of which {upper} above it hides all beyond {above_len}");
            return Err(Failure::new(tried(), why)
                .advise("merge the layers above or below these two, or copy the disk: tapline image convert"));
        }
        if matches!(above, Image::Qcow2(qcow2) if qcow2.info().snapshots > 0) {
            let why = "it has internal snapshots, whose contents would change";
            return Err(Failure::new(tried(), why).advise("delete them, or copy the disk: tapline image convert"));
        }
    }
    Ok(chain.iter().map(|(name, image)| layer(name, image)).collect())
}

fn layer(name: &ImageName, image: &Image) -> Layer {
    let raw = matches!(image, Image::Raw(_));
    Layer { len: image.geometry().len, flat: raw || name.data_file.is_some(), raw }
}
