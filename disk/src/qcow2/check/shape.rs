//! The parameters of an image that a check needs before it follows the first reference: sizes, and the places of the
//! tables.
//!
//! Knows nothing of what is in the tables. Reads of metadata pass through here: what lies behind the end of the file
//! is zero, as it is for QEMU, and is judged where it is referred to.

use zerocopy::FromBytes;

use crate::qcow2::cluster::{HostCluster, run};
use crate::qcow2::header::{Header, check_compression, check_refcount_table};
use crate::qcow2::layout::{
    BITMAPS_VALID, COMPRESSION_TYPE, CORRUPT, DIRTY, EXTENDED_L2, EXTENSION_BITMAPS, EXTERNAL_DATA, RAW_EXTERNAL_DATA,
    RawBitmaps, SECTOR, index, length,
};
use crate::qcow2::open::check_data_file;
use crate::{FileOffset, FileRange, ImageError, ImageErrorKind, Source};

/// Incompatible features under which references can be followed.
const FOLLOWED: u64 = DIRTY | CORRUPT | COMPRESSION_TYPE | EXTENDED_L2 | EXTERNAL_DATA;

/// A table of 64-bit entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// Offset in the file.
    pub at: FileOffset,
    /// Number of entries.
    pub entries: u64,
}

impl Table {
    /// Entries read at a time: 64 KiB of them.
    pub const PIECE: u64 = 8192;

    /// Its size in bytes.
    pub fn len(self) -> u64 {
        self.entries.saturating_mul(8)
    }

    /// Where an entry is in the file.
    pub fn entry_at(self, index: u64) -> FileOffset {
        self.at.saturating_add(index.saturating_mul(8))
    }
}

/// The sizes of an image and the places of its tables.
pub struct Shape {
    /// The header.
    pub header: Header,
    /// Bytes in a cluster, as a power of two.
    pub cluster_bits: u32,
    /// Bytes in a cluster.
    pub cluster: u64,
    /// Length of the file, rounded up to whole sectors.
    pub file_len: u64,
    /// The first-level table of the active disk.
    pub l1: Table,
    /// The refcount table; why there is none that can be read.
    pub refcounts: Result<Table, ImageError>,
}

impl Shape {
    /// Bits of a second-level entry that must be zero.
    pub fn reserved(&self) -> u64 {
        self.header.entries().reserved(self.header.raw.version.get() >= 3)
    }

    /// Reads the header. An error says why the image cannot be checked.
    pub fn of(source: &mut dyn Source) -> Result<Shape, ImageError> {
        let header = Header::read_to_repair(source)?;
        let raw = &header.raw;
        let unknown = raw.incompatible.get() & !FOLLOWED;
        if unknown != 0 {
            let what =
                format!("the image uses what cannot be checked: {}", header.feature_names(0, unknown).join(", "));
            return Err(ImageError::at(ImageErrorKind::Unsupported, FileOffset(72), what));
        }
        if raw.encryption.get() != 0 {
            return Err(ImageError::at(ImageErrorKind::Unsupported, FileOffset(32), "the image is encrypted"));
        }
        check_compression(raw)?;
        check_data_file(&header, source.has_data_file())?;
        let cluster = header.cluster_size();
        Ok(Shape {
            cluster_bits: raw.cluster_bits.get(),
            cluster,
            file_len: source.len().checked_next_multiple_of(SECTOR).unwrap_or(u64::MAX),
            l1: Table { at: FileOffset(raw.l1_at.get()), entries: raw.l1_entries.get().into() },
            refcounts: check_refcount_table(raw).map(|()| Table {
                at: FileOffset(raw.refcount_table_at.get()),
                entries: header.refcount_table_len() / 8,
            }),
            header,
        })
    }

    /// Whether the image was not closed.
    pub fn dirty(&self) -> bool {
        self.header.raw.incompatible.get() & DIRTY != 0
    }

    /// Whether a program marked the image as damaged.
    pub fn marked_corrupt(&self) -> bool {
        self.header.raw.incompatible.get() & CORRUPT != 0
    }

    /// Whether the header has a place for snapshots that cannot be one, and no snapshots.
    pub fn misplaces_no_snapshots(&self) -> bool {
        let (count, at) = (self.header.raw.snapshots.get(), self.header.raw.snapshots_at.get());
        count == 0 && (!self.is_aligned(FileOffset(at)) || i64::try_from(at).is_err())
    }

    /// Whether the image claims to have an external data file, which it has not.
    pub fn claims_raw_data(&self) -> bool {
        self.header.raw.autoclear.get() & RAW_EXTERNAL_DATA != 0 && !self.header.entries().external
    }

    /// The bitmaps, and whether they agree with the data.
    pub fn bitmaps(&self) -> Option<(RawBitmaps, bool)> {
        let extension = self.header.extension(EXTENSION_BITMAPS)?;
        let (bitmaps, _) = RawBitmaps::read_from_prefix(extension).ok()?;
        Some((bitmaps, self.header.raw.autoclear.get() & BITMAPS_VALID != 0))
    }

    /// The cluster behind the last of the file, which need not be there in full.
    pub fn end(&self) -> HostCluster {
        HostCluster(self.file_len.div_ceil(self.cluster))
    }

    /// The cluster that a byte of the file is in.
    pub fn cluster_of(&self, at: FileOffset) -> HostCluster {
        HostCluster::of(at, self.cluster_bits)
    }

    /// The clusters that a range of the file lies in.
    pub fn clusters_of(&self, range: FileRange) -> impl Iterator<Item = HostCluster> + use<> {
        let first = self.cluster_of(range.at);
        let last = range.len.checked_sub(1).map(|last| self.cluster_of(range.at.saturating_add(last)));
        run(first..last.map_or(first, |last| last + 1))
    }

    /// Where a cluster begins.
    pub fn offset_of(&self, cluster: HostCluster) -> FileOffset {
        FileOffset(cluster.0.saturating_mul(self.cluster))
    }

    /// Whether a cluster begins here.
    pub fn is_aligned(&self, at: FileOffset) -> bool {
        at.0 & (self.cluster - 1) == 0
    }

    /// Memory for a cluster.
    pub fn piece(&self) -> Vec<u8> {
        vec![0; index(self.cluster)]
    }
}

/// Reads; what lies behind the end of the file is zero.
pub fn read_padded(source: &mut dyn Source, at: FileOffset, bytes: &mut [u8]) -> Result<(), ImageError> {
    bytes.fill(0);
    let there = source.len().saturating_sub(at.0).min(length(bytes.len()));
    let Some(bytes) = bytes.get_mut(..index(there)).filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
    source
        .read_at(at, bytes)
        .map_err(|fault| ImageError::at(ImageErrorKind::Storage, at, format!("metadata cannot be read: {fault}")))
}

/// The entries of a table from `first` on, up to [`Table::PIECE`] of them. `None` behind the last, and where the file
/// ends.
pub fn read_entries(source: &mut dyn Source, table: Table, first: u64) -> Result<Option<Vec<u64>>, ImageError> {
    let count = table.entries.saturating_sub(first).min(Table::PIECE);
    let at = table.entry_at(first);
    if count == 0 || at.0 >= source.len() {
        return Ok(None);
    }
    let mut bytes = vec![0; index(count.saturating_mul(8))];
    read_padded(source, at, &mut bytes)?;
    Ok(Some(entries(&bytes).collect()))
}

/// The 64-bit entries of a piece of a table.
pub fn entries(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).filter_map(|entry| entry.try_into().ok()).map(u64::from_be_bytes)
}
