//! Images of other hypervisors, which are only read: VMDK and VHDX.
//!
//! Each of the two says where bytes live; what they have in common is here. Nothing is ever written: the disk refuses
//! writes to an image whose geometry says so, and no image is opened on top of these.
//!
//! The input is hostile. Every number of the file is checked before it is used: sizes against limits that are named
//! where they are, places against the file's end. Tables are read a page at a time and a bounded number of pages is
//! kept, so that no number of the file decides how much memory is taken.

mod pages;
pub mod vhdx;
pub mod vmdk;

use crate::format::{Committed, Corrupt, Discarded, Format, Mapping, MetaBlock, MetaWrite, Reserved, Ticket, Wait};
use crate::size::on_disk;
use crate::{FileOffset, FileRange, Geometry, ImageError, ImageErrorKind, Records, Source, Span, Stamp};

use vhdx::Vhdx;
use vmdk::Vmdk;

const SECTOR: u64 = 512;
/// Bytes of the largest disk: as many as a VHDX can have, and more than a VMDK.
const LEN_MAX: u64 = 64 << 40;

/// An open image of another hypervisor.
#[derive(Debug)]
pub struct Foreign {
    geometry: Geometry,
    body: Body,
    /// Never any.
    records: Records,
}

/// Of which format it is.
#[derive(Debug)]
pub enum Body {
    /// See [`vmdk`].
    Vmdk(Vmdk),
    /// See [`vhdx`].
    Vhdx(Vhdx),
}

impl Foreign {
    /// Reads the metadata of a VMDK.
    pub fn open_vmdk(source: &mut dyn Source) -> Result<Foreign, ImageError> {
        let vmdk = Vmdk::open(source)?;
        Ok(Foreign::new(vmdk.len(), Body::Vmdk(vmdk)))
    }

    /// Reads the metadata of a VHDX.
    pub fn open_vhdx(source: &mut dyn Source) -> Result<Foreign, ImageError> {
        let vhdx = Vhdx::open(source)?;
        Ok(Foreign::new(vhdx.len(), Body::Vhdx(vhdx)))
    }

    fn new(len: u64, body: Body) -> Foreign {
        let geometry = Geometry { len, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: true };
        Foreign { geometry, body, records: Records::default() }
    }

    /// Bytes of a sector as the guest of the disk has them: by these its partitions are found.
    pub fn logical_sector(&self) -> u32 {
        match &self.body {
            Body::Vhdx(vhdx) if vhdx.logical_sector() == 4096 => 4096,
            Body::Vhdx(_) | Body::Vmdk(_) => 512,
        }
    }

    /// The image, by its format.
    pub fn body(&self) -> &Body {
        &self.body
    }
}

impl Format for Foreign {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        match &mut self.body {
            Body::Vmdk(vmdk) => vmdk.map(span),
            Body::Vhdx(vhdx) => vhdx.map(span),
        }
    }

    fn reserve(&mut self, _span: Span) -> Result<Reserved, Wait> {
        Err(Wait::NoSpace)
    }

    fn commit(&mut self, _ticket: Ticket) -> Option<Committed> {
        None
    }

    fn abandon(&mut self, _ticket: Ticket) {}

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        Ok(Discarded::Nothing { len: span.len })
    }

    fn released(&mut self, _at: FileOffset, _clean: bool) {}

    fn reclaim(&mut self) -> Option<FileRange> {
        None
    }

    /// It has no parent, so nothing in it is ever given up.
    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        Ok(span.len)
    }

    fn grow(&mut self, _len: u64) -> Result<(), ImageError> {
        Err(ImageError::new(ImageErrorKind::Unsupported, "images of this format are only read"))
    }

    fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        match &self.body {
            Body::Vmdk(vmdk) => vmdk.decompress(bytes),
            Body::Vhdx(_) => Err(Corrupt { at: FileOffset(0) }),
        }
    }

    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        match &mut self.body {
            Body::Vmdk(vmdk) => vmdk.load(block, bytes),
            Body::Vhdx(vhdx) => vhdx.load(block, bytes),
        }
        Ok(())
    }

    fn drop_caches(&mut self) {
        match &mut self.body {
            Body::Vmdk(vmdk) => vmdk.drop_caches(),
            Body::Vhdx(vhdx) => vhdx.drop_caches(),
        }
    }

    fn records(&mut self) -> &mut Records {
        &mut self.records
    }

    fn collect_records(&mut self) {}

    /// Nothing is logged of it that a stamp would be needed for.
    fn set_stamp(&mut self, _stamp: Stamp) -> Option<MetaWrite> {
        None
    }

    fn clear_stamp(&mut self) {}

    fn dirty(&self) -> usize {
        0
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        Vec::new()
    }

    fn settled(&mut self, _durable: bool) {}
}

/// Bytes that a table places at `at` of a file of `has` bytes: the part of them that is there comes first.
fn stored(at: u64, len: u64, has: u64) -> Mapping {
    match has.saturating_sub(at) / SECTOR * SECTOR {
        0 => Mapping::Missing { at: FileOffset(at), has, len },
        there => Mapping::Data { at: FileOffset(at), len: len.min(there) },
    }
}

/// A part of the metadata that opening needs.
fn read(source: &mut dyn Source, at: u64, len: usize, what: &str) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; len];
    let at = FileOffset(at);
    match source.read_at(at, &mut bytes) {
        Ok(()) => Ok(bytes),
        Err(crate::ReadFault::PastEnd(_)) => {
            let end = at.0.saturating_add(on_disk(len));
            let what =
                format!("the {what} is at bytes {at} to {end}, but the file has {}: it was cut off", source.len());
            Err(ImageError::at(ImageErrorKind::Corrupt, at, what))
        }
        Err(fault) => {
            let what = format!("the {what} cannot be read: {fault}");
            Err(ImageError::at(ImageErrorKind::Storage, at, what))
        }
    }
}

fn corrupt<T>(at: u64, what: impl Into<String>) -> Result<T, ImageError> {
    Err(ImageError::at(ImageErrorKind::Corrupt, FileOffset(at), what))
}

fn unsupported<T>(what: impl Into<String>) -> Result<T, ImageError> {
    Err(ImageError::new(ImageErrorKind::Unsupported, what))
}

/// Checks that a disk can have this size: whole sectors, up to 64 TiB.
fn check_len(at: u64, len: Option<u64>) -> Result<u64, ImageError> {
    match len {
        Some(len) if len > 0 && len <= LEN_MAX && len % 512 == 0 => Ok(len),
        _ => corrupt(at, "the size of the disk is not a number of sectors up to 64 TiB"),
    }
}
