//! Digests of a few blocks of the export, to recognize it on the next connection: NBD has no identity of a disk.
//!
//! It knows nothing about requests. Invariants: a block is compared only if the server must still have its contents: no
//! write of ours to it was sent since, and, if we write at all, a flush that was sent after they were seen has been
//! answered. So a server that has lost unflushed writes, ours or of other clients, is never mistaken for another
//! one. A block of zeroes is no evidence, and is left out.

use std::hash::{DefaultHasher, Hasher};

use memory::Segments;
use memory::size::{in_memory, on_disk};

/// Maximum number of blocks.
const BLOCKS: u64 = 64;
/// The size of a block.
const BLOCK: u64 = 4096;

#[derive(Clone, Copy, Debug)]
struct Entry {
    at: u64,
    digest: u64,
    /// In the order in which the contents were seen.
    number: u64,
    /// A flush covers it, or nothing is ever written.
    trusted: bool,
}

/// The sample. The first trusted block of a slot stays until it is written to.
#[derive(Debug)]
pub(super) struct Sample {
    slots: Vec<Option<Entry>>,
    next: u64,
    /// We may write to the export.
    write: bool,
    /// The size of a block; smaller in tests.
    pub(super) block: u64,
}

impl Sample {
    pub(super) fn new(write: bool) -> Sample {
        Sample { slots: Vec::new(), next: 0, write, block: BLOCK }
    }

    /// The server has sent these bytes of a range, or has answered their write. Never the memory of a request: its
    /// owner may change that at any time.
    pub(super) fn seen(&mut self, at: u64, bytes: &[u8]) {
        let Some((at, start, slot)) = self.place(at, on_disk(bytes.len())) else { return };
        if let Some(block) = bytes.get(start..start + in_memory(self.block)) {
            self.put(at, slot, block);
        }
    }

    /// The first whole block in a range if its slot has room: its offset, where it begins in the range, and its slot.
    fn place(&mut self, at: u64, len: u64) -> Option<(u64, usize, usize)> {
        let first = at.next_multiple_of(self.block);
        if first + self.block > at + len {
            return None;
        }
        if self.slots.is_empty() {
            self.slots.resize(in_memory(BLOCKS), None);
        }
        // Fibonacci hashing: disks are read and written at multiples of powers of two.
        let slot = in_memory((first / self.block).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58);
        let free = self.slots.get(slot)?.is_none_or(|entry| !entry.trusted && entry.at != first);
        free.then_some((first, in_memory(first - at), slot))
    }

    fn put(&mut self, at: u64, slot: usize, bytes: &[u8]) {
        if bytes.iter().all(|&byte| byte == 0) {
            return;
        }
        let entry = Entry { at, digest: digest(bytes), number: self.next, trusted: !self.write };
        self.next += 1;
        if let Some(place) = self.slots.get_mut(slot) {
            *place = Some(entry);
        }
    }

    /// A write to a range is sent: from now on the server may have either contents.
    pub(super) fn forget(&mut self, at: u64, len: u64) {
        let block = self.block;
        let overlaps = |entry: &Entry| entry.at < at + len && at < entry.at + block;
        for slot in &mut self.slots {
            slot.take_if(|entry| overlaps(entry));
        }
    }

    /// The number from which a flush that is sent now covers no more.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// A flush was answered.
    pub(super) fn flushed(&mut self, covers: u64) {
        self.slots.iter_mut().flatten().for_each(|entry| entry.trusted |= entry.number < covers);
    }

    /// The connection was lost: what no flush covers may be lost too. With `all`, which is a bug, it stays.
    pub(super) fn lost(&mut self, all: bool) {
        for slot in &mut self.slots {
            slot.take_if(|entry| !entry.trusted && !all);
        }
    }

    /// The blocks to compare: offset and length.
    pub(super) fn blocks(&self) -> Vec<(u64, u64)> {
        self.slots.iter().flatten().map(|entry| (entry.at, self.block)).collect()
    }

    /// Returns true if the block at this offset has the contents as before.
    pub(super) fn is_same(&self, at: u64, memory: &Segments) -> bool {
        let mut bytes = vec![0; memory.len()];
        memory.copy_to(&mut bytes);
        self.slots.iter().flatten().filter(|entry| entry.at == at).all(|entry| entry.digest == digest(&bytes))
    }
}

/// Differences by accident are to be found, not forgeries: a server that lies can lie in each reply.
fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}
