//! The clusters of an image, as a reader sees them.
//!
//! They are changed by `allocate` (places for writes), `giveup` (discards and their kin) and `order` (rounds). Keeps:
//! an answer is about clusters whose entries were checked; and a malformed entry costs its own cluster, and nothing
//! else.

use super::allocator::Allocator;
use super::cluster::{GuestCluster, HostCluster, run};
use super::entry::{Entry, Subcluster, Subclusters};
use super::layout::{COPIED, OFFSET_MASK, PAGE, length};
use super::tables::{Spot, Tables};
use crate::format::{Corrupt, Mapping, MetaBlock, Wait};
use crate::{FileOffset, Span};

/// Clusters and where they are.
#[derive(Debug)]
pub struct Clusters {
    /// Bytes of a cluster, as a power of two.
    pub bits: u32,
    /// Bytes of the disk.
    pub len: u64,
    /// Whether what is unallocated is in a parent.
    pub parent: bool,
    /// Whether a cluster can be said to read as zero: not in version 2.
    pub zeroes: bool,
    /// Whether the disk keeps its size: an internal snapshot would take another one for its own.
    pub pinned: bool,
    /// Offset of the file at and behind which nothing is, where the image is only read.
    pub limit: FileOffset,
    /// The mapping of clusters to places in the file.
    pub tables: Tables,
    /// The allocator; `None` where the image is only read.
    pub allocator: Option<Allocator>,
}

/// The result of looking up the entry of a cluster.
enum Found {
    /// It makes sense, and stands here.
    Entry(Spot),
    /// There is no L2 table for it.
    NoTable,
    /// The entry at this offset of the file is malformed; it maps `count` clusters.
    Unsound { at: FileOffset, raw: u64, count: u64 },
}

/// A run of clusters for the first bytes of a span.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// The cluster of the first byte.
    pub cluster: GuestCluster,
    /// The byte's place in it.
    pub from: u64,
    /// Clusters that the span touches.
    pub count: u64,
}

impl Clusters {
    /// Bytes of a cluster.
    pub fn size(&self) -> u64 {
        1 << self.bits
    }

    /// The clusters of a span.
    pub fn start(&self, span: Span) -> Start {
        let from = span.at % self.size();
        Start { cluster: GuestCluster::of(span.at, self.bits), from, count: (from + span.len).div_ceil(self.size()) }
    }

    /// Bytes of `span` in the first `count` clusters of it.
    pub fn clip(&self, span: Span, start: Start, count: u64) -> u64 {
        span.len.min(count * self.size() - start.from)
    }

    /// How many clusters `span` begins with that it covers whole. The last one ends with the disk.
    pub fn whole(&self, span: Span, start: Start) -> u64 {
        if start.from != 0 {
            return 0;
        }
        if span.end().0 >= self.len { start.count } else { span.len >> self.bits }
    }

    /// Where the first bytes of `span` live.
    pub fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        let start = self.start(span);
        let spot = match self.find(start.cluster)? {
            Found::Entry(spot) => spot,
            Found::NoTable => {
                let count = self.untabled(start);
                return Ok(Mapping::Parent { len: self.clip(span, start, count) });
            }
            Found::Unsound { at, raw, count } => {
                return Ok(Mapping::Damaged { at, raw, len: self.clip(span, start, count.min(start.count)) });
            }
        };
        let first = self.tables.entry(spot, 0);
        let count = self.alike(spot, first, start.count);
        let len = self.clip(span, start, count);
        Ok(match first {
            Entry::Unallocated => Mapping::Parent { len },
            Entry::Zero | Entry::ZeroAllocated { .. } => Mapping::Zero { len },
            Entry::Data { at, copied: false } if self.allocator.is_some() => {
                Mapping::Shared { at: at + start.from, len }
            }
            Entry::Data { at, .. } => Mapping::Data { at: at + start.from, len },
            Entry::Compressed { at, end } => self.compressed(at, end, start.from, len),
            mixed @ Entry::Mixed { subclusters, .. } => self.mixed(mixed, subclusters, start.from, len),
        })
    }

    /// The first subclusters that are alike, from byte `from` of a cluster on, at most `max` bytes.
    pub fn mixed(&self, entry: Entry, subclusters: Subclusters, from: u64, max: u64) -> Mapping {
        let format = self.tables.format();
        let number = format.subcluster_of(from);
        let (first, count) = subclusters.run(number);
        let len = max.min(format.start_of(number + count) - from);
        match (first, entry.place()) {
            (Subcluster::Data, Some(at)) if self.allocator.is_some() && !entry.is_copied() => {
                Mapping::Shared { at: at + from, len }
            }
            (Subcluster::Data, Some(at)) => Mapping::Data { at: at + from, len },
            (Subcluster::Zero, _) => Mapping::Zero { len },
            (Subcluster::Unallocated | Subcluster::Data, _) => Mapping::Parent { len },
        }
    }

    /// Where the entry of a cluster stands, and whether it makes sense.
    fn find(&mut self, cluster: GuestCluster) -> Result<Found, Wait> {
        let (at, raw) = self.tables.first_level(cluster);
        let limit = self.allocator.as_ref().map_or(self.limit, |allocator| allocator.space.file_end().start(self.bits));
        let table = raw & OFFSET_MASK;
        if raw & !(OFFSET_MASK | COPIED) != 0 || table % self.size() != 0 || FileOffset(table) >= limit {
            return Ok(Found::Unsound { at, raw, count: self.tables.left_in_table(cluster) });
        }
        let Some(spot) = self.tables.spot(cluster)? else { return Ok(Found::NoTable) };
        let (bits, zeroes, format) = (self.bits, self.zeroes, self.tables.format());
        let Some(entries) = self.tables.unchecked(spot) else { return Ok(Found::Entry(spot)) };
        let allocator = &mut self.allocator;
        let unsound = entries.enumerate().filter_map(|(number, raw)| {
            let places = if format.external { HostCluster(0)..HostCluster(0) } else { format.decode(raw).places(bits) };
            // All of them, whatever the first ones say.
            let refers = allocator
                .as_mut()
                .is_none_or(|allocator| run(places).filter(|&cluster| !allocator.refer(cluster)).count() == 0);
            let of = GuestCluster(cluster.0 + length(number) - length(spot.within));
            let fault = format.unsound(raw, of, limit, zeroes).or((!refers).then_some((0, raw.descriptor)));
            Some((number, fault?))
        });
        // All of them are looked at, for what they refer to is in use.
        let (mut any, mut next) = (false, None);
        for (number, fault) in unsound {
            any = true;
            if number >= spot.within && next.is_none() {
                next = Some((number, fault));
            }
        }
        match next {
            Some((number, (within, raw))) if number == spot.within => {
                Ok(Found::Unsound { at: self.tables.entry_at(spot) + within, raw, count: 1 })
            }
            Some((number, _)) => {
                let left = length(number - spot.within);
                Ok(Found::Entry(Spot { left: spot.left.min(left), ..spot }))
            }
            None => {
                if !any {
                    self.tables.found_sound(spot);
                }
                Ok(Found::Entry(spot))
            }
        }
    }

    /// Where the entry of a cluster stands, which makes sense; `None` if there is no L2 table for it.
    pub fn spot(&mut self, cluster: GuestCluster) -> Result<Option<Spot>, Wait> {
        match self.find(cluster)? {
            Found::Entry(spot) => Ok(Some(spot)),
            Found::NoTable => Ok(None),
            Found::Unsound { at, .. } => Err(Wait::Damaged(Corrupt { at })),
        }
    }

    /// A compressed cluster, to be read in whole pages as storage of 4 KiB sectors has it.
    fn compressed(&self, at: FileOffset, end: FileOffset, skip: u64, len: u64) -> Mapping {
        let begin = at.align_down(PAGE);
        let size = end.align_up(PAGE) - begin;
        Mapping::Compressed { at: begin, size, lead: at - begin, skip, len }
    }

    /// Clusters from the first on, at most as many as are touched, that have no L2 table.
    pub fn untabled(&self, start: Start) -> u64 {
        let mut count = 0u64;
        while count < start.count {
            let next = start.cluster + count;
            if count > 0 && self.tables.has_table(next) {
                break;
            }
            count += self.tables.left_in_table(next);
        }
        count.min(start.count)
    }

    /// Clusters from `spot` on, at most `max`, that a reader finds in one piece: `first` is the first of them.
    pub fn alike(&self, spot: Spot, first: Entry, max: u64) -> u64 {
        let zero = |entry| matches!(entry, Entry::Zero | Entry::ZeroAllocated { .. });
        let mut count = 1u64;
        while count < max.min(spot.left) {
            let entry = self.tables.entry(spot, count);
            let alike = match first {
                Entry::Unallocated => entry == Entry::Unallocated,
                Entry::Zero | Entry::ZeroAllocated { .. } => zero(entry),
                Entry::Data { at, copied } => entry == Entry::Data { at: at + (count << self.bits), copied },
                Entry::Compressed { .. } | Entry::Mixed { .. } => false,
            };
            if !alike {
                break;
            }
            count += 1;
        }
        count
    }

    /// Forgets the tables and refcounts that are here, but for those that are changed or about to be.
    pub fn drop_clean(&mut self) {
        self.tables.slices().drop_clean();
        if let Some(allocator) = &mut self.allocator {
            allocator.counts.slices().drop_clean();
        }
    }

    /// Takes in metadata that was requested with [`Wait::Load`].
    pub fn load(&mut self, block: MetaBlock, bytes: &[u8]) {
        if self.tables.slices().awaits(block.at) {
            self.tables.slices().loaded(block.at, bytes);
        } else if let Some(allocator) = &mut self.allocator {
            allocator.counts.slices().loaded(block.at, bytes);
        }
    }
}
