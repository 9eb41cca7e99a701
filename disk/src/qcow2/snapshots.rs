//! Internal snapshots ("Snapshots"), as far as a writer has to know them: where their tables are, which are never
//! written to.
//!
//! Their clusters are kept by refcounts alone: a cluster that the disk shares with a snapshot has more than one
//! reference and is copied by the first write. Knows nothing of clusters.

use zerocopy::FromBytes;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{Immutable, KnownLayout, Unaligned};

use super::header::{self, Header};
use super::layout::{L1_BYTES_MAX, SECTOR, length};
use crate::{FileOffset, FileRange, ImageError, ImageErrorKind, Source};

/// Snapshots that QEMU takes at most.
pub const COUNT_MAX: u32 = 65536;
/// Bytes of the table of snapshots, at most, likewise.
pub const TABLE_MAX: u64 = 64 << 20;
/// Bytes of extra data that an entry of version 3 has at least: among them the size of its disk.
pub const EXTRA_MIN: u32 = 16;
/// Bytes of it that QEMU takes at most.
pub const EXTRA_MAX: u32 = 1024;

/// One entry of the table, in front of its extra data, its id and its name.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawSnapshot {
    pub l1_at: U64,
    pub l1_entries: U32,
    pub id_len: U16,
    pub name_len: U16,
    pub date: [u8; 8],
    pub clock: U64,
    pub state_len: U32,
    pub extra_len: U32,
}
const _: () = assert!(size_of::<RawSnapshot>() == 40);

impl RawSnapshot {
    /// Bytes of the entry by itself.
    fn bare_len() -> u64 {
        length(size_of::<RawSnapshot>())
    }

    /// Bytes of the entry, with all that belongs to it and up to the next.
    pub fn len(&self) -> u64 {
        let tail = u64::from(self.extra_len.get()) + u64::from(self.id_len.get()) + u64::from(self.name_len.get());
        (RawSnapshot::bare_len() + tail).next_multiple_of(8)
    }
}

/// The facts about an image's snapshots that a writer needs.
#[derive(Debug, Default)]
pub struct Snapshots {
    /// Ranges of the file: the table of snapshots, and the L1 table of each.
    pub taken: Vec<FileRange>,
    /// One of them does not say how large its disk is, and takes the size of the active one.
    pub sizeless: bool,
}

/// Reads the table of snapshots. An image in which it cannot be made out is not written to.
pub fn read(source: &mut dyn Source, header: &Header) -> Result<Snapshots, ImageError> {
    let (count, start) = (header.raw.snapshots.get(), FileOffset(header.raw.snapshots_at.get()));
    let mut found = Snapshots::default();
    if count == 0 {
        return Ok(found);
    }
    let wrong = |at: FileOffset| {
        let what =
            "the table of internal snapshots makes no sense: the image is only read; `tapline image check` says more";
        Err(ImageError::at(ImageErrorKind::Corrupt, at, what))
    };
    let cluster = header.cluster_size();
    // The last cluster of a file need not be there in full. Behind it there can be no table: new clusters are allocated
    // behind all tables.
    let file_end = FileOffset(source.len()).align_up(cluster);
    if count > COUNT_MAX || start.0 == 0 || start % cluster != 0 {
        return wrong(FileOffset(60));
    }
    let mut at = start;
    for _ in 0..count {
        let bytes = header::read(source, at, RawSnapshot::bare_len(), "table of internal snapshots")?;
        let Ok(snapshot) = RawSnapshot::read_from_bytes(&bytes) else { return wrong(at) };
        let (l1_at, l1_len) = (FileOffset(snapshot.l1_at.get()), u64::from(snapshot.l1_entries.get()) * 8);
        if l1_at.0 == 0 || l1_at % cluster != 0 || l1_len > L1_BYTES_MAX || snapshot.extra_len.get() > EXTRA_MAX {
            return wrong(at);
        }
        if l1_at.saturating_add(l1_len) > file_end {
            return wrong(at);
        }
        found.taken.push(FileRange { at: l1_at, len: l1_len });
        found.sizeless |= snapshot.extra_len.get() < EXTRA_MIN;
        at = at.saturating_add(snapshot.len());
        if at - start > TABLE_MAX || at.0 > source.len().next_multiple_of(SECTOR) {
            return wrong(at);
        }
    }
    found.taken.push(FileRange { at: start, len: at - start });
    Ok(found)
}
