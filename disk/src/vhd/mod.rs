//! VHD: fixed, dynamic and differencing.
//!
//! Assumption about the storage: a sector of 512 bytes is written whole or not at all. VHD updates its table in place
//! and has no journal, so no writer of it could do with less.
//!
//! # How a crash is survived
//!
//! In memory the table and the bitmaps always hold the newest state, which is what the guest reads. A round
//! (see [`crate::Format`]) makes it durable:
//!
//! 1. `seal` copies every changed bitmap, table sector, the batmap and the footer, at the moment the data sync
//!    is submitted. *Reopened here:* the old table and bitmaps; new data is unreachable, in space that
//!    nothing refers to.
//! 2. After the data sync, batch one: bitmaps, batmap, footer. *Reopened here:* an old block may show sectors
//!    whose data is durable by now. New blocks are still unreachable. A batmap that is half old does not match
//!    its checksum and is ignored.
//! 3. After a sync, batch two: table sectors. *Reopened here:* each new block is there with its bitmap, or not.
//!    The file already is long enough for every block in the table, since the footer behind it is durable.
//! 4. After a sync: settled. Only now may the place of a block that was freed be used again.
//!
//! Other headers, tables and sizes have an order of their own (`sparse::generation`, `fixed`); so have sectors
//! that the parent holds (`sparse::forget`).
//!
//! A block of an image without parent that is allocated in space that reads as zero gets a full bitmap at once,
//! and its unwritten sectors read as the zeros that they are; later writes to it change no metadata.

mod bitmap;
mod create;
mod fixed;
mod info;
mod layout;
mod parent;
mod pending;
mod space;
mod sparse;
mod stamp;
mod survey;
mod tidy;

pub use create::{Kind, Spec, create, measure};
pub use info::{Info, Report, check, uuid_text};
pub use parent::{Parent, ParentInfo};
pub use survey::{DiskType, Locator};
pub use tidy::{Tidy, tidy};

pub use crate::{Problem, Severity};

use crate::format::{
    Access, Committed, Corrupt, Discarded, Format, Mapping, MetaBlock, MetaWrite, Reserved, Tail, Ticket, Wait,
};
use crate::{FileOffset, FileRange, Geometry, ImageError, ImageErrorKind, Link, Records, Source, Span, Stamp};

#[cfg(test)]
pub(crate) use layout::stamp_field;
pub(crate) use stamp::stamps;

use fixed::Fixed;
use sparse::Sparse;
use survey::{LEN_MAX, Survey};

/// One open VHD file.
#[derive(Debug)]
pub struct Vhd {
    info: Info,
    geometry: Geometry,
    body: Body,
    tail: Tail,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "an image is boxed already")]
enum Body {
    Fixed(Fixed),
    Sparse(Sparse),
}

impl Vhd {
    /// Reads the metadata of a file. What redundancy can repair is repaired in memory and, if the image is open for
    /// writing, by the first round. An image with damaged table entries is opened for reading only: reads of their
    /// blocks fail, all others do not.
    pub fn open(source: &mut dyn Source, access: Access, tail: Tail) -> Result<Vhd, ImageError> {
        let survey = Survey::on(source, tail)?;
        if let Some(problem) = survey.damage().filter(|_| access == Access::ReadWrite) {
            return Err(ImageError::at(ImageErrorKind::Corrupt, problem.at, problem.what.clone()));
        }
        let info = Info::of(&survey);
        let footer = &survey.footer;
        let geometry = Geometry {
            len: footer.current_size.get(),
            block: 512,
            physical_block: 4096,
            discard: info.block_size.unwrap_or(4096),
            chs: Some((footer.cylinders.get(), footer.heads, footer.sectors)),
            read_only: access == Access::ReadOnly,
        };
        let body = match survey.tables {
            Some(_) => Body::Sparse(Sparse::new(survey, access, tail)),
            None => Body::Fixed(Fixed::new(survey.footer, survey.end.0)),
        };
        Ok(Vhd { info, geometry, body, tail })
    }

    /// The description of the image as of opening, with the changes requested since.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Whether the image is on top of a parent.
    pub fn has_parent(&self) -> bool {
        self.info.disk_type == DiskType::Differencing
    }

    /// Bytes of the file that hold blocks just now.
    pub fn allocated(&self) -> u64 {
        match &self.body {
            Body::Fixed(fixed) => fixed.len(),
            Body::Sparse(sparse) => sparse.allocated(),
        }
    }

    /// The image's identity.
    pub fn identity(&self) -> [u8; 16] {
        self.info.uuid
    }

    /// The record of the parent, if there is one.
    pub fn link(&self) -> Option<Link> {
        self.info.parent.as_ref().map(ParentInfo::link)
    }

    /// Puts the image on another parent, which holds the same, or on none, when the image holds everything. Durable
    /// with the next round.
    pub fn relink(&mut self, parent: Option<&Link>) -> Result<(), ImageError> {
        let unsupported = |what: &str| Err(ImageError::new(ImageErrorKind::Unsupported, what));
        if self.geometry.read_only {
            return unsupported("the image is open for reading only");
        }
        let Body::Sparse(sparse) = &mut self.body else {
            return unsupported("a fixed VHD holds everything, it cannot have a parent");
        };
        let old = self.info.parent.as_ref().map(ParentInfo::link);
        let new = parent.map(Parent::from);
        match (&old, &new) {
            (None, None) => {}
            (Some(old), Some(new)) if old.relative == new.relative && old.absolute == new.absolute => {
                sparse.rename_parent(new);
            }
            _ => sparse.relink(new.as_ref())?,
        }
        self.info.disk_type = if new.is_some() { DiskType::Differencing } else { DiskType::Dynamic };
        self.info.parent = new.as_ref().map(Parent::info).transpose()?;
        Ok(())
    }

    /// Whether metadata stands behind blocks since there was no room in front of them, as of the last round: libvhd
    /// refuses such an image.
    pub fn is_behind_blocks(&self) -> bool {
        match &self.body {
            Body::Fixed(_) => false,
            Body::Sparse(sparse) => sparse.is_behind_blocks(),
        }
    }

    /// The size that the body has now.
    fn resized(&mut self, len: u64, chs: (u16, u8, u8)) {
        (self.geometry.len, self.geometry.chs) = (len, Some(chs));
        (self.info.len, self.info.chs) = (len, chs);
        if let Some(block_size) = self.info.block_size {
            self.info.blocks = len.div_ceil(u64::from(block_size));
        }
    }
}

impl Format for Vhd {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        match &mut self.body {
            Body::Fixed(fixed) => Ok(fixed.map(span)),
            Body::Sparse(sparse) => sparse.map(span),
        }
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        match &mut self.body {
            Body::Fixed(fixed) => fixed.reserve(span),
            Body::Sparse(sparse) => sparse.reserve(span),
        }
    }

    fn commit(&mut self, ticket: Ticket) -> Option<Committed> {
        match &mut self.body {
            Body::Fixed(_) => None,
            Body::Sparse(sparse) => sparse.commit(ticket),
        }
    }

    fn abandon(&mut self, ticket: Ticket) {
        if let Body::Sparse(sparse) = &mut self.body {
            sparse.abandon(ticket);
        }
    }

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        match &mut self.body {
            Body::Fixed(fixed) => Ok(fixed.discard(span)),
            Body::Sparse(sparse) => sparse.discard(span),
        }
    }

    fn released(&mut self, at: FileOffset, clean: bool) {
        if let Body::Sparse(sparse) = &mut self.body {
            sparse.released(at, clean);
        }
    }

    fn reclaim(&mut self) -> Option<FileRange> {
        match &mut self.body {
            Body::Fixed(_) => None,
            Body::Sparse(sparse) => sparse.reclaim(),
        }
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        match &mut self.body {
            Body::Fixed(_) => Ok(span.len),
            Body::Sparse(sparse) => sparse.forget(span),
        }
    }

    /// A fixed disk becomes larger only when the round has settled: see `vhd::fixed`. A call after that has nothing
    /// more to do.
    fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        let refused = |kind, what: String| Err(ImageError::new(kind, what));
        let old = self.geometry.len;
        if self.geometry.read_only {
            return refused(ImageErrorKind::Unsupported, "the image is open for reading only".into());
        }
        if len < old {
            return refused(ImageErrorKind::OutOfLimits, format!("a disk of {old} bytes cannot shrink to {len}"));
        }
        if len > LEN_MAX || len % 512 != 0 {
            let what = format!("a VHD cannot have {len} bytes: whole sectors, and at most 2040 GiB");
            return refused(ImageErrorKind::OutOfLimits, what);
        }
        if len == old {
            return Ok(());
        }
        match &mut self.body {
            Body::Fixed(_) if self.tail == Tail::Stale => refused(
                ImageErrorKind::Unsupported,
                "a fixed VHD on a block device cannot grow: its footer stands at the device's end".into(),
            ),
            Body::Fixed(fixed) => fixed.grow(len),
            Body::Sparse(sparse) => {
                sparse.grow(len)?;
                self.resized(len, layout::chs(len));
                Ok(())
            }
        }
    }

    /// Nothing is compressed in a VHD.
    fn decompress(&self, _bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        Err(Corrupt { at: FileOffset(0) })
    }

    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        if let Body::Sparse(sparse) = &mut self.body {
            sparse.load(block, bytes);
        }
        Ok(())
    }

    fn drop_caches(&mut self) {
        if let Body::Sparse(sparse) = &mut self.body {
            sparse.drop_caches();
        }
    }

    fn records(&mut self) -> &mut Records {
        match &mut self.body {
            Body::Fixed(fixed) => fixed.records(),
            Body::Sparse(sparse) => sparse.records(),
        }
    }

    fn collect_records(&mut self) {
        self.records().collect();
    }

    fn set_stamp(&mut self, stamp: Stamp) -> Option<MetaWrite> {
        match &mut self.body {
            Body::Fixed(_) => None,
            Body::Sparse(sparse) => sparse.set_stamp(stamp),
        }
    }

    fn clear_stamp(&mut self) {
        if let Body::Sparse(sparse) = &mut self.body {
            sparse.clear_stamp();
        }
    }

    fn dirty(&self) -> usize {
        match &self.body {
            Body::Fixed(fixed) => fixed.dirty(),
            Body::Sparse(sparse) => sparse.dirty(),
        }
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        match &mut self.body {
            Body::Fixed(fixed) => fixed.seal(),
            Body::Sparse(sparse) => sparse.seal(),
        }
    }

    fn settled(&mut self, durable: bool) {
        match &mut self.body {
            Body::Fixed(fixed) => {
                fixed.settled(durable);
                let (len, chs) = (fixed.len(), fixed.chs());
                self.resized(len, chs);
            }
            Body::Sparse(sparse) => sparse.settled(durable),
        }
    }
}

#[cfg(test)]
mod test;
