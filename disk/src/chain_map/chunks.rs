//! The known chunks by number: little memory for a disk of which little is known.
//!
//! Knows nothing of what may be forgotten, nor when. Keeps: [`Chunks::bytes`] is the memory it takes, the allocator's
//! share included.

use std::cell::Cell;

use super::runs::{Compact, Runs};
use crate::size::{in_memory, on_disk};

/// Chunks in a region: as many as there are bits in a word.
const REGION: u64 = 64;
/// Regions in a table, for 8 GiB of disk.
const TABLE: u32 = 64;
/// The allocator's overhead for an allocation: its own word and the rounding.
const ALLOCATOR: usize = 16;
/// Chunks by which a region grows. Few, since of a large disk little is known, and most of this is unused.
const ROOM: usize = 4;

/// The known locations of a chunk.
#[derive(Debug)]
pub enum Chunk {
    /// All of it lives in one place.
    Whole(Compact),
    /// In runs, ascending and without gaps.
    Mixed(Runs),
}

const _: () = assert!(size_of::<Chunk>() == 16, "a chunk is two words");

impl Chunk {
    fn bytes(&self) -> usize {
        match self {
            Chunk::Whole(_) => 0,
            Chunk::Mixed(runs) => with_allocator(runs.bytes()),
        }
    }
}

/// 128 MiB of disk.
#[derive(Debug, Default)]
struct Region {
    /// Which chunks are known.
    known: u64,
    /// The known chunks that were used since [`Chunks::take_used`] last cleared their bit.
    used: Cell<u64>,
    /// The known ones, ascending.
    chunks: Vec<Chunk>,
}

impl Region {
    /// Where among the known chunks this one is or would be.
    fn rank(&self, bit: u64) -> usize {
        let below = self.known & bit.wrapping_sub(1);
        in_memory(below.count_ones().into())
    }

    fn bytes(&self) -> usize {
        with_allocator(self.chunks.capacity() * size_of::<Chunk>())
    }
}

#[derive(Debug)]
struct Table {
    /// Known chunks in all regions.
    known: usize,
    regions: [Region; TABLE as usize],
}

const TABLE_BYTES: usize = size_of::<Table>() + ALLOCATOR;

/// The chunks of a disk.
#[derive(Debug)]
pub struct Chunks {
    tables: Vec<Option<Box<Table>>>,
    /// Bytes of memory below the tables.
    bytes: usize,
}

impl Chunks {
    /// The number of chunks whose table pointers fit in this many bytes.
    pub fn within(bytes: usize) -> u64 {
        on_disk(bytes / size_of::<Option<Box<Table>>>()) * REGION * u64::from(TABLE)
    }

    /// A map of `count` chunks, none of them known.
    pub fn new(count: u64) -> Chunks {
        let mut chunks = Chunks { tables: Vec::new(), bytes: 0 };
        chunks.grow(count);
        chunks
    }

    /// Grows the map to `count` chunks.
    pub fn grow(&mut self, count: u64) {
        let (tables, ..) = place(count.saturating_sub(1));
        let more = tables + 1 - self.tables.len();
        self.tables.reserve_exact(more);
        self.tables.resize_with(self.tables.len() + more, || None);
    }

    /// A chunk, if it is known. It counts as used.
    pub fn get(&self, chunk: u64) -> Option<&Chunk> {
        let (table, region, bit) = place(chunk);
        let region = self.tables.get(table)?.as_ref()?.regions.get(region)?;
        if region.known & bit == 0 {
            return None;
        }
        region.used.set(region.used.get() | bit);
        region.chunks.get(region.rank(bit))
    }

    /// The same, mutably. Its size must stay as it is.
    pub fn get_mut(&mut self, chunk: u64) -> Option<&mut Chunk> {
        let (region, bit) = self.region_mut(chunk)?;
        let rank = region.rank(bit);
        region.chunks.get_mut(rank)
    }

    /// Returns whether a chunk was used since the last call for it, and clears that mark.
    pub fn take_used(&self, chunk: u64) -> bool {
        let (table, region, bit) = place(chunk);
        let region = self.tables.get(table).and_then(Option::as_ref).and_then(|table| table.regions.get(region));
        region.is_some_and(|region| region.used.replace(region.used.get() & !bit) & bit != 0)
    }

    /// Inserts a chunk. Returns whether it was unknown; then it does not count as used yet.
    pub fn insert(&mut self, chunk: u64, new: Chunk) -> bool {
        let (table, region, bit) = place(chunk);
        let Some(table) = self.tables.get_mut(table) else { return false };
        if table.is_none() {
            self.bytes += TABLE_BYTES;
        }
        let table = table
            .get_or_insert_with(|| Box::new(Table { known: 0, regions: std::array::from_fn(|_| Region::default()) }));
        let Some(region) = table.regions.get_mut(region) else { return false };
        self.bytes += new.bytes();
        let rank = region.rank(bit);
        if region.known & bit != 0 {
            if let Some(old) = region.chunks.get_mut(rank) {
                self.bytes -= old.bytes();
                *old = new;
            }
            return false;
        }
        let before = region.bytes();
        if region.chunks.len() == region.chunks.capacity() {
            region.chunks.reserve_exact(ROOM);
        }
        region.chunks.insert(rank, new);
        region.known |= bit;
        region.used.set(region.used.get() & !bit);
        table.known += 1;
        self.bytes = self.bytes + region.bytes() - before;
        true
    }

    /// Forgets a chunk.
    pub fn remove(&mut self, chunk: u64) {
        let Some((region, bit)) = self.region_mut(chunk) else { return };
        let rank = region.rank(bit);
        let before = region.bytes();
        let old = region.chunks.remove(rank);
        region.known &= !bit;
        if region.chunks.capacity() - region.chunks.len() >= 2 * ROOM {
            region.chunks.shrink_to(region.chunks.len() + ROOM);
        }
        if region.chunks.is_empty() {
            region.chunks = Vec::new();
        }
        let freed = before - region.bytes() + old.bytes();
        self.bytes -= freed;
        self.leave_table(chunk);
    }

    /// Counts one known chunk less in a table, and drops a table without any.
    fn leave_table(&mut self, chunk: u64) {
        let Some(place) = self.tables.get_mut(place(chunk).0) else { return };
        if let Some(table) = place.as_mut() {
            table.known -= 1;
            if table.known == 0 {
                *place = None;
                self.bytes -= TABLE_BYTES;
            }
        }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let names = self.tables.capacity() * size_of::<Option<Box<Table>>>();
        self.bytes + with_allocator(names)
    }

    /// The region of a known chunk, and the chunk's bit there.
    fn region_mut(&mut self, chunk: u64) -> Option<(&mut Region, u64)> {
        let (table, region, bit) = place(chunk);
        let region = self.tables.get_mut(table)?.as_mut()?.regions.get_mut(region)?;
        (region.known & bit != 0).then_some((region, bit))
    }

    /// The sum that `bytes` keeps up to date, computed from scratch.
    #[cfg(test)]
    pub fn counted(&self) -> usize {
        let regions = |table: &Table| table.regions.iter().map(Region::bytes).sum::<usize>();
        let runs =
            |table: &Table| table.regions.iter().flat_map(|region| &region.chunks).map(Chunk::bytes).sum::<usize>();
        let tables = self.tables.iter().flatten().map(|table| TABLE_BYTES + regions(table) + runs(table));
        tables.sum::<usize>() + with_allocator(self.tables.capacity() * 8)
    }
}

/// The table of a chunk, the region there, and the bit there.
fn place(chunk: u64) -> (usize, usize, u64) {
    let region = chunk / REGION;
    let (table, region) = (region / u64::from(TABLE), region % u64::from(TABLE));
    (in_memory(table), in_memory(region), 1 << (chunk % REGION))
}

/// Memory taken by an allocation of this many bytes, with the allocator's overhead; zero for no bytes.
fn with_allocator(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { bytes + ALLOCATOR }
}
