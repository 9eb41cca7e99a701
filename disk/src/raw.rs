//! Raw images: each byte of the disk stands at the same offset of the file.

use crate::format::{Committed, Corrupt, Discarded, Format, Mapping, MetaBlock, MetaWrite, Reserved, Ticket, Wait};
use crate::{FileOffset, FileRange, Geometry, ImageError, ImageErrorKind, Records, Span, Stamp};

/// One open raw file or block device.
#[derive(Debug)]
pub struct Raw {
    geometry: Geometry,
    /// Never any.
    records: Records,
}

impl Raw {
    /// A raw image of `len` bytes in logical blocks of `block` bytes (512 or 4096).
    pub fn new(len: u64, block: u32, read_only: bool) -> Result<Raw, ImageError> {
        if block != 512 && block != 4096 {
            let what = format!("blocks of {block} bytes are not supported; only 512 and 4096 are");
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        if len == 0 || len % u64::from(block) != 0 {
            let what = format!("a length of {len} bytes is not a whole number of {block}-byte blocks");
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        let geometry = Geometry { len, block, physical_block: 4096, discard: 4096, chs: None, read_only };
        Ok(Raw { geometry, records: Records::default() })
    }

    /// The image in a file of `len` bytes. One that ends inside a sector is a disk that ends with that sector, as for
    /// QEMU: behind the end of the file it reads as zero, and a write there makes the file longer.
    pub fn of_file(len: u64, read_only: bool) -> Result<Raw, ImageError> {
        Raw::new(len.checked_next_multiple_of(512).unwrap_or(len), 512, read_only)
    }
}

impl Format for Raw {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn is_flat(&self) -> bool {
        true
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        Ok(Mapping::Data { at: span.at.in_flat_file(), len: span.len })
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        Ok(Reserved { at: span.at.in_flat_file(), len: span.len, ticket: None, fill: None })
    }

    fn commit(&mut self, _ticket: Ticket) -> Option<Committed> {
        None
    }

    fn abandon(&mut self, _ticket: Ticket) {}

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        Ok(Discarded::Kept { at: span.at.in_flat_file(), len: span.len })
    }

    fn released(&mut self, _at: FileOffset, _clean: bool) {}

    fn reclaim(&mut self) -> Option<FileRange> {
        None
    }

    /// A raw image has no parent, so nothing in it is ever given up.
    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        Ok(span.len)
    }

    fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        let grown = Raw::new(len, self.geometry.block, self.geometry.read_only)?;
        self.geometry.len = self.geometry.len.max(grown.geometry.len);
        Ok(())
    }

    /// Nothing is compressed in a raw image.
    fn decompress(&self, _bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        Err(Corrupt { at: FileOffset(0) })
    }

    fn load(&mut self, _block: MetaBlock, _bytes: &[u8]) -> Result<(), Corrupt> {
        Ok(())
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
