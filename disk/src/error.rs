//! Why an image cannot be opened, created or trusted.

use crate::FileOffset;

/// Kinds of problems of an image, as far as callers act upon them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageErrorKind {
    /// The file is not an image of the format that was named.
    WrongFormat,
    /// The image is of this format and damaged.
    Corrupt,
    /// The image uses something that this version does not handle.
    Unsupported,
    /// The layers do not belong together: another size, another identity.
    Mismatch,
    /// The request cannot be expressed in this format.
    OutOfLimits,
    /// The storage failed.
    Storage,
}

/// An image error: what kind, at which offset of the file, and what was found there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}{}", at.map(|at| format!(" (at byte {at} of the file)")).unwrap_or_default())]
pub struct ImageError {
    /// The kind.
    pub kind: ImageErrorKind,
    /// Offset in the file of what is wrong, where there is one.
    pub at: Option<FileOffset>,
    /// The finding, in one sentence without a full stop.
    pub what: String,
}

impl ImageError {
    /// An error without a place.
    pub fn new(kind: ImageErrorKind, what: impl Into<String>) -> ImageError {
        ImageError { kind, at: None, what: what.into() }
    }

    /// An error at a byte of the file.
    pub fn at(kind: ImageErrorKind, at: FileOffset, what: impl Into<String>) -> ImageError {
        ImageError { kind, at: Some(at), what: what.into() }
    }
}
