//! The chain map: all layers of a chain in one map, so that a lookup does not walk the chain.
//!
//! The map is loaded a chunk at a time, when a chunk is first looked up, and updated by every change of a layer. It may
//! forget: a chunk that is not known is loaded again. Keeps: it never takes more memory than its budget, whatever the
//! disk's size and the chain's shape.
//!
//! **What is forgotten.** When the map is too large, chunks are drawn at random. One that was used since it was last
//! drawn stays (a second chance), any other goes. So what is used often stays. Of a working set larger than the budget,
//! the map finds as large a part as fits, if it is read at random. Read round and round, it finds a smaller part, where
//! forgetting the oldest first would find nothing as soon as one chunk is too many. Each insertion frees only as much
//! as it needs, which takes microseconds.
//!
//! **What the default budget holds**: 1,000,000 chunks that live in one place each, which is 2 TiB of a disk written in
//! sequence (22 bytes each); or 270 GiB with a run for every 64 KiB; or 20 GiB with one for every 4 KiB, the worst that
//! guests do, half as much where its files are longer than 256 GiB.

mod chunks;
mod location;
mod runs;
mod units;

use fastrand::Rng;

use chunks::{Chunk, Chunks};
pub use location::{CHUNK, Location, Run, append};
use runs::{Compact, Runs, overlaid};

use crate::{DiskOffset, Span};

/// Chunks drawn to find an unused one. After that the last one goes, since one insertion must not take long.
const DRAWN_MAX: u32 = 16;
/// Entries by which the list of what is known grows.
const ROOM: usize = 4096;
/// Of the budget, the part that may go to naming tables: for disks beyond petabytes, whose end is then not kept.
const NAMES_PART: usize = 8;

/// The folded map.
#[derive(Debug)]
pub struct ChainMap {
    chunks: Chunks,
    /// The numbers of the known chunks, in no order.
    known: Vec<u32>,
    /// Chunks behind these are never kept.
    covered: u64,
    /// Length of the disk.
    end: u64,
    /// Bytes of memory.
    budget: usize,
    /// Draws the entries to evict. Predicting them gains an attacker nothing.
    random: Rng,
}

impl ChainMap {
    /// A map of a disk of `len` bytes of which nothing is known, that takes no more than `budget` bytes.
    pub fn new(len: u64, budget: usize) -> ChainMap {
        let most = Chunks::within(budget / NAMES_PART).min(u64::from(u32::MAX));
        let covered = len.div_ceil(CHUNK).min(most);
        let random = Rng::with_seed(1);
        ChainMap { chunks: Chunks::new(covered), known: Vec::new(), covered, end: len, budget, random }
    }

    /// Grows the disk to `len` bytes. Its last chunk is forgotten: there is more of it.
    pub fn grow(&mut self, len: u64) {
        if let Some(end) = self.end.checked_sub(1) {
            self.forget(DiskOffset(end));
        }
        let most = Chunks::within(self.budget / NAMES_PART).min(u64::from(u32::MAX));
        self.covered = len.div_ceil(CHUNK).min(most).max(self.covered);
        self.chunks.grow(self.covered);
        self.end = self.end.max(len);
        self.make_room();
    }

    /// Forgets the chunk around a byte.
    pub fn forget(&mut self, at: DiskOffset) {
        if self.chunks.get(at / CHUNK).is_some() {
            self.put(at, Chunk::Mixed(Runs::unknown()));
        }
    }

    /// Forgets all chunks and frees their memory.
    pub fn clear(&mut self) {
        self.chunks = Chunks::new(self.covered);
        self.known = Vec::new();
    }

    /// The chunk around a byte.
    pub fn chunk_of(at: DiskOffset) -> Span {
        Span { at: at.align_down(CHUNK), len: CHUNK }
    }

    /// Where byte `at` lives, and how many bytes from there on live in the same run. `None`: not known.
    pub fn lookup(&self, at: DiskOffset) -> Option<(Location, u64)> {
        let within = at % CHUNK;
        match self.chunks.get(at / CHUNK)? {
            Chunk::Whole(place) => Some((place.place().advanced(within), CHUNK - within)),
            Chunk::Mixed(runs) => runs.lookup(within),
        }
    }

    /// Inserts a whole chunk: `runs` ascend without gaps and cover it up to its end, or up to the end of the disk.
    pub fn insert(&mut self, chunk: Span, runs: &[Run]) {
        let new = match runs {
            [one] => Chunk::Whole(Compact::of(one.place)),
            _ => Chunk::Mixed(Runs::pack(chunk.at, runs)),
        };
        self.put(chunk.at, new);
    }

    /// The bytes of `span` live at `place` now.
    pub fn overlay(&mut self, span: Span, place: Location) {
        let mut at = span.at;
        while at < span.end() {
            let chunk = ChainMap::chunk_of(at);
            let Some(part) = chunk.intersection(span) else { unreachable!("{at} is in {span:?} and in its chunk") };
            let part_place = place.advanced(part.at - span.at);
            self.overlay_chunk(chunk, Run { span: part, place: part_place });
            at = chunk.end();
        }
    }

    /// Bytes of memory that the map takes.
    pub fn bytes(&self) -> usize {
        self.chunks.bytes() + self.known.capacity() * size_of::<u32>()
    }

    fn overlay_chunk(&mut self, chunk: Span, new: Run) {
        let within = new.span.at - chunk.at;
        let old = match self.chunks.get_mut(chunk.at / CHUNK) {
            None => return,
            Some(Chunk::Mixed(runs)) if runs.is_unknown() => return,
            _ if new.span == chunk => Vec::new(),
            Some(Chunk::Whole(place)) => vec![Run { span: chunk, place: place.place() }],
            Some(Chunk::Mixed(runs)) => {
                if runs.overlay(within, new.span.len, new.place) {
                    return;
                }
                runs.unpack(chunk.at)
            }
        };
        self.insert(chunk, &overlaid(&old, new));
    }

    fn put(&mut self, at: DiskOffset, new: Chunk) {
        let chunk = at / CHUNK;
        if chunk >= self.covered {
            return;
        }
        if self.chunks.insert(chunk, new) {
            if self.known.len() == self.known.capacity() {
                self.known.reserve_exact(ROOM);
            }
            let Ok(chunk) = u32::try_from(chunk) else { unreachable!("chunk {chunk} is behind what is covered") };
            self.known.push(chunk);
        }
        self.make_room();
    }

    /// Forgets until the map fits its budget.
    fn make_room(&mut self) {
        while self.bytes() > self.budget && !self.known.is_empty() {
            let drawn = self.draw_forgotten();
            if let Some(&chunk) = self.known.get(drawn) {
                self.chunks.remove(u64::from(chunk));
                self.known.swap_remove(drawn);
            }
        }
    }

    /// Which of the known chunks, of which there is one, is to go.
    fn draw_forgotten(&mut self) -> usize {
        let mut drawn = 0;
        for _ in 0..DRAWN_MAX {
            drawn = self.random.usize(..self.known.len());
            if !self.known.get(drawn).is_some_and(|&chunk| self.chunks.take_used(u64::from(chunk))) {
                break;
            }
        }
        drawn
    }
}

#[cfg(test)]
mod test;
