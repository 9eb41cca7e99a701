//! Findings of a check of an image, for all formats.

use crate::FileOffset;

/// How bad a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Space that nothing refers to; the next writer takes it back.
    Leak,
    /// The last writer was stopped before it could close the image; opening it for writing does that.
    Unclosed,
    /// Redundant metadata is missing or wrong; a repair restores it from the other copy.
    Repairable,
    /// Guest data cannot be found or would be misread.
    Damage,
}

/// Something wrong with an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// How bad it is.
    pub severity: Severity,
    /// Offset in the file.
    pub at: FileOffset,
    /// The finding, in one sentence without a full stop.
    pub what: String,
}
