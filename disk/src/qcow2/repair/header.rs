//! The header's first sector while an image is repaired: changed step by step, each step one sector that is written
//! whole or not at all.
//!
//! Knows nothing of refcounts. What is not named here stays as it is, the fields and extensions of other programs
//! included.

use zerocopy::FromBytes;

use crate::qcow2::check::shape::{Shape, read_padded};
use crate::qcow2::layout::{
    BITMAPS_VALID, CORRUPT, DIRTY, EXTENSION_BITMAPS, RAW_EXTERNAL_DATA, RawHeader, SECTOR, STAMP_VALID, index, length,
};
use crate::{FileOffset, ImageError, MetaWrite, Source};

/// The sector, as it is to be, and as it was written last.
pub struct HeaderSector {
    bytes: Vec<u8>,
    written: Vec<u8>,
    /// Version 2 has no feature bits.
    has_features: bool,
    /// Autoclear bits that a repair leaves true.
    kept: u64,
    /// The sector with the mark that ends the extensions earlier, if that is not the first.
    elsewhere: Option<MetaWrite>,
}

impl HeaderSector {
    pub(super) fn read(source: &mut dyn Source, shape: &Shape) -> Result<HeaderSector, ImageError> {
        let mut bytes = vec![0; index(SECTOR)];
        read_padded(source, FileOffset(0), &mut bytes)?;
        let has_features = shape.header.raw.version.get() >= 3;
        let raw = if shape.header.entries().external { RAW_EXTERNAL_DATA } else { 0 };
        Ok(HeaderSector {
            written: bytes.clone(),
            bytes,
            has_features,
            kept: BITMAPS_VALID | STAMP_VALID | raw,
            elsewhere: None,
        })
    }

    /// Clears the autoclear bits that we do not know ("Autoclear features": a program that does not know a bit clears
    /// it before writing). `None` if there are none.
    pub(super) fn forget_unknown(&mut self) -> Option<MetaWrite> {
        let kept = self.kept;
        self.change(|raw| raw.autoclear = (raw.autoclear.get() & kept).into());
        (self.bytes != self.written).then(|| self.write())
    }

    /// Names another refcount table.
    pub(super) fn set_refcount_table(&mut self, at: FileOffset, clusters: u32) -> MetaWrite {
        if let Ok((raw, _)) = RawHeader::mut_from_prefix(&mut self.bytes) {
            raw.refcount_table_at = at.0.into();
            raw.refcount_table_clusters = clusters.into();
        }
        self.write()
    }

    /// The image is sound: what says otherwise goes, and so do bitmaps that are out of date. Says what it did.
    pub(super) fn close(&mut self, source: &mut dyn Source, shape: &Shape) -> Result<Vec<String>, ImageError> {
        let mut what = Vec::new();
        if shape.dirty() {
            what.push("the image counts as closed".to_owned());
        }
        if shape.marked_corrupt() {
            what.push("the image is no longer marked as corrupt".to_owned());
        }
        self.change(|raw| raw.incompatible = (raw.incompatible.get() & !(DIRTY | CORRUPT)).into());
        if let (true, Ok((raw, _))) = (shape.misplaces_no_snapshots(), RawHeader::mut_from_prefix(&mut self.bytes)) {
            raw.snapshots_at = 0.into();
            what.push("the place of snapshots that are not there is cleared".to_owned());
        }
        if self.drop_bitmaps(source, shape)? {
            what.push("bitmaps that are out of date are dropped".to_owned());
        }
        Ok(what)
    }

    /// The writes of the changes that [`HeaderSector::close`] made.
    pub(super) fn changed(mut self) -> Vec<MetaWrite> {
        let mut writes = Vec::from_iter(self.elsewhere.take());
        if self.bytes != self.written {
            writes.push(self.write());
        }
        writes
    }

    /// Bitmaps whose autoclear bit is cleared are void, and their clusters are not counted. Their extension goes if it
    /// is the last, where a mark in one sector takes its place; another is ignored by everyone, as the specification
    /// wants it.
    fn drop_bitmaps(&mut self, source: &mut dyn Source, shape: &Shape) -> Result<bool, ImageError> {
        let Some((last, before)) = shape.header.extensions.split_last() else { return Ok(false) };
        if last.kind != EXTENSION_BITMAPS || !matches!(shape.bitmaps(), Some((_, false))) {
            return Ok(false);
        }
        let sizes = before.iter().map(|extension| 8 + length(extension.data.len().next_multiple_of(8)));
        let at = FileOffset(u64::from(shape.header.raw.header_len.get()).saturating_add(sizes.sum()));
        let sector = at.align_down(SECTOR);
        let mut bytes = vec![0; index(SECTOR)];
        if sector.0 > 0 {
            read_padded(source, sector, &mut bytes)?;
        }
        let place = if sector.0 > 0 { &mut bytes } else { &mut self.bytes };
        if let Some(mark) = place.get_mut(index(at - sector)..).and_then(|rest| rest.get_mut(..8)) {
            mark.fill(0);
        }
        if sector.0 > 0 {
            self.elsewhere = Some(MetaWrite { at: sector, bytes });
        }
        Ok(true)
    }

    fn change(&mut self, change: impl FnOnce(&mut RawHeader)) {
        if let (true, Ok((raw, _))) = (self.has_features, RawHeader::mut_from_prefix(&mut self.bytes)) {
            change(raw);
        }
    }

    fn write(&mut self) -> MetaWrite {
        self.written.clone_from(&self.bytes);
        MetaWrite { at: FileOffset(0), bytes: self.bytes.clone() }
    }
}
