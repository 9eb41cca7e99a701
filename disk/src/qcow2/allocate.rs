//! Places for writes: reserved before the bytes are written, in the tables after that.
//!
//! Knows nothing of rounds. Keeps: a reader finds a new place only when it was committed, and then every byte of its
//! clusters is what it should be: written, filled, or zero from the beginning.

use super::allocator::writable;
use super::cluster::{GuestCluster, HostCluster};
use super::clusters::{Clusters, Start};
use super::counts::Fate;
use super::entry::{Entry, Part, Subcluster, Subclusters};
use super::layout::{COPIED, OFFSET_MASK};
use super::pending::Write;
use super::tables::Spot;
use crate::format::{Committed, Fill, Reserved, Ticket, Wait};
use crate::{FileOffset, Span};

impl Clusters {
    /// Space for the first bytes of `span`.
    pub fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        let start = self.start(span);
        let allocator = writable(&mut self.allocator);
        allocator.free_old_tables()?;
        if let Some(slot) = allocator.pending.slot(start.cluster) {
            if !slot.shared {
                return Err(Wait::Busy(slot.ticket));
            }
            let spot = self.spot_for_writing(start.cluster)?;
            return self.share(span, start, spot, slot.place);
        }
        let spot = self.spot_for_writing(start.cluster)?;
        match self.tables.entry(spot, 0) {
            Entry::Data { at, copied: false }
            | Entry::ZeroAllocated { at, copied: false }
            | Entry::Mixed { at: Some(at), copied: false, .. } => {
                let found = self.allocate_instead(HostCluster::of(at, self.bits), 1)?;
                Ok(self.begin(span, start, spot, found))
            }
            first @ Entry::Data { at, copied: true } => {
                let count = self.alike(spot, first, start.count);
                let len = self.clip(span, start, count);
                Ok(Reserved { at: at + start.from, len, ticket: None, fill: None })
            }
            Entry::ZeroAllocated { at, copied: true } => {
                let place = Mapping { parts: self.in_parts(span, start), ..self.again(at)? };
                Ok(self.begin(span, start, spot, place))
            }
            Entry::Mixed { at: Some(at), copied: true, subclusters } => {
                self.reserve_part(span, start, spot, at, subclusters)
            }
            Entry::Compressed { at, end } => {
                let (first, count) = self.compressed_clusters(at, end);
                let found = self.allocate_instead(first, count)?;
                Ok(self.begin(span, start, spot, found))
            }
            first @ (Entry::Unallocated | Entry::Zero | Entry::Mixed { at: None, .. }) => {
                self.reserve_new(span, start, spot, first)
            }
        }
    }

    /// A place for one cluster that frees others, or its share in them: `count` from `first` on.
    fn allocate_instead(&mut self, first: HostCluster, count: u64) -> Result<Mapping, Wait> {
        let allocator = writable(&mut self.allocator);
        let mut counts = allocator.counts.need(first, count)?;
        let found = allocator.allocate(1, &self.tables)?;
        counts.extend(allocator.counts.need(found.first, 1)?);
        allocator.space.take(found.first, 1);
        Ok(Mapping { first: found.first, count: 1, new: true, shared: false, parts: false, counts })
    }

    /// The place at `at`, which one cluster has already, or may have and no other. Nothing counts those in a data file.
    fn again(&mut self, at: FileOffset) -> Result<Mapping, Wait> {
        let first = HostCluster::of(at, self.bits);
        let counts = match self.tables.format().external {
            true => Vec::new(),
            false => writable(&mut self.allocator).counts.need(first, 1)?,
        };
        Ok(Mapping { first, count: 1, new: false, shared: false, parts: false, counts })
    }

    /// The first bytes of `span` in a cluster of which some subclusters are in the file, at `at`. What is there already
    /// is not written again: should a write fail, what it has been over may be lost.
    fn reserve_part(
        &mut self,
        span: Span,
        start: Start,
        spot: Spot,
        at: FileOffset,
        subclusters: Subclusters,
    ) -> Result<Reserved, Wait> {
        let format = self.tables.format();
        let number = format.subcluster_of(start.from);
        let (first, alike) = subclusters.run(number);
        let count = if first == Subcluster::Data { alike } else { subclusters.absent(number) };
        let end = format.start_of(number + count);
        let span = Span { len: self.clip(span, start, 1).min(end - start.from), ..span };
        if first == Subcluster::Data {
            return Ok(Reserved { at: at + start.from, len: span.len, ticket: None, fill: None });
        }
        let (start, place) = (self.start(span), self.again(at)?);
        Ok(self.begin(span, start, spot, Mapping { parts: true, ..place }))
    }

    /// Whether a write to the first cluster of `span` leaves other subclusters of it what they are: it has some, and is
    /// not written to as a whole.
    fn in_parts(&self, span: Span, start: Start) -> bool {
        self.tables.format().extended && self.whole(span, start) == 0
    }

    /// Places for clusters that have none, of which `first` is the first.
    fn reserve_new(&mut self, span: Span, start: Start, spot: Spot, first: Entry) -> Result<Reserved, Wait> {
        let format = self.tables.format();
        let reads_zero = first == Entry::Zero || !self.parent;
        let parts = self.in_parts(span, start);
        let max = if format.extended { self.whole(span, start).max(1) } else { start.count };
        let count = self.without_place(start, spot, reads_zero, max);
        if format.external {
            // What is there now is not known, and so all of it is written.
            let place = Mapping { count, parts, ..self.again(format.own_place(start.cluster))? };
            return Ok(self.begin(span, start, spot, place));
        }
        let allocator = writable(&mut self.allocator);
        let found = allocator.allocate(count, &self.tables)?;
        let counts = allocator.counts.need(found.first, found.count)?;
        allocator.space.take(found.first, found.count);
        let shared = found.clean && reads_zero;
        let place =
            Mapping { first: found.first, count: found.count, new: true, shared, parts: parts && !shared, counts };
        Ok(self.begin(span, start, spot, place))
    }

    /// Clusters from the first on, at most `max`, that have no place and are given none, and read all as zero or as the
    /// parent.
    fn without_place(&self, start: Start, spot: Spot, reads_zero: bool, max: u64) -> u64 {
        let mut count = 1u64;
        while count < max.min(spot.left) {
            let alike = match self.tables.entry(spot, count) {
                Entry::Zero => reads_zero,
                Entry::Unallocated => reads_zero != self.parent,
                _ => false,
            };
            let next = start.cluster + count;
            let is_given = self.allocator.as_ref().is_none_or(|allocator| allocator.pending.slot(next).is_some());
            if !alike || is_given {
                break;
            }
            count += 1;
        }
        count
    }

    /// Begins a write to a place.
    fn begin(&mut self, span: Span, start: Start, spot: Spot, place: Mapping) -> Reserved {
        let len = self.clip(span, start, place.count);
        let part = place.parts.then(|| self.tables.format().part_of(start.from, len));
        let (first, covered) = self.covered(part, place.count);
        let before = start.from - first;
        let after = covered - before - len;
        let filled = place.shared || (before == 0 && after == 0);
        // Zeroes are written to a new place, which must not be left to the file's end to hold them: no entry says zero
        // where it cannot be said, or where it speaks of other subclusters too.
        let said = self.zeroes && part.is_none();
        let written = filled && !said && place.new && !place.shared;
        let fill = match (filled, written) {
            (false, _) => Some(Fill { before, after }),
            (true, true) => Some(Fill { before: 0, after: 0 }),
            (true, false) => None,
        };
        let at = place.first.start(self.bits) + start.from;
        let write = Write {
            cluster: start.cluster,
            count: place.count,
            place: place.first,
            new: place.new,
            part,
            table: spot.slice,
            counts: place.counts,
        };
        let ticket = self.begin_write(write, place.shared);
        Reserved { at, len, ticket: Some(ticket), fill }
    }

    /// The range to which a write gives a place, relative to its first cluster: offset and number of bytes.
    fn covered(&self, part: Option<Part>, count: u64) -> (u64, u64) {
        part.map_or((0, count << self.bits), |part| self.tables.format().bytes_of(part))
    }

    /// Another write to a cluster whose place reads as zero and is not in the table yet.
    fn share(&mut self, span: Span, start: Start, spot: Spot, place: HostCluster) -> Result<Reserved, Wait> {
        let allocator = writable(&mut self.allocator);
        let counts = allocator.counts.need(place, 1)?;
        let place = Mapping { first: place, count: 1, new: true, shared: true, parts: false, counts };
        Ok(self.begin(span, start, spot, place))
    }

    fn begin_write(&mut self, write: Write, shared: bool) -> Ticket {
        self.tables.slices().pin(write.table);
        let allocator = writable(&mut self.allocator);
        write.counts.iter().for_each(|&slice| allocator.counts.slices().pin(slice));
        allocator.pending.begin(write, shared)
    }

    /// Ends a write: what it has kept in the caches may go.
    fn end_write(&mut self, ticket: Ticket) -> Write {
        let allocator = writable(&mut self.allocator);
        let write = allocator.pending.end(ticket);
        write.counts.iter().for_each(|&slice| allocator.counts.slices().unpin(slice));
        self.tables.slices().unpin(write.table);
        write
    }

    /// The bytes are written: readers find them from now on.
    pub fn commit(&mut self, ticket: Ticket) -> Option<Committed> {
        let write = self.end_write(ticket);
        for by in 0..write.count {
            let (cluster, place) = (write.cluster + by, write.place + by);
            // Another write to the same cluster may have claimed it before.
            if !writable(&mut self.allocator).pending.claim(cluster, place) {
                continue;
            }
            // The table was judged when the place was reserved, and is pinned. It is not judged again: what others were
            // given meanwhile must not cost what is written.
            let Ok(Some(spot)) = self.tables.spot(cluster) else { unreachable!("the L2 table is pinned") };
            self.place(spot, place, &write);
        }
        let (from, len) = self.covered(write.part, write.count);
        let at = write.cluster.start(self.bits) + from;
        let span = Span { at, len: len.min(self.len - at.0) };
        Some(Committed { span, at: write.place.start(self.bits) + from })
    }

    /// Puts a place into the table.
    fn place(&mut self, spot: Spot, place: HostCluster, write: &Write) {
        let old = self.tables.entry(spot, 0);
        let compressed = match old {
            Entry::Compressed { at, end } => Some(self.compressed_clusters(at, end)),
            _ => None,
        };
        let at = place.start(self.bits);
        self.tables.set(spot, 0, write.part.map_or(Entry::Data { at, copied: true }, |part| old.with(at, part)));
        // Nothing counts what is in a data file.
        if self.tables.format().external {
            return;
        }
        let allocator = writable(&mut self.allocator);
        if !write.new {
            return allocator.counts.log_again(place);
        }
        allocator.counts.raise(place);
        allocator.space.used_now(place, 1);
        match (old.place(), compressed) {
            (_, Some((first, count))) => allocator.lose_compressed(first, count),
            (Some(at), None) => allocator.lose_shared(HostCluster::of(at, self.bits)),
            (None, None) => {}
        }
    }

    /// The write failed: readers find the old place.
    pub fn abandon(&mut self, ticket: Ticket) {
        let write = self.end_write(ticket);
        let allocator = writable(&mut self.allocator);
        for by in 0..write.count {
            let place = write.place + by;
            if allocator.pending.leave(write.cluster + by, place) && write.new {
                allocator.space.leaked(place, 1);
            }
        }
    }

    /// Where the entry of a cluster stands, which gets an L2 table of its own if it has none.
    pub fn spot_for_writing(&mut self, cluster: GuestCluster) -> Result<Spot, Wait> {
        let (_, raw) = self.tables.first_level(cluster);
        if self.tables.has_table(cluster) && raw & COPIED == 0 {
            // What makes no sense is not followed.
            self.spot(cluster)?;
            self.unshare_table(cluster, FileOffset(raw & OFFSET_MASK))?;
        } else if !self.tables.has_table(cluster) && self.tables.covers(cluster) {
            let table = writable(&mut self.allocator).allocate_table(&self.tables)?;
            self.tables.add_table(cluster, table.start(self.bits));
        }
        let Some(spot) = self.spot(cluster)? else { unreachable!("cluster {cluster} is behind the L1 table") };
        Ok(spot)
    }

    /// Gives a cluster a copy of its L2 table, at `old`, which others refer to, or may. What its entries refer to was
    /// counted once for each of them when they came to share it, so that only the table itself loses a reference. A
    /// round writes the copy and counts it before the L1 entry, and lowers the old refcount after that.
    fn unshare_table(&mut self, cluster: GuestCluster, old: FileOffset) -> Result<(), Wait> {
        let content = self.tables.whole(old)?;
        let allocator = writable(&mut self.allocator);
        let found = allocator.allocate(1, &self.tables)?;
        allocator.counts.need(HostCluster::of(old, self.bits), 1)?;
        allocator.counts.need(found.first, 1)?;
        let table = allocator.take_table(found);
        allocator.lose_shared(HostCluster::of(old, self.bits));
        self.tables.copy_table(cluster, table.start(self.bits), &content);
        Ok(())
    }

    /// The clusters of the file that a compressed cluster reaches into.
    pub fn compressed_clusters(&self, at: FileOffset, end: FileOffset) -> (HostCluster, u64) {
        let first = HostCluster::of(at, self.bits);
        (first, HostCluster::of(end - 1, self.bits) - first + 1)
    }

    /// Clusters of the file lose a reference each.
    pub fn lose(&mut self, first: HostCluster, count: u64, fate: Fate) {
        writable(&mut self.allocator).lose(first, count, fate);
    }
}

/// Where a write goes.
struct Mapping {
    /// Cluster of the file.
    first: HostCluster,
    count: u64,
    /// It was handed out for this write.
    new: bool,
    /// It reads as zero, as its clusters of the disk do: other writes may go there at the same time.
    shared: bool,
    /// Other subclusters of the cluster stay what they are.
    parts: bool,
    /// The slices of refcounts that the write will change.
    counts: Vec<FileOffset>,
}
