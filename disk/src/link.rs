//! The record that an image has of its parent: enough to find the right file, and to notice that it is no longer the
//! right one.
//!
//! The names are for people. No file is ever opened because an image names it.

/// A parent as its child knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The parent's format, as in `vhd:PATH`, where the child records it.
    pub format: Option<&'static str>,
    /// Its identity; all zero where it has none (raw images, and qcow2 of other programs).
    pub uuid: [u8; 16],
    /// Its path as seen from the child's directory; empty if not recorded.
    pub relative: String,
    /// Its absolute path, or the URI of an export; empty if not recorded.
    pub absolute: String,
    /// Bytes of its disk, where the child records them.
    pub len: Option<u64>,
    /// When it was last changed, in seconds since 1970; `None` while that is not fixed, or where it is not recorded.
    pub modified: Option<u64>,
}
