//! What an image records of its parent: enough to find the right file, and to see that it is not the right one any more.
//!
//! The names are for people. No file is ever opened because an image names it.

use crate::{Format, Image, ImageError, ImageErrorKind};

/// A parent as its child knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The parent's format, as in `vhd:PATH`, where the child records it.
    pub format: Option<&'static str>,
    /// Its identity; all zero where it has none (raw images, and qcow2 of other programs).
    pub uuid: [u8; 16],
    /// Its path as seen from the child's directory; empty if not recorded.
    pub relative: String,
    /// Its absolute path; empty if not recorded.
    pub absolute: String,
    /// Bytes of its disk, where the child records them.
    pub len: Option<u64>,
    /// When it was last changed, in seconds since 1970; `None` while that is not fixed, or where it is not recorded.
    pub modified: Option<u64>,
}

/// Whether `parent` is what `child` was made on: refused when it is another, or has changed since and the child says so.
/// `parent_modified` is when the parent's file was last changed, in seconds since 1970.
///
/// Only an image of Tapline records that time so that it can be relied upon. Of other images, `Ok` is what to tell
/// people of a time that differs.
pub fn check_parent(child: &Image, parent: &Image, parent_modified: Option<u64>) -> Result<Option<String>, ImageError> {
    let mismatch = |what: String| Err(ImageError::new(ImageErrorKind::Mismatch, what));
    let Some(link) = child.link() else { return mismatch("the image stands on its own, it has no parent".into()) };
    let found = parent.identity();
    // In a VHD, no identity is that of a raw parent; elsewhere, of a parent of which none was recorded.
    if link.uuid != found && (link.uuid != [0; 16] || matches!(child, Image::Vhd(_))) {
        let (expected, found) = (crate::vhd::uuid_text(&link.uuid), crate::vhd::uuid_text(&found));
        return mismatch(format!("the image was made on a parent with uuid {expected}, but this one has {found}"));
    }
    let len = parent.geometry().len;
    if let Some(expected) = link.len.filter(|&expected| expected != len) {
        return mismatch(format!("the image was made on a parent of {expected} bytes, but this one has {len}"));
    }
    match (link.modified, parent_modified) {
        (Some(then), Some(now)) if then != now => {
            let what = format!(
                "the parent was changed at {now}, but when the image was made on it, at {then}, seconds since 1970"
            );
            if child.records_time() { mismatch(what) } else { Ok(Some(what)) }
        }
        _ => Ok(None),
    }
}
