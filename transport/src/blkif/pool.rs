//! The pool of buffers for data between a guest's pages and the storage.
//!
//! It knows nothing about requests. Invariants: a buffer has one user until it is released; the memory kept is bounded,
//! and small while idle.
//!
//! One chunk of memory, the *staging* buffer, exists as long as the server. Data that does not fit goes to chunks of
//! 1 MiB, which exist while there are large requests. These chunks are reported to the engine, which may register them
//! to save the lookup of their pages in each transfer. Data that fits into no chunk gets a buffer of its own.

use std::collections::VecDeque;
use std::sync::Arc;

use disk::size::in_memory;
use memory::{Buffer, PAGE, Segments};

use super::request::SEGMENTS_MAX;
use crate::MemoryChange;

/// The size of the staging buffer: four requests of 64 KiB, or two rings of one page full of small ones. It is kept
/// while the disk is idle.
pub const STAGING_LEN: usize = PAGE * UNITS;

/// The number of units per chunk, one bit each.
const UNITS: usize = 64;
const _: () = assert!(UNITS as u64 == u64::BITS as u64);

/// The unit size of a large chunk, which has room for the largest request.
const LARGE_UNIT: usize = 16 << 10;
const _: () = assert!(LARGE_UNIT * UNITS >= SEGMENTS_MAX as usize * PAGE);

/// The maximum number of large chunks: enough for all data that a disk may have in flight.
const LARGE_MAX: usize = 32;

/// Memory allocated for one request.
pub struct PoolBuffer {
    /// The chunk that contains it.
    location: BufferLocation,
    /// Its first byte in the chunk.
    at: usize,
    len: usize,
    /// Its units of the chunk; zero for a separate buffer.
    units: u64,
}

enum BufferLocation {
    Staging,
    /// In the large chunk with this index.
    Large(u8, Arc<Buffer>),
    Separate(Arc<Buffer>),
}

impl PoolBuffer {
    /// The offset in the chunk.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

/// A chunk that exists while there are large requests.
struct LargeChunk {
    buffer: Arc<Buffer>,
    /// Bitmap of allocated units.
    allocated: u64,
}

/// The buffers of one front end.
pub struct Pool {
    staging: Arc<Buffer>,
    /// Bitmap of allocated pages of the staging buffer.
    staging_pages: u64,
    large: [Option<LargeChunk>; LARGE_MAX],
    /// The number of large chunks.
    large_count: usize,
    /// A large chunk was needed since the last trim.
    large_needed: bool,
    /// Changes not reported to the engine yet.
    changes: VecDeque<MemoryChange>,
    /// The total number of allocated bytes.
    allocated: usize,
}

impl Pool {
    /// A pool with this staging buffer, which must be unused.
    pub fn new(staging: Arc<Buffer>) -> Pool {
        Pool {
            staging,
            staging_pages: 0,
            large: [const { None }; LARGE_MAX],
            large_count: 0,
            large_needed: false,
            changes: VecDeque::new(),
            allocated: 0,
        }
    }

    /// Allocates `len` bytes with undefined contents.
    #[inline(always)]
    pub fn allocate(&mut self, len: usize) -> PoolBuffer {
        let count = units(len, PAGE);
        self.allocated += count * PAGE;
        match run(!self.staging_pages, count) {
            Some((first, units)) => {
                self.staging_pages |= units;
                PoolBuffer { location: BufferLocation::Staging, at: first * PAGE, len, units }
            }
            None => self.allocate_large(len),
        }
    }

    #[inline(never)]
    fn allocate_large(&mut self, len: usize) -> PoolBuffer {
        let count = units(len, LARGE_UNIT);
        self.large_needed = true;
        for (number, place) in (0..).zip(&mut self.large) {
            // Existing chunks are used first: one is created when the others have no room.
            let large = place.get_or_insert_with(|| {
                let buffer = Buffer::zeroed(LARGE_UNIT * UNITS);
                self.changes.push_back(MemoryChange::Comes(buffer.clone()));
                self.large_count += 1;
                LargeChunk { buffer, allocated: 0 }
            });
            if let Some((first, units)) = run(!large.allocated, count) {
                large.allocated |= units;
                let location = BufferLocation::Large(number, large.buffer.clone());
                return PoolBuffer { location, at: first * LARGE_UNIT, len, units };
            }
        }
        PoolBuffer { location: BufferLocation::Separate(Buffer::zeroed(len)), at: 0, len, units: 0 }
    }

    /// Releases a buffer that is no longer used.
    #[inline]
    pub fn release(&mut self, buffer: PoolBuffer) {
        self.allocated -= units(buffer.len, PAGE) * PAGE;
        match buffer.location {
            BufferLocation::Staging => self.staging_pages &= !buffer.units,
            BufferLocation::Large(number, _) => {
                if let Some(Some(large)) = self.large.get_mut(usize::from(number)) {
                    large.allocated &= !buffer.units;
                }
            }
            BufferLocation::Separate(_) => {}
        }
    }

    /// The chunk that contains an allocation.
    #[inline]
    pub fn buffer<'a>(&'a self, buffer: &'a PoolBuffer) -> &'a Arc<Buffer> {
        match &buffer.location {
            BufferLocation::Staging => &self.staging,
            BufferLocation::Large(_, buffer) | BufferLocation::Separate(buffer) => buffer,
        }
    }

    /// The allocation as memory for the disk.
    #[inline]
    pub fn segments(&self, buffer: &PoolBuffer) -> Segments {
        self.buffer(buffer).range(buffer.at, buffer.len)
    }

    /// The total number of allocated bytes.
    pub fn allocated(&self) -> usize {
        self.allocated
    }

    /// The next change of the large chunks that was not reported to the engine yet.
    #[inline]
    pub fn take_change(&mut self) -> Option<MemoryChange> {
        self.changes.pop_front()
    }

    /// Returns true if there are large chunks.
    pub fn has_excess_memory(&self) -> bool {
        self.large_count > 0
    }

    /// Frees unused large chunks, unless one was needed since the last call: creating a chunk and registering it with
    /// the engine cost as much as a hundred requests.
    pub fn trim(&mut self) {
        if !std::mem::take(&mut self.large_needed) {
            self.drop_large(|large| large.allocated == 0);
        }
    }

    /// Drops all large chunks: those still in use are kept alive by their users.
    pub fn release_all(&mut self) {
        self.drop_large(|_| true);
    }

    fn drop_large(&mut self, is_dropped: impl Fn(&LargeChunk) -> bool) {
        for place in &mut self.large {
            if let Some(large) = place.take_if(|large| is_dropped(large)) {
                self.changes.push_back(MemoryChange::Goes(large.buffer));
                self.large_count -= 1;
            }
        }
    }
}

/// The number of units for `len` bytes, at least one.
fn units(len: usize, unit: usize) -> usize {
    len.max(1).div_ceil(unit)
}

/// The first run of `count` set bits: the index of its first bit, and its mask.
#[inline]
fn run(set: u64, count: usize) -> Option<(usize, u64)> {
    if count == 1 {
        // The common case.
        return (set != 0).then(|| (in_memory(set.trailing_zeros().into()), set & set.wrapping_neg()));
    }
    long_run(set, u32::try_from(count).ok().filter(|&count| count <= u64::BITS)?)
}

fn long_run(set: u64, count: u32) -> Option<(usize, u64)> {
    // The bits at which a run of `have` begins; two adjacent runs form one of twice the length.
    let (mut starts, mut have) = (set, 1);
    while have < count {
        let more = have.min(count - have);
        starts &= starts.checked_shr(more)?;
        have += more;
    }
    let first = starts.trailing_zeros();
    let bits = u64::MAX.checked_shr(u64::BITS.saturating_sub(count))?;
    let units = bits.checked_shl(first).filter(|_| starts != 0)?;
    Some((usize::try_from(first).ok()?, units))
}

#[cfg(test)]
mod test {
    use super::*;

    fn pool() -> Pool {
        Pool::new(Buffer::zeroed(STAGING_LEN))
    }

    #[test]
    fn the_first_sufficient_run_is_found() {
        assert_eq!(run(0b0110_1110, 2), Some((1, 0b110)));
        assert_eq!(run(0b0110_1110, 3), Some((1, 0b1110)));
        assert_eq!(run(0b0110_1110, 4), None);
        assert_eq!(run(u64::MAX, 64), Some((0, u64::MAX)));
        assert_eq!(run(u64::MAX << 1, 63), Some((1, u64::MAX << 1)));
        assert_eq!(run(u64::MAX << 1, 64), None);
        assert_eq!(run(u64::MAX, 65), None);
        assert_eq!(run(0, 1), None);
    }

    #[test]
    fn allocations_do_not_overlap() {
        let mut pool = pool();
        let mut seen = std::collections::BTreeSet::new();
        let buffers: Vec<PoolBuffer> =
            [5000, 1, 4096, 70_000, 300_000, 512, 600_000, 1 << 20].map(|len| pool.allocate(len)).into();
        for buffer in &buffers {
            let base = pool.buffer(buffer).base().addr() + buffer.at();
            for page in 0..buffer.len.div_ceil(PAGE) {
                assert!(seen.insert(base + page * PAGE), "{} bytes", buffer.len);
            }
            assert_eq!(pool.segments(buffer).len(), buffer.len);
        }
        buffers.into_iter().for_each(|buffer| pool.release(buffer));
        assert_eq!((pool.allocated(), pool.staging_pages), (0, 0));
    }

    /// The buffers that an engine knows after processing all reported changes.
    fn known(pool: &mut Pool, mut known: Vec<*mut u8>) -> Vec<*mut u8> {
        while let Some(change) = pool.take_change() {
            match change {
                MemoryChange::Comes(buffer) => known.push(buffer.base()),
                MemoryChange::Goes(buffer) => known.retain(|&base| base != buffer.base()),
            }
        }
        known
    }

    #[test]
    fn large_chunks_are_created_on_demand_and_freed_when_unused() {
        let mut pool = pool();
        let small: Vec<PoolBuffer> = (0..64).map(|_| pool.allocate(PAGE)).collect();
        assert!(!pool.has_excess_memory() && pool.take_change().is_none(), "the staging buffer has room");
        let large: Vec<PoolBuffer> = (0..3).map(|_| pool.allocate(1 << 20)).collect();
        let reported = known(&mut pool, Vec::new());
        assert_eq!(reported.len(), 3);
        assert!(large.iter().all(|buffer| reported.contains(&pool.buffer(buffer).base())));
        small.into_iter().chain(large).skip(1).for_each(|buffer| pool.release(buffer));
        let kept = pool.allocate(300_000);
        pool.trim();
        assert!(pool.take_change().is_none(), "a chunk was needed recently");
        pool.trim();
        let reported = known(&mut pool, reported);
        assert_eq!(reported, [pool.buffer(&kept).base()], "one is still in use");
        pool.release(kept);
        pool.trim();
        assert!(!pool.has_excess_memory() && pool.allocated() == PAGE);
        assert!(known(&mut pool, reported).is_empty());
    }

    #[test]
    fn an_allocation_that_fits_no_chunk_gets_a_separate_buffer() {
        let mut pool = pool();
        let buffers: Vec<PoolBuffer> = (0..LARGE_MAX + 1).map(|_| pool.allocate(1 << 20)).collect();
        assert_eq!(buffers.iter().filter(|buffer| matches!(buffer.location, BufferLocation::Separate(_))).count(), 1);
        assert_eq!(known(&mut pool, Vec::new()).len(), LARGE_MAX);
        buffers.into_iter().for_each(|buffer| pool.release(buffer));
        assert_eq!(pool.allocated(), 0);
    }
}
