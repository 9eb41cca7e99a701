//! Which clusters of the file may be handed out.
//!
//! Knows nothing of tables; refcounts are shown to it. Invariant: a cluster is handed out only when no durable metadata
//! refers to it. One that was freed is therefore kept back until the metadata that freed it is durable *and* its old
//! content has been deallocated, or is known not to have been ("unclean").
//!
//! Space comes from three places: clusters known to be free, clusters that a scan of the refcounts finds, little by
//! little, and the end of the file.

use std::collections::HashMap;

use super::cluster::HostCluster;
use super::ranges::Ranges;

/// Clusters taken between two steps of the scan, each of which may cost reading a page.
const CREDIT_MAX: u32 = 64;
/// Clusters deallocated in one operation when there is time.
const RECLAIM_BYTES: u64 = 256 << 20;

/// Free clusters in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The first.
    pub first: HostCluster,
    /// How many.
    pub count: u64,
    /// Whether they read as zero.
    pub clean: bool,
}

/// How far clusters on their way back have come.
#[derive(Clone, Copy, Debug)]
struct Returning {
    count: u64,
    /// Whether durable metadata no longer refers to them.
    forgotten: bool,
    /// Whether they read as zero, once that is known.
    clean: Option<bool>,
}

/// The free space of one file.
#[derive(Debug)]
pub struct Space {
    /// Bytes of a cluster.
    size: u64,
    /// Behind every cluster that is in use or was handed out.
    end: HostCluster,
    /// Where storage ends whose size is fixed.
    limit: HostCluster,
    /// Whether what is at `end` and behind reads as zero.
    zero_tail: bool,
    clean: Ranges<HostCluster>,
    unclean: Ranges<HostCluster>,
    /// Of unknown content, and to be deallocated.
    leaked: Ranges<HostCluster>,
    /// Every cluster that is in no use by its refcount, but is known here: free, leaked, returning, or handed out and
    /// not in use yet. And those of tables, which are not to be handed out whatever their refcounts say.
    known: Ranges<HostCluster>,
    returning: HashMap<HostCluster, Returning>,
    /// Up to where refcounts have been looked at, and are to be.
    scanned: HostCluster,
    scan_end: HostCluster,
    credit: u32,
}

impl Space {
    /// The free space of a file with clusters of `size` bytes, of which nothing at `end` and behind is in use.
    pub fn new(size: u64, end: HostCluster, limit: HostCluster, zero_tail: bool) -> Space {
        Space {
            size,
            end,
            limit,
            zero_tail,
            clean: Ranges::default(),
            unclean: Ranges::default(),
            leaked: Ranges::default(),
            known: Ranges::default(),
            returning: HashMap::new(),
            scanned: HostCluster(0),
            scan_end: end,
            credit: CREDIT_MAX,
        }
    }

    /// The cluster behind all that are in use.
    pub fn end(&self) -> HostCluster {
        self.end
    }

    /// Clusters of the file that are in use, as far as is known.
    pub fn used(&self) -> u64 {
        self.end
            .0
            .saturating_sub(self.clean.total())
            .saturating_sub(self.unclean.total())
            .saturating_sub(self.leaked.total())
    }

    /// From which cluster on refcounts are to be looked at next, if it is time for that.
    pub fn scan_from(&self) -> Option<HostCluster> {
        let bare = self.clean.is_empty() && self.unclean.is_empty();
        let due = self.credit >= CREDIT_MAX || self.end >= self.limit;
        (bare && due && self.scanned < self.scan_end).then_some(self.scanned)
    }

    /// Where the scan ends.
    pub fn scan_end(&self) -> HostCluster {
        self.scan_end
    }

    /// Refcounts were looked at up to `next`; `free` of them are zero. What such clusters hold stays there until they
    /// are handed out: refcounts that another program has left too low cost no data before there is something to put
    /// there.
    pub fn scan(&mut self, next: HostCluster, free: &[HostCluster]) {
        (self.scanned, self.credit) = (next, 0);
        for &cluster in free {
            if cluster < self.end && !self.known.contains(cluster) {
                self.known.insert(cluster, 1);
                self.unclean.insert(cluster, 1);
            }
        }
    }

    /// Whether a table entry of the file may refer to a cluster: it is not free, or not handed out and its refcount is
    /// wrong. Then it is in use from now on.
    pub fn refer(&mut self, cluster: HostCluster) -> bool {
        if !self.known.contains(cluster) {
            return true;
        }
        let free = self.unclean.contains(cluster);
        if free {
            self.withdraw(cluster, 1);
        }
        free
    }

    /// Whether it is known what is done with a cluster, whatever its refcount says.
    pub fn is_known(&self, cluster: HostCluster) -> bool {
        self.known.contains(cluster)
    }

    /// Whether a cluster is free, and holds what it held before.
    pub fn is_unclean(&self, cluster: HostCluster) -> bool {
        self.unclean.contains(cluster)
    }

    /// Whether a cluster is behind all that seemed to be in use, where the storage may hold anything.
    pub fn is_in_stale_tail(&self, cluster: HostCluster) -> bool {
        !self.zero_tail && cluster >= self.end
    }

    /// The cluster at and behind which nothing of the file can be.
    pub fn file_end(&self) -> HostCluster {
        if self.zero_tail { self.end } else { self.limit }
    }

    /// Sets aside the free ones of these clusters, which are not handed out then: they may be in use.
    pub fn set_aside(&mut self, first: HostCluster, count: u64) {
        let free: Vec<_> = self.clean.within(first, count).chain(self.unclean.within(first, count)).collect();
        for (first, count) in free {
            self.withdraw(first, count);
        }
    }

    /// Free clusters in one piece, at most `max`, to be given to [`Space::take`].
    pub fn peek(&self, max: u64) -> Option<Found> {
        let known = [(&self.clean, true), (&self.unclean, false)];
        for (ranges, clean) in known {
            if let Some((first, count)) = ranges.first() {
                return Some(Found { first, count: count.min(max), clean });
            }
        }
        let count = max.min(self.limit.saturating_sub(self.end));
        (count > 0).then_some(Found { first: self.end, count, clean: self.zero_tail })
    }

    /// At least `count` clusters at the end of the file.
    pub fn peek_end(&self, count: u64) -> Option<HostCluster> {
        (count <= self.limit.saturating_sub(self.end)).then_some(self.end)
    }

    /// Hands clusters out that [`Space::peek`] has named.
    pub fn take(&mut self, first: HostCluster, count: u64) {
        self.withdraw(first, count);
        self.known.insert(first, count);
        self.credit = self.credit.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
    }

    /// Clusters that `peek` has named turn out to be in use.
    pub fn withdraw(&mut self, first: HostCluster, count: u64) {
        self.clean.remove(first, count);
        self.unclean.remove(first, count);
        self.known.remove(first, count);
        let behind = first + count;
        if behind > self.end {
            // What is skipped is free.
            let skipped = first.saturating_sub(self.end);
            self.known.insert(self.end, skipped);
            let free = if self.zero_tail { &mut self.clean } else { &mut self.unclean };
            free.insert(self.end, skipped);
            self.end = behind;
        }
    }

    /// The clusters are in use now.
    pub fn used_now(&mut self, first: HostCluster, count: u64) {
        self.known.remove(first, count);
    }

    /// The clusters hold tables.
    pub fn reserve_for_tables(&mut self, first: HostCluster, count: u64) {
        self.known.insert(first, count);
        self.end = self.end.max(first + count);
        self.scan_end = self.scan_end.max(self.end);
    }

    /// Gives clusters up that durable metadata refers to, and that the disk deallocates at once.
    pub fn free(&mut self, first: HostCluster, count: u64) {
        self.known.insert(first, count);
        self.returning.insert(first, Returning { count, forgotten: false, clean: None });
    }

    /// Clusters that durable metadata still refers to, and that will be leaked when it does not.
    pub fn hold(&mut self, first: HostCluster, count: u64) {
        self.known.insert(first, count);
    }

    /// Clusters that nothing refers to, of unknown content.
    pub fn leaked(&mut self, first: HostCluster, count: u64) {
        self.known.insert(first, count);
        self.leaked.insert(first, count);
    }

    /// The durable metadata no longer refers to the clusters that were freed from `first` on.
    pub fn forgotten(&mut self, first: HostCluster) {
        if let Some(clusters) = self.returning.get_mut(&first) {
            clusters.forgotten = true;
        }
        self.collect(first);
    }

    /// The clusters from `first` on read as zero now, or they do not.
    pub fn released(&mut self, first: HostCluster, clean: bool) {
        if let Some(clusters) = self.returning.get_mut(&first) {
            clusters.clean = Some(clean);
        }
        self.collect(first);
    }

    /// The next leaked clusters. They are free when they have been [`released`](Space::released).
    pub fn next_leaked(&mut self) -> Option<(HostCluster, u64)> {
        let (first, count) = self.leaked.first()?;
        let count = count.min((RECLAIM_BYTES / self.size).max(1));
        self.leaked.remove(first, count);
        self.returning.insert(first, Returning { count, forgotten: true, clean: None });
        Some((first, count))
    }

    /// Frees clusters that have come back.
    fn collect(&mut self, first: HostCluster) {
        let Some(&Returning { count, forgotten: true, clean: Some(clean) }) = self.returning.get(&first) else {
            return;
        };
        self.returning.remove(&first);
        if clean { self.clean.insert(first, count) } else { self.unclean.insert(first, count) }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn space() -> Space {
        Space::new(65536, HostCluster(10), HostCluster(u64::MAX), true)
    }

    #[test]
    fn clusters_freed_come_back_only_when_forgotten_and_released() {
        let mut space = space();
        space.free(HostCluster(3), 2);
        space.released(HostCluster(3), true);
        assert_eq!(space.peek(5), Some(Found { first: HostCluster(10), count: 5, clean: true }));
        space.forgotten(HostCluster(3));
        assert_eq!(space.peek(5), Some(Found { first: HostCluster(3), count: 2, clean: true }));
    }

    #[test]
    fn what_the_scan_finds_keeps_its_content_until_it_is_used() {
        let mut space = space();
        assert_eq!(space.scan_from(), Some(HostCluster(0)));
        space.scan(HostCluster(10), &[HostCluster(4), HostCluster(5), HostCluster(8)]);
        assert_eq!((space.scan_from(), space.next_leaked()), (None, None));
        assert_eq!(space.peek(9), Some(Found { first: HostCluster(4), count: 2, clean: false }));
    }

    #[test]
    fn what_the_scan_finds_is_in_use_when_a_table_says_so_unless_it_was_handed_out() {
        let mut space = space();
        space.scan(HostCluster(10), &[HostCluster(4), HostCluster(5), HostCluster(8)]);
        space.take(HostCluster(4), 1);
        assert!(!space.refer(HostCluster(4)), "another write goes there");
        assert!(space.refer(HostCluster(5)));
        assert_eq!(space.peek(9), Some(Found { first: HostCluster(8), count: 1, clean: false }));
    }

    #[test]
    fn the_scan_leaves_alone_what_is_known() {
        let mut space = space();
        space.reserve_for_tables(HostCluster(1), 1);
        space.free(HostCluster(4), 1);
        space.scan(HostCluster(10), &[HostCluster(1), HostCluster(4), HostCluster(6)]);
        assert_eq!(space.peek(9), Some(Found { first: HostCluster(6), count: 1, clean: false }));
    }

    #[test]
    fn storage_of_a_fixed_size_ends() {
        let mut space = Space::new(65536, HostCluster(10), HostCluster(12), false);
        assert_eq!(space.peek(5), Some(Found { first: HostCluster(10), count: 2, clean: false }));
        space.take(HostCluster(10), 2);
        assert_eq!(space.peek(1), None);
        space.scan(HostCluster(10), &[HostCluster(7)]);
        assert_eq!(space.peek(5), Some(Found { first: HostCluster(7), count: 1, clean: false }));
    }
}
