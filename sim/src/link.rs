//! What children record of their parents in the simulator, and whether a chain fits together by that.
//!
//! Time is a number that changes with a file's first change after its time was read: no file system has a finer clock,
//! and a child that has recorded a time must notice the next change.

use disk::{FileId, Format, Image, ImageError, ImageErrorKind, Link, check_parent};

use crate::media::Media;

/// What a child records of this parent.
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

/// The same without what changes. It is recorded again where that is so already: a sync of it may have failed.
pub fn forgotten(link: Link) -> Option<Link> {
    Some(Link { modified: None, len: None, ..link })
}

/// Has an image record something else of its parent, if it has one; whether it does. A qcow2 file of clusters as small
/// as most of those explored here has no room for that, and knows of its parent no more than a name.
pub fn change(image: &mut Image, change: impl FnOnce(Link) -> Option<Link>) -> Result<bool, ImageError> {
    let Some(changed) = image.link().and_then(change).filter(|_| can_change(image)) else { return Ok(false) };
    image.relink(Some(&changed))?;
    Ok(true)
}

/// Whether an image has room for what is to be recorded of its parent.
pub fn can_change(image: &Image) -> bool {
    /// What the code under test needs.
    const CLUSTER_MIN: u64 = 4096;
    match image {
        Image::Raw(_) | Image::Foreign(_) => false,
        Image::Vhd(vhd) => vhd.info().block_size.is_some(),
        Image::Qcow2(qcow2) => qcow2.info().cluster_size >= CLUSTER_MIN,
    }
}

/// Refuses layers, leaf first, of which one was not made on the one below it, or on what that was before, or is
/// smaller: no merge would take it.
pub fn check(layers: &[Image], files: &[Media]) -> Result<(), ImageError> {
    if layers.last().is_some_and(|last| last.link().is_some()) {
        return Err(ImageError::new(ImageErrorKind::Mismatch, "the last layer has a parent"));
    }
    let pairs = layers.iter().zip(layers.iter().zip(files).skip(1));
    for (child, (parent, file)) in pairs {
        // One that records no parent stands alone.
        check_parent(child, parent, Some(file.modified()))?;
        let (above, below) = (child.geometry().len, parent.geometry().len);
        if above < below {
            let what = format!("a layer of {above} bytes hides the end of one of {below}");
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
    }
    Ok(())
}
