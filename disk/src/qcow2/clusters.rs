//! The clusters of an image, as a reader sees them.
//!
//! What changes them is in `allot` (places for writes), `giveup` (discards and their kin) and `order` (rounds). Keeps: an
//! answer is about clusters whose entries were checked.

use super::entry::{Entry, is_sound};
use super::room::Room;
use super::tables::{Spot, Tables};
use crate::Span;
use crate::format::{Corrupt, MetaBlock, Place, Wait};

/// Clusters and where they are.
#[derive(Debug)]
pub struct Clusters {
    /// Bytes of a cluster, as a power of two.
    pub bits: u32,
    /// Bytes of the disk.
    pub len: u64,
    /// Whether what is unallocated is in a parent.
    pub parent: bool,
    /// Offset of the file at and behind which nothing is, where the image is only read.
    pub limit: u64,
    /// What is where.
    pub tables: Tables,
    /// What writing takes; `None` where the image is only read.
    pub room: Option<Room>,
}

/// A run of clusters for the first bytes of a span.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// The cluster of the first byte.
    pub cluster: u64,
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
        Start { cluster: span.at >> self.bits, from, count: from.saturating_add(span.len).div_ceil(self.size()) }
    }

    /// Bytes of `span` in the first `count` clusters of it.
    pub fn clip(&self, span: Span, start: Start, count: u64) -> u64 {
        span.len.min(count.saturating_mul(self.size()).saturating_sub(start.from))
    }

    /// Where the first bytes of `span` live.
    pub fn map(&mut self, span: Span) -> Result<Place, Wait> {
        let start = self.start(span);
        let Some(spot) = self.spot(start.cluster)? else {
            let count = self.untabled(start);
            return Ok(self.nowhere(self.clip(span, start, count)));
        };
        let first = self.tables.entry(spot, 0);
        let count = self.alike(spot, first, start.count);
        let len = self.clip(span, start, count);
        Ok(match first {
            Entry::Unallocated => self.nowhere(len),
            Entry::Zero | Entry::ZeroAllocated { .. } => Place::Zero { len },
            Entry::Data { at } => Place::Data { at: at.saturating_add(start.from), len },
            Entry::Packed { at, end } => self.packed(at, end, start.from, len),
        })
    }

    /// Where the entry of a cluster stands, which makes sense; `None` if there is no L2 table for it.
    pub fn spot(&mut self, cluster: u64) -> Result<Option<Spot>, Wait> {
        let Some(spot) = self.tables.spot(cluster)? else { return Ok(None) };
        let bits = self.bits;
        let unsound = match (self.tables.unchecked(spot), &mut self.room) {
            (None, _) => return Ok(Some(spot)),
            (Some(mut entries), Some(room)) => entries.position(|raw| {
                let place = Entry::decode(raw, bits).place();
                !is_sound(raw, bits, room.space.end() << bits, true) || place.is_some_and(|at| !room.refer(at >> bits))
            }),
            (Some(mut entries), None) => entries.position(|raw| !is_sound(raw, bits, self.limit, false)),
        };
        if let Some(number) = unsound {
            return Err(self.tables.found_unsound(spot, number));
        }
        self.tables.found_sound(spot);
        Ok(Some(spot))
    }

    /// A compressed cluster, to be read in whole pages as storage of 4 KiB sectors has it.
    fn packed(&self, at: u64, end: u64, skip: u64, len: u64) -> Place {
        /// Bytes of a page.
        const PAGE: u64 = 4096;
        let begin = at / PAGE * PAGE;
        let size = end.next_multiple_of(PAGE).saturating_sub(begin);
        Place::Packed { at: begin, size, lead: at.saturating_sub(begin), skip, len }
    }

    fn nowhere(&self, len: u64) -> Place {
        if self.parent { Place::Parent { len } } else { Place::Zero { len } }
    }

    /// Clusters from the first on, at most as many as are touched, that have no L2 table.
    pub fn untabled(&self, start: Start) -> u64 {
        let mut count = 0u64;
        while count < start.count {
            let next = start.cluster.saturating_add(count);
            if count > 0 && self.tables.has_table(next) {
                break;
            }
            count = count.saturating_add(self.tables.left_in_table(next));
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
                Entry::Data { at } => entry == Entry::Data { at: at.saturating_add(count << self.bits) },
                Entry::Packed { .. } => false,
            };
            if !alike {
                break;
            }
            count = count.saturating_add(1);
        }
        count
    }

    /// Forgets the tables and refcounts that are here, but for those that are changed or about to be.
    pub fn drop_clean(&mut self) {
        self.tables.slices().drop_clean();
        if let Some(room) = &mut self.room {
            room.counts.slices().drop_clean();
        }
    }

    /// Takes in metadata that was asked for.
    pub fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt> {
        if !self.tables.slices().awaits(block.at) {
            if let Some(room) = &mut self.room {
                room.counts.slices().loaded(block.at, bytes);
            }
            return Ok(());
        }
        self.tables.load(block.at, bytes)
    }
}
