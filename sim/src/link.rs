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
/// as those explored here has no room for that, and knows of its parent no more than a name.
pub fn change(image: &mut Image, change: impl FnOnce(Link) -> Option<Link>) -> Result<bool, ImageError> {
    let Image::Vhd(vhd) = image else { return Ok(false) };
    let Some(changed) = vhd.link().and_then(change) else { return Ok(false) };
    vhd.relink(Some(&changed))?;
    Ok(true)
}

/// Refuses layers, leaf first, of which one was not made on the one below it, or on what that was before, or is
/// smaller: no merge would take it.
pub fn check(layers: &[Image], files: &[Media]) -> Result<(), ImageError> {
    let pairs = layers.iter().zip(layers.iter().zip(files).skip(1));
    for (child, (parent, file)) in pairs {
        // A raw image has no child that does not say so; one that says nothing stands alone, and is the last.
        if child.link().is_some() {
            check_parent(child, parent, Some(file.modified()))?;
        }
        let (above, below) = (child.geometry().len, parent.geometry().len);
        if above < below {
            let what = format!("a layer of {above} bytes hides the end of one of {below}");
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
    }
    Ok(())
}
