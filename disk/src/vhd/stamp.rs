//! Where the stamp of a VHD stands, and how it is written.
//!
//! Knows nothing about blocks. Invariant: the write of a stamp changes one sector, and nothing else in it.

use zerocopy::{FromBytes, IntoBytes};

use super::layout::{
    BATMAP_COOKIE, FOOTER_COOKIE, RawBatmapHeader, RawFooter, RawHeader, SECTOR, stamp_field, stamp_in,
};
use super::sparse::Sparse;
use crate::format::MetaWrite;
use crate::{FileOffset, ImageError, ImageErrorKind, ReadFault, Source, Stamp};

/// The stamps in a file; none if it is no dynamic or differencing VHD.
pub fn stamps(source: &mut dyn Source) -> Result<Vec<Stamp>, ImageError> {
    let mut found = Vec::new();
    let Some(footer) = structure::<RawFooter>(source, 0)?.filter(|footer| footer.cookie == FOOTER_COOKIE) else {
        return Ok(found);
    };
    found.extend(stamp_in(&footer.stamp));
    let Some(header) = structure::<RawHeader>(source, footer.data_offset.get())? else { return Ok(found) };
    let table_len = (u64::from(header.max_table_entries.get()) * 4).next_multiple_of(SECTOR);
    let batmap_at = header.table_offset.get().saturating_add(table_len);
    let batmap = structure::<RawBatmapHeader>(source, batmap_at)?.filter(|batmap| batmap.cookie == BATMAP_COOKIE);
    found.extend(batmap.and_then(|batmap| stamp_in(&batmap.stamp)));
    Ok(found)
}

/// Reads the structure at this byte of the file; `None` if the file is shorter.
fn structure<T: FromBytes>(source: &mut dyn Source, at: u64) -> Result<Option<T>, ImageError> {
    let mut bytes = vec![0; size_of::<T>()];
    match source.read_at(FileOffset(at), &mut bytes) {
        Ok(()) => Ok(T::read_from_bytes(&bytes).ok()),
        Err(ReadFault::PastEnd(_)) => Ok(None),
        Err(fault) => {
            let what = format!("the stamp of the image cannot be read: {fault}");
            Err(ImageError::at(ImageErrorKind::Storage, FileOffset(at), what))
        }
    }
}

impl Sparse {
    /// The write that puts a stamp into the file. `None` while a round has something to write to the same place.
    pub fn set_stamp(&mut self, stamp: Stamp) -> Option<MetaWrite> {
        if self.change.is_some() || self.round.change.is_some() {
            return None;
        }
        if let Some(batmap) = &mut self.batmap {
            if self.round.batmap {
                return None;
            }
            batmap.header.stamp = stamp_field(stamp);
            return Some(MetaWrite { at: batmap.header_at, bytes: batmap.header.as_bytes().to_vec() });
        }
        if self.dirty_copy || self.copy_lost || self.round.copy {
            return None;
        }
        self.footer.stamp = stamp_field(stamp);
        self.footer = self.footer.sealed();
        Some(MetaWrite { at: FileOffset(0), bytes: self.footer.as_bytes().to_vec() })
    }

    /// The next round removes the stamp.
    pub fn clear_stamp(&mut self) {
        if let Some(batmap) = self.batmap.as_mut().filter(|batmap| stamp_in(&batmap.header.stamp).is_some()) {
            batmap.header.stamp = [0; 42];
            self.dirty_batmap = true;
        }
        if stamp_in(&self.footer.stamp).is_some() {
            self.footer = self.footer.unstamped();
            (self.dirty_copy, self.dirty_footer) = (true, true);
        }
    }
}
