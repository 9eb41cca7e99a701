//! The options of a disk: what its guest sees, and how much memory it may take.

/// Sizes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The logical block size that the guest sees, 512 or 4096; the leaf's, where that is larger.
    pub block: u32,
    /// Requests in flight for which memory is allocated at the beginning; not a limit.
    pub requests: usize,
    /// Changed metadata blocks at which a round begins by itself, so that a guest that never flushes cannot accumulate
    /// many.
    pub dirty_max: usize,
    /// Bytes of memory for the chain map. With the caches of the formats a disk is to stay at 32 MiB.
    pub map_bytes: usize,
    /// Bytes of metadata cached, still or not, at which an idle disk drops its caches. It drops all it can: memory in
    /// many small pieces frees no page before most of it is gone.
    pub trim_bytes: usize,
    /// Bytes of memory for what is read in flight besides the guest's own data: one half for copy on write and merges,
    /// the other for compressed clusters. One operation of each kind always runs, however large.
    pub flight_bytes: u64,
    /// Regions that may have an intent in the map of changed blocks. After a crash these count as changed throughout.
    pub intents: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            block: 512,
            requests: 128,
            dirty_max: 1024,
            map_bytes: 22 << 20,
            trim_bytes: 512 << 10,
            flight_bytes: 16 << 20,
            intents: 1024,
        }
    }
}
