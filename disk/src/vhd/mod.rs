//! VHD: fixed, dynamic and differencing.
//!
//! What is assumed of the storage: a sector of 512 bytes is written whole or not at all. VHD updates its table
//! in place and has no journal, so no writer of it could do with less.
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
//! 4. After a sync: settled. Only now may the place of a block that was given up be used again.
//!
//! A block of an image without parent that is allocated in space that reads as zero gets a full bitmap at once,
//! and its unwritten sectors read as the zeros that they are; later writes to it change no metadata.

mod bitmap;
mod create;
mod info;
mod layout;
mod pending;
mod space;
mod sparse;
mod survey;

pub use create::{Kind, Parent, Spec, create};
pub use info::{Info, Report, check, uuid_text};
pub use survey::{DiskType, Locator};

pub use crate::{Problem, Severity};

use crate::format::{
    Access, Corrupt, Discarded, Format, MetaBlock, MetaWrite, Place, Placed, Reserved, Tail, Ticket, Wait,
};
use crate::{Geometry, ImageError, ImageErrorKind, Source, Span};

use sparse::Sparse;
use survey::Survey;

/// One open VHD file.
#[derive(Debug)]
pub struct Vhd {
    info: Info,
    geometry: Geometry,
    /// `None` for a fixed image, whose bytes stand where they are on the disk.
    sparse: Option<Sparse>,
}

impl Vhd {
    /// Reads the metadata of a file. Damaged images are refused; what redundancy can repair is repaired in
    /// memory and, if the image is open for writing, by the first round.
    pub fn open(source: &mut dyn Source, access: Access, tail: Tail) -> Result<Vhd, ImageError> {
        let survey = Survey::of(source)?;
        if let Some(problem) = survey.damage() {
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
        let sparse = survey.tables.is_some().then(|| Sparse::new(survey, access, tail));
        Ok(Vhd { info, geometry, sparse })
    }

    /// What the metadata says, as of opening.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Whether the image is on top of a parent.
    pub fn has_parent(&self) -> bool {
        self.info.disk_type == DiskType::Differencing
    }

    /// Bytes of the file that hold blocks just now.
    pub fn allocated(&self) -> u64 {
        self.sparse.as_ref().map_or(self.geometry.len, Sparse::allocated)
    }
}

impl Format for Vhd {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn map(&mut self, span: Span) -> Result<Place, Wait> {
        match &mut self.sparse {
            Some(sparse) => sparse.map(span),
            None => Ok(Place::Data { at: span.at, len: span.len }),
        }
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        match &mut self.sparse {
            Some(sparse) => sparse.reserve(span),
            None => Ok(Reserved { at: span.at, len: span.len, ticket: None, fill: None }),
        }
    }

    fn commit(&mut self, ticket: Ticket) -> Option<Placed> {
        self.sparse.as_mut().and_then(|sparse| sparse.commit(ticket))
    }

    fn abandon(&mut self, ticket: Ticket) {
        if let Some(sparse) = &mut self.sparse {
            sparse.abandon(ticket);
        }
    }

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        match &mut self.sparse {
            Some(sparse) => sparse.discard(span),
            None => Ok(Discarded::Kept { at: span.at, len: span.len }),
        }
    }

    fn released(&mut self, at: u64, clean: bool) {
        if let Some(sparse) = &mut self.sparse {
            sparse.released(at, clean);
        }
    }

    fn reclaim(&mut self) -> Option<(u64, u64)> {
        self.sparse.as_mut().and_then(Sparse::reclaim)
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        match &mut self.sparse {
            Some(sparse) => sparse.forget(span),
            None => Ok(span.len),
        }
    }

    fn grow(&mut self, _len: u64) -> Result<(), ImageError> {
        Err(ImageError::new(ImageErrorKind::Unsupported, "a VHD cannot be made larger yet"))
    }

    /// Nothing is compressed in a VHD.
    fn unpack(&self, _bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        Err(Corrupt { at: 0 })
    }

    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        if let Some(sparse) = &mut self.sparse {
            sparse.load(block, bytes);
        }
        Ok(())
    }

    fn dirty(&self) -> usize {
        self.sparse.as_ref().map_or(0, Sparse::dirty)
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        self.sparse.as_mut().map(Sparse::seal).unwrap_or_default()
    }

    fn settled(&mut self, durable: bool) {
        if let Some(sparse) = &mut self.sparse {
            sparse.settled(durable);
        }
    }
}

/// Whether `parent` is the parent that the differencing image `child` was made on.
pub fn check_parent(child: &Vhd, parent: &crate::Image) -> Result<(), ImageError> {
    let mismatch = |what: String| Err(ImageError::new(ImageErrorKind::Mismatch, what));
    let expected = child.info.parent.as_ref().map(|parent| parent.uuid).unwrap_or_default();
    let found = match parent {
        crate::Image::Vhd(parent) => parent.info.uuid,
        crate::Image::Raw(_) | crate::Image::Qcow2(_) => [0; 16],
    };
    if expected != found {
        let (expected, found) = (info::uuid_text(&expected), info::uuid_text(&found));
        return mismatch(format!("the image was made on a parent with uuid {expected}, but this one has {found}"));
    }
    let (child_len, parent_len) = (child.geometry.len, parent.geometry().len);
    if child_len != parent_len {
        return mismatch(format!("the image has {child_len} bytes, but its parent {parent_len}"));
    }
    Ok(())
}

#[cfg(test)]
mod test;
