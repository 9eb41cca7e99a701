//! Opens a qcow2 file: what is refused, and what is read.
//!
//! Knows nothing of requests. Keeps: an image that is opened for writing has sound tables, refcounts that its last
//! writer has kept up to date, and no feature that a write would break.

use super::allocator::Allocator;
use super::bitmaps;
use super::cluster::HostCluster;
use super::clusters::Clusters;
use super::counts::{Counts, Cover};
use super::head::Head;
use super::header::{Header, check_compression, read};
use super::layout::{
    COMPRESSION_TYPE, COPIED, CORRUPT, DIRTY, EXTENDED_L2, EXTERNAL_DATA, OFFSET_MASK, PAGE, entry, index, length,
};
use super::pending::Pending;
use super::ranges::Ranges;
use super::snapshots::{self, Snapshots};
use super::space::Space;
use super::tables::Tables;
use crate::format::{Access, Tail, Wait};
use crate::{FileOffset, ImageError, ImageErrorKind, Source};

/// Refcount blocks looked at for the last cluster in use, where the file's length does not tell.
const BLOCKS_MAX: usize = 64;

/// An error at this byte of the header.
fn unsupported<T>(byte: u64, what: impl Into<String>) -> Result<T, ImageError> {
    Err(ImageError::at(ImageErrorKind::Unsupported, FileOffset(byte), what))
}

fn corrupt<T>(at: FileOffset, what: impl Into<String>) -> Result<T, ImageError> {
    Err(ImageError::at(ImageErrorKind::Corrupt, at, what))
}

/// Whether the image can be used at all.
pub fn check_readable(header: &Header, has_data_file: bool) -> Result<(), ImageError> {
    let raw = &header.raw;
    match raw.encryption.get() {
        0 => {}
        1 => return unsupported(32, "the image is encrypted with AES, which is not handled"),
        2 => return unsupported(32, "the image is encrypted with LUKS, which is not handled"),
        other => return unsupported(32, format!("the image is encrypted by method {other}, which is not known")),
    }
    check_data_file(header, has_data_file)?;
    let incompatible = raw.incompatible.get();
    let known = DIRTY | CORRUPT | COMPRESSION_TYPE | EXTENDED_L2 | EXTERNAL_DATA;
    if incompatible & !known != 0 {
        let names = header.feature_names(0, incompatible & !known).join(", ");
        return unsupported(72, format!("the image uses features that are not known here: {names}"));
    }
    check_compression(raw)
}

/// Whether an image that keeps its data in a file of its own was given one, and no other. Its name in the image is for
/// people.
pub fn check_data_file(header: &Header, has_data_file: bool) -> Result<(), ImageError> {
    match (header.entries().external, has_data_file) {
        (true, false) => {
            let named = header
                .data_file()
                .map_or_else(|| "does not name".to_owned(), |name| format!("calls \"{}\"", name.escape_debug()));
            let what = format!(
                "the image keeps its data in an external data file, which it {named}: name that too, as \
                 qcow2:IMAGE,data-file=FILE"
            );
            unsupported(72, what)
        }
        (false, true) => {
            let what = "the image has its data in itself, and a data file was named";
            Err(ImageError::at(ImageErrorKind::Mismatch, FileOffset(72), what))
        }
        _ => Ok(()),
    }
}

/// Whether the image can be written to.
fn check_writable(header: &Header) -> Result<(), ImageError> {
    let raw = &header.raw;
    let incompatible = raw.incompatible.get();
    if incompatible & CORRUPT != 0 {
        let what = "the image is marked as corrupt and only read; `tapline image check --repair` may repair it";
        return corrupt(FileOffset(72), what);
    }
    if incompatible & DIRTY != 0 {
        let what = "the image was not closed, and its refcounts may be wrong: run `tapline image check --repair`";
        return corrupt(FileOffset(72), what);
    }
    if incompatible & EXTERNAL_DATA != 0 && raw.snapshots.get() > 0 {
        let what =
            "the image has internal snapshots and an external data file, which do not go together: it is only read";
        return corrupt(FileOffset(60), what);
    }
    Ok(())
}

/// An image that is to be opened, with its header.
pub struct Opening<'a> {
    /// The file.
    pub source: &'a mut dyn Source,
    /// Its header.
    pub header: Header,
    /// The access for which it is opened.
    pub access: Access,
    /// The content of the file behind its end.
    pub tail: Tail,
}

impl Opening<'_> {
    /// Reads what opening needs.
    pub fn clusters(&mut self) -> Result<Clusters, ImageError> {
        check_readable(&self.header, self.source.has_data_file())?;
        let bits = self.header.raw.cluster_bits.get();
        let writable = self.access == Access::ReadWrite;
        if writable {
            check_writable(&self.header)?;
        }
        let l1 = self.l1(writable)?;
        let tables = Tables::new(self.header.entries(), l1, FileOffset(self.header.raw.l1_at.get()));
        let snapshots = if writable { snapshots::read(self.source, &self.header)? } else { Snapshots::default() };
        let allocator = if writable { Some(self.allocator(&tables, &snapshots)?) } else { None };
        Ok(Clusters {
            bits,
            // A program that wrote another size has rounded it in the same way.
            len: self.header.raw.len.get() / 512 * 512,
            parent: !self.header.backing.is_empty(),
            zeroes: self.header.raw.version.get() >= 3,
            pinned: snapshots.sizeless,
            limit: FileOffset(self.source.len()).align_up(1 << bits),
            tables,
            allocator,
        })
    }

    /// The first page.
    pub fn head(&mut self) -> Result<Head, ImageError> {
        let len = PAGE.min(self.header.cluster_size());
        let there = len.min(self.source.len());
        let mut page = read(self.source, FileOffset(0), there, "header")?;
        page.resize(index(len), 0);
        Ok(Head::new(self.header.clone(), page))
    }

    /// The L1 table. Of an image that is only read, a malformed entry is reported when a request meets it.
    fn l1(&mut self, writable: bool) -> Result<Vec<u64>, ImageError> {
        let at = FileOffset(self.header.raw.l1_at.get());
        let table = read_table(self.source, at, self.header.l1_len(), "L1 table")?;
        let cluster = self.header.cluster_size();
        let end = self.source.len();
        for (number, &raw) in (0u64..).zip(&table) {
            let place = at.saturating_add(number.saturating_mul(8));
            let l2 = raw & OFFSET_MASK;
            if writable && (raw & !(OFFSET_MASK | COPIED) != 0 || l2 % cluster != 0 || l2 >= end) {
                let what = format!(
                    "an L1 entry is not an L2 table's place: {raw:#x}; the image is only read, unless \
                     `tapline image check --repair` can repair it; it says what to do if not"
                );
                return corrupt(place, what);
            }
        }
        Ok(table)
    }

    /// The allocator that writing needs.
    fn allocator(&mut self, tables: &Tables, snapshots: &Snapshots) -> Result<Allocator, ImageError> {
        let raw = &self.header.raw;
        let (bits, order) = (raw.cluster_bits.get(), raw.refcount_order.get());
        let at = FileOffset(raw.refcount_table_at.get());
        let table = read_table(self.source, at, self.header.refcount_table_len(), "refcount table")?;
        let end = self.source.len();
        for (number, &block) in (0u64..).zip(&table) {
            if block % (1 << bits) != 0 || block >= end {
                let place = at.saturating_add(number.saturating_mul(8));
                return corrupt(place, format!("a refcount table entry is not a block's place: {block:#x}"));
            }
        }
        let mut counts = Counts::new(order, bits, table, at);
        let mut places = self.places(tables, &counts, snapshots)?;
        let bitmaps = bitmaps::places(&self.header, self.source);
        places.extend(bitmaps.iter().map(|range| (HostCluster::of(range.at, bits), range.len.div_ceil(1 << bits))));
        let end = self.end(&counts)?;
        self.preload(&mut counts, end)?;
        let (limit, zero_tail) = match self.tail {
            Tail::Zeroes => (HostCluster(1 << 56 >> bits), true),
            Tail::Stale => (HostCluster(self.source.len() >> bits), false),
        };
        let mut space = Space::new(1 << bits, end, limit, zero_tail);
        places.iter().for_each(|&(first, count)| space.reserve_for_tables(first, count));
        let gaps =
            (0..end.0.div_ceil(counts.per_block()).min(counts.table().0)).any(|number| is_missing(&counts, number));
        let mut unproven = Ranges::default();
        places.iter().for_each(|&(first, count)| unproven.insert(first, count));
        let distrusted = lost(&counts, &places);
        Ok(Allocator {
            bits,
            counts,
            space,
            distrusted,
            unproven,
            gaps,
            pending: Pending::default(),
            old_tables: Vec::new(),
            table_moved: false,
        })
    }

    /// The refcounts of the end of the file, where the first write will go. A disk that grows needs them too, and
    /// cannot wait for them.
    fn preload(&mut self, counts: &mut Counts, end: HostCluster) -> Result<(), ImageError> {
        let Err(Wait::Load(block)) = counts.need(end, 1) else { return Ok(()) };
        let bytes = read(self.source, block.at, block.len.into(), "refcount block")?;
        counts.slices().loaded(block.at, &bytes);
        Ok(())
    }

    /// The clusters of all tables, none of which may overlap another.
    fn places(
        &self,
        tables: &Tables,
        counts: &Counts,
        snapshots: &Snapshots,
    ) -> Result<Vec<(HostCluster, u64)>, ImageError> {
        let bits = self.header.raw.cluster_bits.get();
        let clusters = |len: u64| len.div_ceil(1 << bits);
        let cluster = |at| HostCluster::of(at, bits);
        let mut places = vec![
            (HostCluster(0), 1),
            (cluster(FileOffset(self.header.raw.l1_at.get())), clusters(self.header.l1_len())),
            (cluster(counts.table().1), self.header.raw.refcount_table_clusters.get().into()),
        ];
        places.extend(tables.places().map(|at| (cluster(at), 1)));
        places.extend(counts.blocks().map(|block| (block, 1)));
        places.extend(snapshots.taken.iter().map(|range| (cluster(range.at), clusters(range.len))));
        places.sort_unstable();
        for (&(first, count), &(next, _)) in places.iter().zip(places.iter().skip(1)) {
            if count > 0 && first.0.saturating_add(count) > next.0 {
                return corrupt(next.start(bits), "two tables stand in the same place");
            }
        }
        Ok(places)
    }

    /// The cluster behind the last one in use. It need not be exact: what is handed out has a refcount of zero in any
    /// case.
    fn end(&mut self, counts: &Counts) -> Result<HostCluster, ImageError> {
        let bits = self.header.raw.cluster_bits.get();
        if self.tail == Tail::Zeroes {
            return Ok(HostCluster(self.source.len().div_ceil(1 << bits)));
        }
        let blocks: Vec<(u64, FileOffset)> = counts.numbered_blocks().collect();
        for &(number, at) in blocks.iter().rev().take(BLOCKS_MAX) {
            let block = read(self.source, at, 1 << bits, "refcount block")?;
            if let Some(last) = block.iter().rposition(|&byte| byte != 0) {
                let within = (length(last).saturating_add(1).saturating_mul(8) >> self.header.raw.refcount_order.get())
                    .saturating_add(1);
                return Ok(HostCluster(number.saturating_mul(counts.per_block()).saturating_add(within)));
            }
        }
        // What is counted by a block that was not looked at may be in use.
        let first = blocks.len().checked_sub(BLOCKS_MAX).filter(|&first| first > 0);
        Ok(first
            .and_then(|first| blocks.get(first))
            .map_or(HostCluster(0), |&(number, _)| HostCluster(number.saturating_mul(counts.per_block()))))
    }
}

/// Whether the refcount table has no block of this number, though it has room for it.
fn is_missing(counts: &Counts, number: u64) -> bool {
    counts.cover(HostCluster(number.saturating_mul(counts.per_block()))) == Cover::NoBlock
}

/// Numbers of the refcount blocks that are not there, though a table stands where they would count.
fn lost(counts: &Counts, tables: &[(HostCluster, u64)]) -> Ranges<u64> {
    let mut lost = Ranges::default();
    for &(first, count) in tables.iter().filter(|&&(_, count)| count > 0) {
        let last = HostCluster(first.0.saturating_add(count).saturating_sub(1));
        for number in (counts.block_of(first)..=counts.block_of(last)).filter(|&number| is_missing(counts, number)) {
            lost.insert(number, 1);
        }
    }
    lost
}

fn read_table(source: &mut dyn Source, at: FileOffset, len: u64, what: &str) -> Result<Vec<u64>, ImageError> {
    // The last cluster of a file need not be there in full.
    let there = if at.0 < source.len() { len.min(source.len().saturating_sub(at.0)) } else { len };
    let mut bytes = read(source, at, there, what)?;
    bytes.resize(index(len), 0);
    Ok(bytes.chunks_exact(8).map(|raw| entry(raw, 0)).collect())
}
