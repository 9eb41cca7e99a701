//! Whether a parent is the one that its child was made on, by what the child records of it ([`crate::Link`]).

use crate::{Format, Image, ImageError, ImageErrorKind};

/// Whether `parent` is what `child` was made on: refused when it is another, or has changed since and the child says
/// so. `parent_modified` is when the parent's file was last changed, in seconds since 1970.
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
            let (apart, than) = (now.abs_diff(then), if now > then { "later" } else { "earlier" });
            let what = format!("the parent was last changed {apart} s {than} than when the image was made on it");
            if child.records_time() { mismatch(what) } else { Ok(Some(what)) }
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::vhd::{self, Kind, Parent, Spec, Vhd};
    use crate::{Access, Tail, raw::Raw};

    const THEN: u64 = 1_600_000_000;

    /// An image of its own metadata, changed by `change`.
    fn image(len: u64, uuid: u8, kind: Kind, change: impl FnOnce(&mut Vec<u8>)) -> Image {
        let spec = Spec { len, kind, block_size: 2 << 20, uuid: [uuid; 16], created: THEN };
        let creation = vhd::create(&spec).unwrap();
        let mut bytes = vec![0; usize::try_from(creation.len).unwrap()];
        for write in &creation.writes {
            let at = usize::try_from(write.at.0).unwrap();
            bytes[at..at + write.bytes.len()].copy_from_slice(&write.bytes);
        }
        change(&mut bytes);
        Image::Vhd(Box::new(Vhd::open(&mut bytes.as_slice(), Access::ReadOnly, Tail::Zeroes).unwrap()))
    }

    fn child(uuid: u8, change: impl FnOnce(&mut Vec<u8>)) -> Image {
        let parent = Parent { uuid: [uuid; 16], modified: THEN, relative: "p".into(), absolute: "/p".into() };
        image(8 << 20, 1, Kind::Differencing(parent), change)
    }

    fn parent(len: u64, uuid: u8) -> Image {
        image(len, uuid, Kind::Dynamic, |_| ())
    }

    /// As the Xen tools would have made it: without an operating system, which both footers say.
    fn by_others(bytes: &mut [u8]) {
        for at in [0, bytes.len() - 512] {
            bytes[at + 36..at + 40].fill(0);
            bytes[at + 64..at + 68].fill(0);
            let sum = !bytes[at..at + 512].iter().map(|&byte| u32::from(byte)).sum::<u32>();
            bytes[at + 64..at + 68].copy_from_slice(&sum.to_be_bytes());
        }
    }

    #[test]
    fn the_parent_it_was_made_on_is_right_at_any_size() {
        let child = child(9, |_| ());
        assert_eq!(check_parent(&child, &parent(8 << 20, 9), Some(THEN)), Ok(None));
        assert_eq!(check_parent(&child, &parent(6 << 20, 9), Some(THEN)), Ok(None), "the child has grown");
        assert_eq!(check_parent(&child, &parent(8 << 20, 9), None), Ok(None));
    }

    #[test]
    fn another_parent_is_refused_by_its_identity() {
        let error = check_parent(&child(9, |_| ()), &parent(8 << 20, 8), Some(THEN)).unwrap_err();
        assert_eq!(error.kind, ImageErrorKind::Mismatch);
        assert!(error.what.contains("09090909") && error.what.contains("08080808"), "{error}");
        let raw = Image::Raw(Raw::new(8 << 20, 512, true).unwrap());
        assert_eq!(check_parent(&child(9, |_| ()), &raw, None).unwrap_err().kind, ImageErrorKind::Mismatch);
        assert_eq!(check_parent(&child(0, |_| ()), &raw, None), Ok(None), "no identity is that of a raw parent");
        assert_eq!(check_parent(&raw, &raw, None).unwrap_err().kind, ImageErrorKind::Mismatch, "it has no parent");
    }

    #[test]
    fn a_parent_that_has_changed_is_refused_where_its_time_was_recorded_by_us() {
        let found = check_parent(&child(9, |_| ()), &parent(8 << 20, 9), Some(THEN + 1));
        assert_eq!(found.unwrap_err().kind, ImageErrorKind::Mismatch);
        let found = check_parent(&child(9, |bytes| by_others(bytes)), &parent(8 << 20, 9), Some(THEN + 1));
        assert!(found.unwrap().is_some_and(|note| note.contains("changed")));
    }
}
