//! The parent links that children record in the simulator, and the check whether a chain fits together.
//!
//! Time is a number that changes with a file's first change after its time was read: no file system has a finer clock,
//! and a child that has recorded a time must notice the next change.

use disk::{FileId, Format, Image, ImageError, ImageErrorKind, Link, check_parent};

use crate::media::Media;

/// The link that a child records for this parent.
pub fn to(parent: &Image, file: FileId, modified: Option<u64>) -> Link {
    Link {
        format: None,
        uuid: parent.identity(),
        relative: format!("{}.img", file.0),
        absolute: format!("/srv/{}.img", file.0),
        len: Some(parent.geometry().len),
        modified,
    }
}

/// The link without the parent's time. It is recorded again even if unchanged, because a sync of it may have failed.
pub fn forgotten(link: Link) -> Option<Link> {
    Some(Link { modified: None, len: None, ..link })
}

/// Changes the parent link of an image; returns false if it has none. A qcow2 file with clusters as small as most here
/// has no room for a link, only for the parent's name.
pub fn change(image: &mut Image, change: impl FnOnce(Link) -> Option<Link>) -> Result<bool, ImageError> {
    let Some(changed) = image.link().and_then(change).filter(|_| can_change(image)) else { return Ok(false) };
    image.relink(Some(&changed))?;
    Ok(true)
}

/// Whether an image has room for a parent link.
pub fn can_change(image: &Image) -> bool {
    /// The minimum cluster size required by the code under test.
    const CLUSTER_MIN: u64 = 4096;
    match image {
        Image::Raw(_) | Image::Foreign(_) => false,
        Image::Vhd(vhd) => vhd.info().block_size.is_some(),
        Image::Qcow2(qcow2) => qcow2.info().cluster_size >= CLUSTER_MIN,
    }
}

/// Refuses layers, leaf first, of which one was not created on the one below it or on that one's earlier state, or is
/// smaller, which no merge accepts.
pub fn check(layers: &[Image], files: &[Media]) -> Result<(), ImageError> {
    if layers.last().is_some_and(|last| last.link().is_some()) {
        return Err(ImageError::new(ImageErrorKind::Mismatch, "the last layer has a parent"));
    }
    let pairs = layers.iter().zip(layers.iter().zip(files).skip(1));
    for (child, (parent, file)) in pairs {
        // A layer without a parent link is accepted on any parent.
        check_parent(child, parent, Some(file.modified()))?;
        let (above, below) = (child.geometry().len, parent.geometry().len);
        if above < below {
            let what = format!("a layer of {above} bytes hides the end of one of {below}");
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
    }
    Ok(())
}
