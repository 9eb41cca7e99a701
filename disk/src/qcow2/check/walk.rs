//! Follows every reference in an image, and counts it in the [ledger](super::ledger).
//!
//! Knows nothing of the refcounts that the image keeps. A reference that makes no sense is named and not followed, and
//! from then on [`Walk::unresolved`] holds: something may be in use that nothing seems to refer to.

use super::Findings;
use super::bitmaps;
use super::ledger::{Clash, Ledger, Role};
use super::shape::{Shape, Table, read_entries, read_padded};
use super::snapshots;
use crate::qcow2::cluster::{GuestCluster, HostCluster};
use crate::qcow2::entry::{Entry, RawEntry, is_possible};
use crate::qcow2::layout::{COPIED, OFFSET_MASK, length};
use crate::{FileOffset, FileRange, ImageError, Severity, Source};

/// Tables that are walked though they were walked before: a damaged image has one or two, a hostile one as many as
/// its first-level table has entries.
const REPEATS_MAX: u32 = 1024;

/// Structures that are remembered, to be looked for behind every entry: a table for each snapshot, and a few others.
const STRUCTURES_MAX: usize = 1024;

/// Bits of a first-level entry that must be zero.
pub const FIRST_RESERVED: u64 = !(COPIED | OFFSET_MASK);

/// A walk over all references.
pub struct Walk<'a> {
    pub(super) shape: &'a Shape,
    pub(super) ledger: Ledger,
    pub(super) findings: Findings,
    /// Some references cannot be made out.
    pub(super) unresolved: bool,
    /// Some entries may be repairable one by one.
    pub(super) mendable: bool,
    /// The first cluster behind the end of the file that something refers to.
    pub(super) beyond: Option<HostCluster>,
    /// Something lies over a structure that cannot be rebuilt elsewhere.
    pub(super) overlapped: bool,
    /// Those structures, but for second-level tables.
    pub(super) structures: Vec<FileRange>,
    /// Structures that have their clusters for themselves.
    alone: Vec<Alone>,
    repeats: u32,
}

/// A structure that shares no cluster with another.
struct Alone {
    range: FileRange,
    what: &'static str,
    severity: Severity,
}

impl<'a> Walk<'a> {
    pub(super) fn new(shape: &'a Shape) -> Walk<'a> {
        Walk {
            shape,
            ledger: Ledger::default(),
            findings: Findings::default(),
            unresolved: false,
            mendable: false,
            beyond: None,
            overlapped: false,
            structures: Vec::new(),
            alone: Vec::new(),
            repeats: 0,
        }
    }

    /// Follows everything but the refcounts.
    pub(super) fn image(&mut self, source: &mut dyn Source) -> Result<(), ImageError> {
        self.refer_alone(FileOffset(0), self.shape.cluster, "the header")?;
        self.disk(source, self.shape.l1, true)?;
        for table in snapshots::tables(self, source)? {
            self.disk(source, table, false)?;
        }
        bitmaps::walk(self, source)
    }

    /// A reference to a structure that has its clusters for itself; whether it lies in the file.
    pub(super) fn refer_alone(&mut self, at: FileOffset, len: u64, what: &'static str) -> Result<bool, ImageError> {
        let inside = self.refer(at, len, Role::Other, what)?;
        if inside {
            self.alone.push(Alone { range: FileRange { at, len }, what, severity: Severity::Damage });
            if self.structures.len() < STRUCTURES_MAX {
                self.structures.push(FileRange { at, len });
            }
        }
        Ok(inside)
    }

    /// The same for a structure that a repair rebuilds elsewhere if need be. Returns whether it can be read where it
    /// is.
    pub(super) fn refer_replaceable(
        &mut self,
        at: FileOffset,
        len: u64,
        what: &'static str,
    ) -> Result<bool, ImageError> {
        if !self.is_inside(at, len) {
            self.findings.add(Severity::Repairable, at, format!("{what} lies behind the end of the file"));
            return Ok(false);
        }
        self.alone.push(Alone { range: FileRange { at, len }, what, severity: Severity::Repairable });
        self.refer(at, len, Role::Other, what)
    }

    /// Whether a range lies in the file, whose last cluster need not be there in full. What begins behind the end does
    /// not.
    fn is_inside(&self, at: FileOffset, len: u64) -> bool {
        let end = FileOffset(self.shape.file_len);
        at < end && at.saturating_add(len).saturating_sub(end) < self.shape.cluster
    }

    /// Counts a reference to a range of the file; whether it lies in the file.
    pub(super) fn refer(&mut self, at: FileOffset, len: u64, role: Role, what: &str) -> Result<bool, ImageError> {
        let clusters = self.shape.clusters_of(FileRange { at, len });
        if len == 0 {
            return Ok(true);
        }
        if !self.is_inside(at, len) {
            let behind = self.shape.cluster_of(at).max(self.shape.end());
            self.beyond = Some(self.beyond.map_or(behind, |other| other.min(behind)));
            self.damage(at, format!("{what} lies behind the end of the file"));
            return Ok(false);
        }
        for cluster in clusters {
            if self.ledger.count(cluster, role)? == Some(Clash::TableAndData) {
                self.overlapped = true;
                let place = self.shape.offset_of(cluster);
                self.damage(place, format!("the cluster of {what} is a second-level table and data at once"));
            }
        }
        Ok(true)
    }

    /// Something that cannot be followed, or would be misread.
    pub(super) fn damage(&mut self, at: FileOffset, what: impl Into<String>) {
        self.unresolved = true;
        self.findings.add(Severity::Damage, at, what);
    }

    /// A first-level table and all below it.
    fn disk(&mut self, source: &mut dyn Source, l1: Table, active: bool) -> Result<(), ImageError> {
        let what = if active { "the first-level table" } else { "the first-level table of a snapshot" };
        let inside = self.refer_alone(l1.at, l1.len(), what)?;
        // A table that does not fit is not as long as the image says; behind what the disk needs is something else.
        let needed = self.shape.header.raw.len.get().div_ceil(self.shape.header.entries().reach());
        let l1 = if inside { l1 } else { Table { entries: l1.entries.min(needed), ..l1 } };
        let mut first = 0;
        while let Some(piece) = read_entries(source, l1, first)? {
            for (index, bits) in (first..).zip(piece) {
                if bits != 0 {
                    self.first_level(source, (l1.entry_at(index), index), bits, active)?;
                }
            }
            first = first.saturating_add(Table::PIECE);
        }
        Ok(())
    }

    /// The entry with this number, at byte `at`.
    fn first_level(
        &mut self,
        source: &mut dyn Source,
        (at, number): (FileOffset, u64),
        bits: u64,
        active: bool,
    ) -> Result<(), ImageError> {
        if bits & FIRST_RESERVED != 0 {
            self.mendable = true;
            self.damage(at, format!("the first-level entry {bits:#x} has reserved bits set"));
        }
        let table_at = FileOffset(bits & OFFSET_MASK);
        if table_at.0 == 0 || !self.shape.is_aligned(table_at) {
            self.damage(at, format!("the first-level entry {bits:#x} is not the place of a table"));
            return Ok(());
        }
        let again = active && self.ledger.is_table(self.shape.cluster_of(table_at));
        let role = if active { Role::Table } else { Role::Other };
        if !self.refer(table_at, self.shape.cluster, role, "a second-level table")? {
            return Ok(());
        }
        if again {
            self.repeats += 1;
            if self.repeats > REPEATS_MAX {
                self.damage(at, "the first-level table has the same second-level tables again and again");
                return Ok(());
            }
        }
        let mut table = self.shape.piece();
        read_padded(source, table_at, &mut table)?;
        let format = self.shape.header.entries();
        let clusters = (number.saturating_mul(format.in_table())..).map(GuestCluster);
        for (cluster, (word, raw)) in clusters.zip(format.entries(&table)) {
            if !raw.is_empty() {
                self.second_level((table_at.saturating_add(length(word) * 8), cluster), raw, active)?;
            }
        }
        Ok(())
    }

    /// The entry of a cluster of the disk, at byte `at`.
    fn second_level(
        &mut self,
        (at, cluster): (FileOffset, GuestCluster),
        raw: RawEntry,
        active: bool,
    ) -> Result<(), ImageError> {
        let format = self.shape.header.entries();
        let (entry, bits) = (format.decode(raw), raw.descriptor);
        match entry {
            Entry::Compressed { .. } if format.external => {
                self.damage(at, format!("the entry {bits:#x} is of a compressed cluster, which no data file has"));
            }
            Entry::Compressed { at: packed_at, end } => {
                if bits & COPIED != 0 {
                    self.damage(at, format!("the entry {bits:#x} of a compressed cluster is marked as copied"));
                }
                self.refer(packed_at, end.saturating_sub(packed_at), Role::Other, "a compressed cluster")?;
            }
            Entry::Zero if format.is_misplaced_zero(raw) => {
                let what = format!("the entry {bits:#x} reads as zero, and its place is not that of a cluster");
                if active {
                    self.mendable = true;
                    self.findings.add(Severity::Repairable, at, what);
                } else {
                    self.damage(at, what);
                }
                self.judge_bits(at, raw, entry);
            }
            Entry::Unallocated | Entry::Zero | Entry::Mixed { at: None, .. } => self.judge_bits(at, raw, entry),
            Entry::Data { at: data_at, .. }
            | Entry::ZeroAllocated { at: data_at, .. }
            | Entry::Mixed { at: Some(data_at), .. } => {
                self.judge_bits(at, raw, entry);
                if format.external {
                    if data_at != format.own_place(cluster) {
                        let what =
                            format!("the second-level entry {bits:#x} is not its cluster's place in the data file");
                        self.damage(at, what);
                    }
                    return Ok(());
                }
                if !self.shape.is_aligned(data_at) {
                    self.damage(at, format!("the second-level entry {bits:#x} is not the place of a cluster"));
                    return Ok(());
                }
                let role = if active { Role::Data } else { Role::Other };
                self.refer(data_at, self.shape.cluster, role, "a cluster of the disk")?;
            }
        }
        Ok(())
    }

    fn judge_bits(&mut self, at: FileOffset, raw: RawEntry, entry: Entry) {
        let RawEntry { descriptor, bitmap } = raw;
        if descriptor & self.shape.reserved() != 0 {
            self.mendable = true;
            self.damage(at, format!("the second-level entry {descriptor:#x} has reserved bits set"));
        }
        if !is_possible(bitmap, entry.place().is_some()) {
            let what =
                format!("the bitmap of subclusters {bitmap:#x} has some that are zero and in the file, or in none");
            self.damage(at.saturating_add(8), what);
        }
    }

    /// Once everything is counted: what has its clusters for itself, and yet not.
    pub(super) fn judge_overlaps(&mut self) {
        for Alone { range, what, severity } in std::mem::take(&mut self.alone) {
            let mut clusters = self.shape.clusters_of(range);
            let Some(cluster) = clusters.find(|&cluster| self.ledger.references(cluster) > 1) else { continue };
            let place = self.shape.offset_of(cluster);
            let what = format!("something else is where {what} is");
            match severity {
                Severity::Damage => {
                    self.overlapped = true;
                    self.damage(place, what);
                }
                other => self.findings.add(other, place, what),
            }
        }
    }
}
