//! Discards and their kin: clusters that lose their place.
//!
//! Knows nothing of rounds. Keeps: no cluster with a write under way loses its place; and what others refer to by their
//! refcount is never called free.

use super::allocator::writable;
use super::cluster::{GuestCluster, HostCluster};
use super::clusters::{Clusters, Start};
use super::counts::Fate;
use super::entry::Entry;
use super::tables::Spot;
use crate::format::{Discarded, Mapping, Wait};
use crate::{FileOffset, FileRange, Span};

/// How a run of clusters, all allocated or none, is freed.
enum Loss {
    /// Clusters of the file from this one on, with one reference each.
    Own { first: HostCluster },
    /// A place that others refer to, or that is compressed.
    Other { first: HostCluster, count: u64 },
    /// A place that others may refer to.
    Shared { first: HostCluster },
    /// None.
    None { was: Entry },
}

impl Clusters {
    /// Frees the first bytes of `span`.
    pub fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        let start = self.start(span);
        self.refuse_busy(start.cluster)?;
        if self.tables.format().external {
            return self.discard_in_data_file(span, start);
        }
        let whole = self.whole(span, start);
        if whole == 0 {
            return self.discard_part(span, start);
        }
        if !self.tables.has_table(start.cluster) && !self.parent {
            let count = self.untabled(start).min(whole);
            return Ok(Discarded::Nothing { len: self.clip(span, start, count) });
        }
        if self.parent && !self.zeroes {
            // The format cannot express zeroes here: a caller that needs them writes them.
            return Ok(Discarded::Nothing { len: self.clip(span, start, whole) });
        }
        let spot = self.spot_for_writing(start.cluster)?;
        let first = self.tables.entry(spot, 0);
        let nothing =
            if self.parent { first == Entry::Zero } else { matches!(first, Entry::Unallocated | Entry::Zero) };
        if nothing {
            let count = self.alike(spot, first, whole);
            return Ok(Discarded::Nothing { len: self.clip(span, start, count) });
        }
        let new = if self.parent { Entry::Zero } else { Entry::Unallocated };
        let loss = self.loss(first)?;
        let count = self.lose_run(start.cluster, spot, whole, new, &loss);
        let len = self.clip(span, start, count);
        Ok(match loss {
            Loss::Own { first } => {
                self.lose(first, count, Fate::Released);
                let size = count * self.size();
                Discarded::Freed { at: first.start(self.bits), len, size }
            }
            Loss::Other { first, count } => {
                writable(&mut self.allocator).lose_compressed(first, count);
                Discarded::Hidden { len }
            }
            Loss::Shared { first } => {
                writable(&mut self.allocator).lose_shared(first);
                Discarded::Hidden { len }
            }
            Loss::None { .. } => Discarded::Hidden { len },
        })
    }

    /// In a data file every cluster keeps its place, which no other could have: its content is freed, and nothing is
    /// written about that.
    fn discard_in_data_file(&mut self, span: Span, start: Start) -> Result<Discarded, Wait> {
        let Some(spot) = self.spot(start.cluster)? else {
            let count = self.untabled(start);
            return self.hide(span, start, count);
        };
        let first = self.tables.entry(spot, 0);
        let count = self.alike(spot, first, start.count);
        let len = self.clip(span, start, count);
        match first {
            Entry::Data { at, .. } => Ok(Discarded::Kept { at: at + start.from, len }),
            Entry::Unallocated => self.hide(span, start, count),
            Entry::Mixed { .. } => self.discard_part(span, start),
            Entry::Zero | Entry::ZeroAllocated { .. } | Entry::Compressed { .. } => Ok(Discarded::Nothing { len }),
        }
    }

    /// Has the first of `count` clusters that have no place read as zero, where a parent may have something.
    fn hide(&mut self, span: Span, start: Start, count: u64) -> Result<Discarded, Wait> {
        let whole = self.whole(span, start).min(count);
        if whole == 0 || !self.parent {
            return Ok(Discarded::Nothing { len: self.clip(span, start, count) });
        }
        let spot = self.spot_for_writing(start.cluster)?;
        let was = Loss::None { was: Entry::Unallocated };
        let count = self.lose_run(start.cluster, spot, whole, Entry::Zero, &was);
        Ok(Discarded::Hidden { len: self.clip(span, start, count) })
    }

    /// Part of a cluster: it keeps its place.
    fn discard_part(&mut self, span: Span, start: Start) -> Result<Discarded, Wait> {
        let len = self.clip(span, start, 1);
        let entry = match self.spot(start.cluster)? {
            Some(spot) => self.tables.entry(spot, 0),
            None => Entry::Unallocated,
        };
        Ok(match entry {
            Entry::Data { at, copied: true } => Discarded::Kept { at: at + start.from, len },
            mixed @ Entry::Mixed { subclusters, .. } => match self.mixed(mixed, subclusters, start.from, len) {
                Mapping::Data { at, len } => Discarded::Kept { at, len },
                Mapping::Shared { len, .. } | Mapping::Zero { len } | Mapping::Parent { len } => {
                    Discarded::Nothing { len }
                }
                Mapping::Compressed { .. } | Mapping::Damaged { .. } | Mapping::Missing { .. } => {
                    Discarded::Nothing { len }
                }
            },
            _ => Discarded::Nothing { len },
        })
    }

    /// The first bytes of `span` live here no longer; how many.
    pub fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        let start = self.start(span);
        let whole = self.whole(span, start);
        if whole == 0 {
            // Part of a cluster stays: what is here is what the parent has.
            return Ok(self.clip(span, start, 1));
        }
        if !self.tables.has_table(start.cluster) {
            let count = self.untabled(start).min(whole);
            return Ok(self.clip(span, start, count));
        }
        self.refuse_busy(start.cluster)?;
        let spot = self.spot_for_writing(start.cluster)?;
        let first = self.tables.entry(spot, 0);
        if first == Entry::Unallocated {
            let count = self.alike(spot, first, whole);
            return Ok(self.clip(span, start, count));
        }
        let loss = self.loss(first)?;
        let count = self.lose_run(start.cluster, spot, whole, Entry::Unallocated, &loss);
        match loss {
            Loss::Own { first } => self.lose(first, count, Fate::Leaked),
            Loss::Other { first, count } => {
                writable(&mut self.allocator).lose_compressed(first, count);
            }
            Loss::Shared { first } => {
                writable(&mut self.allocator).lose_shared(first);
            }
            Loss::None { .. } => {}
        }
        Ok(self.clip(span, start, count))
    }

    /// A file range that was freed reads as zero now, or does not.
    pub fn released(&mut self, at: FileOffset, clean: bool) {
        let first = HostCluster::of(at, self.bits);
        writable(&mut self.allocator).space.released(first, clean);
    }

    /// A file range in no use, to be deallocated.
    pub fn reclaim(&mut self) -> Option<FileRange> {
        let (first, count) = self.allocator.as_mut()?.space.next_leaked()?;
        Some(FileRange { at: first.start(self.bits), len: count * self.size() })
    }

    fn refuse_busy(&self, cluster: GuestCluster) -> Result<(), Wait> {
        match self.allocator.as_ref().and_then(|allocator| allocator.pending.slot(cluster)) {
            Some(slot) => Err(Wait::Busy(slot.ticket)),
            None => Ok(()),
        }
    }

    /// How a cluster with `entry` is freed; loads the refcounts that this needs.
    fn loss(&mut self, entry: Entry) -> Result<Loss, Wait> {
        let allocator = writable(&mut self.allocator);
        allocator.free_old_tables()?;
        let bits = self.bits;
        Ok(match entry {
            // Nothing counts what is in a data file, and nothing else could be put there.
            _ if self.tables.format().external => Loss::None { was: entry },
            Entry::Unallocated | Entry::Zero | Entry::Mixed { at: None, .. } => Loss::None { was: entry },
            Entry::Data { at, copied }
            | Entry::ZeroAllocated { at, copied }
            | Entry::Mixed { at: Some(at), copied, .. } => {
                let first = HostCluster::of(at, bits);
                allocator.counts.need(first, 1)?;
                match (copied, allocator.counts.get(first)) {
                    (false, _) => Loss::Shared { first },
                    (true, 1) => Loss::Own { first },
                    (true, _) => Loss::Other { first, count: 1 },
                }
            }
            Entry::Compressed { at, end } => {
                let first = HostCluster::of(at, bits);
                let count = HostCluster::of(end - 1, bits) - first + 1;
                allocator.counts.need(first, count)?;
                Loss::Other { first, count }
            }
        })
    }

    /// Gives the entries from `spot` on, at most `max`, that are lost in the same way, a new value; how many.
    fn lose_run(&mut self, cluster: GuestCluster, spot: Spot, max: u64, new: Entry, loss: &Loss) -> u64 {
        let max = max.min(spot.left);
        let mut count = 0u64;
        while count < max && self.is_lost_alike(cluster, spot, count, loss) {
            self.tables.set(spot, count, new);
            count += 1;
        }
        count
    }

    /// Whether the entry `by` clusters behind `spot` is lost with the first one.
    fn is_lost_alike(&self, cluster: GuestCluster, spot: Spot, by: u64, loss: &Loss) -> bool {
        if by == 0 {
            return true;
        }
        let Some(allocator) =
            self.allocator.as_ref().filter(|allocator| allocator.pending.slot(cluster + by).is_none())
        else {
            return false;
        };
        let entry = self.tables.entry(spot, by);
        match *loss {
            // With its refcount in the same slice, which is here.
            Loss::Own { first } => {
                let next = first + by;
                let follows = entry.is_copied() && entry.place() == Some(next.start(self.bits));
                follows && allocator.counts.is_near(first, next) && allocator.counts.get(next) == 1
            }
            Loss::Other { .. } | Loss::Shared { .. } => false,
            Loss::None { was } => entry == was,
        }
    }
}
