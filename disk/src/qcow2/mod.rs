//! qcow2, versions 2 and 3.
//!
//! Assumption about the storage: a sector of 512 bytes is written whole or not at all.
//!
//! # How a crash is survived
//!
//! In memory the tables always hold the newest state, which is what the guest reads. A round (see [`crate::Format`])
//! makes it durable. Two things must never be found by reopening: a table entry that refers to a cluster whose refcount
//! is zero, since the cluster could be handed out again, and an entry that refers to what was not written. A refcount
//! that is too high is a leak: it costs space and nothing else.
//!
//! 1. `seal` copies all that has changed, at the moment the data sync is submitted. *Reopened here:* the old tables;
//!    new data is in clusters that nothing refers to and whose refcount is zero.
//! 2. After the data sync, batch one: refcounts, with those of new clusters one, and those of clusters freed still as
//!    they were; new refcount blocks; new L2 tables, whole, since nothing refers to them yet. *Reopened here:* new
//!    clusters may be leaked.
//! 3. If the refcount table has changed, after a sync: the table. If it has moved, after another: the header.
//!    *Reopened here:* a new block is counted with or is itself leaked.
//! 4. After a sync: L2 entries and L1 entries, which refer to clusters that are counted, hold their data and, if they
//!    are tables, are written. *Reopened here:* any of them is old or new, and each is right.
//! 5. If the L1 table has moved, the disk has grown or has another parent, after a sync: the header, one sector.
//! 6. If clusters were freed, after a sync: their refcounts, which nothing refers to now. *Reopened here:* they may be
//!    leaked.
//! 7. After a sync: settled. Only now may the place of a cluster that was freed be used again.
//!
//! So a round that only allocates has two batches, and one that only frees too. After a round that has failed, which of
//! its writes are in the file is not known; new L2 tables might be referred to, and so are written by step 4, and L1
//! entries after them.
//!
//! A cluster of the disk that is given a place which reads as zero, in an image without parent, is there with its first
//! write, and its other bytes read as the zeros that they are. Anywhere else the whole cluster is written at once.
//!
//! Before the first write of a guest bitmaps of other programs, which would not notice our writes, are marked as in
//! use, and all other autoclear bits are cleared ([`Qcow2::first_writes`]). Where bitmaps cannot be made out, theirs is
//! too.
//!
//! # Memory
//!
//! An image open for writing keeps its L1 and refcount tables (for 16 TiB in clusters of 64 KiB: 256 and 128 KiB) and
//! where its tables stand (2 MiB then), 8 MiB of L2 tables and 2 MiB of refcount blocks in slices of 4 KiB. Slices that
//! a round has to write stay beyond that, which the disk bounds by beginning one. 8 MiB of L2 tables are about 64 GiB
//! of disk with clusters of 64 KiB, 2 TiB with those of 2 MiB: not a whole TiB at 64 KiB. A disk looks up again only
//! what its folded map has forgotten, and a miss is one read of 4 KiB.

mod allocate;
mod allocator;
mod append;
mod batch;
mod bitmaps;
mod check;
mod cluster;
mod clusters;
pub mod compress;
mod counts;
mod create;
mod deallocate;
pub mod decompress;
mod entry;
mod grow;
mod head;
mod header;
mod info;
mod layout;
mod open;
mod order;
mod pending;
mod ranges;
mod repair;
mod slices;
mod snapshots;
mod space;
mod tables;

pub use append::{Appender, Content};
pub use check::{Report, check};
pub use create::{CLUSTER_SIZE, Spec, create, measure};
pub use decompress::Compression;
pub use info::{Backing, Info};
pub use repair::{Repair, repair};

/// The stamp of a file, if it is a qcow2 image that has one.
pub(crate) fn stamp(source: &mut dyn Source) -> Result<Option<Stamp>, ImageError> {
    match Header::read_to_repair(source) {
        Ok(header) => Ok(header.stamp()),
        Err(error) if error.kind == ImageErrorKind::Storage => Err(error),
        Err(_) => Ok(None),
    }
}

use crate::format::{
    Access, Committed, Corrupt, Discarded, Format, Mapping, MetaBlock, MetaWrite, Reserved, Tail, Ticket, Wait,
};
use crate::size::in_32_bits;
use crate::{FileOffset, FileRange, Geometry, ImageError, ImageErrorKind, Link, Records, Source, Span, Stamp};

use clusters::Clusters;
use head::Head;
use header::Header;
use layout::{BITMAPS_VALID, RAW_EXTERNAL_DATA, STAMP_VALID};
use open::Opening;

/// One open qcow2 file.
#[derive(Debug)]
pub struct Qcow2 {
    info: Info,
    geometry: Geometry,
    head: Head,
    clusters: Clusters,
    /// Writes to be made before the first write of a guest.
    first: Vec<MetaWrite>,
    /// The last round has failed: it is not known what the file refers to.
    retried: bool,
    records: Records,
}

impl Qcow2 {
    /// Reads the metadata of a file. Damage that is met here is refused; what is met later fails the request that
    /// meets it. What cannot be written to safely is refused for writing, with what to do about it.
    pub fn open(source: &mut dyn Source, access: Access, tail: Tail) -> Result<Qcow2, ImageError> {
        let header = Header::read(source)?;
        let mut opening = Opening { source, header, access, tail };
        let clusters = opening.clusters()?;
        let mut head = opening.head()?;
        let info = Info::of(&opening.header, opening.source);
        let mut first = Vec::new();
        if access == Access::ReadWrite {
            let marked = bitmaps::mark_in_use(&opening.header, opening.source);
            // By the stamp the redo log of the last process proves that it is of this image.
            let kept = STAMP_VALID | if marked.is_some() { BITMAPS_VALID } else { 0 };
            // No zero of the disk is left to an entry while the data file says something else; but a parent's data is.
            let raw = if clusters.tables.format().external && !clusters.parent { RAW_EXTERNAL_DATA } else { 0 };
            first.extend(marked.into_iter().flatten());
            first.extend(head.clear_autoclear(kept | raw));
        }
        let geometry = Geometry {
            len: clusters.len,
            block: 512,
            physical_block: 4096,
            discard: in_32_bits(clusters.size(), "CLUSTER_BITS_MAX"),
            chs: None,
            read_only: access == Access::ReadOnly,
        };
        Ok(Qcow2 { info, geometry, head, clusters, first, retried: false, records: Records::default() })
    }

    /// The description of the image, as of opening.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Whether the image is on top of a parent.
    pub fn has_parent(&self) -> bool {
        self.clusters.parent
    }

    /// Bytes of the file in use: of an image opened for writing, all up to the end of what was ever used but what is
    /// known to be free; of others the file's length. What is free and was not looked at counts, so it is an upper
    /// bound.
    pub fn allocated(&self) -> u64 {
        match &self.clusters.allocator {
            Some(allocator) => allocator.space.used().saturating_mul(self.clusters.size()),
            None => self.clusters.limit.0,
        }
    }

    /// Refcount blocks of an image opened for writing that are known to be lost or wrong. Nothing is placed where they
    /// count.
    pub fn wrong_refcount_blocks(&self) -> u64 {
        self.clusters.allocator.as_ref().map_or(0, |allocator| allocator.distrusted.total())
    }

    /// The parent as the image records it.
    pub fn link(&self) -> Option<Link> {
        info::link(&self.head.header)
    }

    /// Records another parent, or none; durable with the next round. What readers find in the new parent is as much the
    /// caller's business as before.
    pub fn relink(&mut self, parent: Option<&Link>) -> Result<(), ImageError> {
        if parent.is_some() && self.head.header.raw.autoclear.get() & RAW_EXTERNAL_DATA != 0 {
            let what = "the image's data file is one that can be read as a raw image, which has no parent";
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        self.head.relink(self.info.uuid, parent)?;
        self.records.leave_out();
        self.clusters.parent = parent.is_some();
        Ok(())
    }

    /// Writes to be made, and synced, before the first write of a guest. The same each time.
    pub fn first_writes(&self) -> Vec<MetaWrite> {
        self.first.clone()
    }
}

impl Format for Qcow2 {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        self.clusters.map(span)
    }

    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        self.clusters.reserve(span)
    }

    fn commit(&mut self, ticket: Ticket) -> Option<Committed> {
        self.clusters.commit(ticket)
    }

    fn abandon(&mut self, ticket: Ticket) {
        self.clusters.abandon(ticket);
    }

    fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        self.clusters.discard(span)
    }

    fn released(&mut self, at: FileOffset, clean: bool) {
        self.clusters.released(at, clean);
    }

    fn reclaim(&mut self) -> Option<FileRange> {
        self.clusters.reclaim()
    }

    fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        self.clusters.forget(span)
    }

    fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        self.grow_to(len)
    }

    fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        let size = layout::index(self.clusters.size());
        decompress::decompress(self.info.compression, size, bytes).map_err(|_| Corrupt { at: FileOffset(0) })
    }

    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        self.clusters.load(block, bytes);
        Ok(())
    }

    fn drop_caches(&mut self) {
        self.clusters.drop_clean();
    }

    fn records(&mut self) -> &mut Records {
        self.records.append(self.clusters.tables.records());
        if let Some(allocator) = &mut self.clusters.allocator {
            self.records.append(allocator.counts.records());
        }
        &mut self.records
    }

    fn collect_records(&mut self) {
        self.records.collect();
        self.clusters.tables.records().collect();
        if let Some(allocator) = &mut self.clusters.allocator {
            allocator.counts.records().collect();
        }
    }

    fn set_stamp(&mut self, stamp: Stamp) -> Option<MetaWrite> {
        self.head.set_stamp(stamp)
    }

    fn clear_stamp(&mut self) {
        self.head.clear_stamp();
    }

    fn dirty(&self) -> usize {
        self.pieces()
    }

    fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        self.begin_round()
    }

    fn settled(&mut self, durable: bool) {
        self.end_round(durable);
    }
}

#[cfg(test)]
mod test;
