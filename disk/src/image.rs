//! The formats, as one type: which of them a layer is of is decided at run time, by name.

use crate::foreign::Foreign;
use crate::format::{Committed, Corrupt, Discarded, Format, Mapping, MetaBlock, MetaWrite, Reserved, Ticket, Wait};
use crate::qcow2::{self, Qcow2};
use crate::raw::Raw;
use crate::vhd::{self, Vhd};
use crate::{FileOffset, FileRange, Geometry, ImageError, ImageErrorKind, Link, Records, Source, Span, Stamp};

/// An open image file of any format.
#[derive(Debug)]
pub enum Image {
    /// See [`crate::raw`].
    Raw(Raw),
    /// See [`crate::vhd`].
    Vhd(Box<Vhd>),
    /// See [`crate::qcow2`].
    Qcow2(Box<Qcow2>),
    /// See [`crate::foreign`].
    Foreign(Box<Foreign>),
}

/// Calls the same method of whichever format it is.
macro_rules! each {
    ($self:ident, $image:ident => $call:expr) => {
        match $self {
            Image::Raw($image) => $call,
            Image::Vhd($image) => $call,
            Image::Qcow2($image) => $call,
            Image::Foreign($image) => $call,
        }
    };
}

impl Image {
    /// Its identity, which its children record; all zero where it has none.
    pub fn identity(&self) -> [u8; 16] {
        match self {
            Image::Raw(_) | Image::Foreign(_) => [0; 16],
            Image::Vhd(vhd) => vhd.identity(),
            Image::Qcow2(qcow2) => qcow2.info().uuid,
        }
    }

    /// The image's record of its parent, if it has one.
    pub fn link(&self) -> Option<Link> {
        match self {
            Image::Raw(_) | Image::Foreign(_) => None,
            Image::Vhd(vhd) => vhd.link(),
            Image::Qcow2(qcow2) => qcow2.link(),
        }
    }

    /// Records another parent, or none. The reader of the image must find the same: it is the caller who has seen to
    /// that. Durable with the next round, and whole or not at all.
    pub fn relink(&mut self, parent: Option<&Link>) -> Result<(), ImageError> {
        match self {
            Image::Raw(_) => Err(ImageError::new(ImageErrorKind::Unsupported, "a raw image cannot have a parent")),
            Image::Foreign(_) => {
                Err(ImageError::new(ImageErrorKind::Unsupported, "images of this format are only read"))
            }
            Image::Vhd(vhd) => vhd.relink(parent),
            Image::Qcow2(qcow2) => qcow2.relink(parent),
        }
    }

    /// Whether the time of its parent's last change, where one is recorded, is what Tapline has recorded.
    pub(crate) fn records_time(&self) -> bool {
        match self {
            Image::Raw(_) | Image::Foreign(_) => false,
            Image::Vhd(vhd) => vhd.info().by_tapline,
            // An own extension has it, which no other program writes.
            Image::Qcow2(_) => true,
        }
    }
}

/// The stamps in a file, of whatever format it is. Bytes that a guest wrote may look like one: a stamp proves something
/// only where it equals one that was drawn at random.
pub fn stamps_in(source: &mut dyn Source) -> Result<Vec<Stamp>, ImageError> {
    let mut found = vhd::stamps(source)?;
    found.extend(qcow2::stamp(source)?);
    Ok(found)
}

impl Format for Image {
    fn geometry(&self) -> Geometry {
        each!(self, image => image.geometry())
    }

    fn is_flat(&self) -> bool {
        each!(self, image => image.is_flat())
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        each!(self, image => image.map(span))
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        each!(self, image => image.reserve(span))
    }

    fn commit(&mut self, ticket: Ticket) -> Option<Committed> {
        each!(self, image => image.commit(ticket))
    }

    fn abandon(&mut self, ticket: Ticket) {
        each!(self, image => image.abandon(ticket))
    }

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        each!(self, image => image.discard(span))
    }

    fn released(&mut self, at: FileOffset, clean: bool) {
        each!(self, image => image.released(at, clean))
    }

    fn reclaim(&mut self) -> Option<FileRange> {
        each!(self, image => image.reclaim())
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        each!(self, image => image.forget(span))
    }

    fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        each!(self, image => image.grow(len))
    }

    fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        each!(self, image => image.decompress(bytes))
    }

    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        each!(self, image => image.load(block, bytes))
    }

    fn drop_caches(&mut self) {
        each!(self, image => image.drop_caches())
    }

    fn records(&mut self) -> &mut Records {
        each!(self, image => image.records())
    }

    fn collect_records(&mut self) {
        each!(self, image => image.collect_records())
    }

    fn set_stamp(&mut self, stamp: Stamp) -> Option<MetaWrite> {
        each!(self, image => image.set_stamp(stamp))
    }

    fn clear_stamp(&mut self) {
        each!(self, image => image.clear_stamp())
    }

    fn dirty(&self) -> usize {
        each!(self, image => image.dirty())
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        each!(self, image => image.seal())
    }

    fn settled(&mut self, durable: bool) {
        each!(self, image => image.settled(durable))
    }
}
