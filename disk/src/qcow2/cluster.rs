//! The numbers of clusters: of those that the file is made of, and of those that the disk is.
//!
//! Knows nothing of which is where. The specification calls them host clusters and guest clusters.

use std::ops::Range;

use crate::offset::number;
use crate::{DiskOffset, FileOffset};

number! {
    /// A cluster of the file.
    HostCluster(u64)
}

number! {
    /// A cluster of the disk.
    GuestCluster(u64)
}

impl HostCluster {
    /// The cluster of 2^`bits` bytes around an offset.
    #[inline(always)]
    pub fn of(at: FileOffset, bits: u32) -> HostCluster {
        HostCluster(at.0 >> bits)
    }

    /// Where it begins.
    #[inline(always)]
    pub fn start(self, bits: u32) -> FileOffset {
        FileOffset(self.0 << bits)
    }

    /// This one and those behind it, `count` in all.
    pub fn run(self, count: u64) -> impl Iterator<Item = HostCluster> + Clone + use<> {
        (self.0..self.0 + count).map(HostCluster)
    }
}

impl GuestCluster {
    /// The cluster of 2^`bits` bytes around an offset.
    #[inline(always)]
    pub fn of(at: DiskOffset, bits: u32) -> GuestCluster {
        GuestCluster(at.0 >> bits)
    }

    /// Where it begins.
    #[inline(always)]
    pub fn start(self, bits: u32) -> DiskOffset {
        DiskOffset(self.0 << bits)
    }
}

/// The clusters of a range, one by one.
pub fn run(range: Range<HostCluster>) -> impl Iterator<Item = HostCluster> + Clone {
    (range.start.0..range.end.0).map(HostCluster)
}
