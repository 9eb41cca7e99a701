//! The options of a disk: what its guest is shown, and what memory it may take.

/// Sizes of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The logical block size that a guest is told, 512 or 4096; the leaf's, where that is larger.
    pub block: u32,
    /// Requests in flight for which room is made at the beginning.
    pub requests: usize,
    /// Changed metadata blocks at which a round begins by itself, so that a guest which never flushes cannot
    /// make them many.
    pub dirty_max: usize,
    /// Bytes of memory that the folded map may take. With the caches of the formats it is to be 32 MiB a disk.
    pub map_bytes: usize,
    /// Bytes of memory for metadata that may be taken, kept or not, until a disk at rest is to give some back. Then it
    /// gives all that it can: what is in many small pieces gives no page back before most of it has gone.
    pub cache_trim_bytes: usize,
    /// Bytes of memory for what is read besides the guest's own while it is in flight: one half for what copy on write
    /// takes over around writes, and what a merge copies; the other for compressed clusters. One operation of each
    /// kind is always under way, however large.
    pub flight_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            block: 512,
            requests: 128,
            dirty_max: 1024,
            map_bytes: 22 << 20,
            cache_trim_bytes: 512 << 10,
            flight_bytes: 16 << 20,
        }
    }
}
