//! Aligned bounce buffers for memory that the file's alignment does not admit.
//!
//! Invariants: all bounce buffers of an engine together hold a bounded number of bytes, however many operations need
//! one and however long those are. A bounce buffer belongs to one operation at a time, and is read or written here only
//! while the kernel has no request in flight on it; `flight` keeps that order.

use std::sync::Arc;

use memory::{Buffer, Segments};

/// A larger operation goes through several bounce buffers of this size, one after the other: smaller ones would not
/// stream, larger ones would let a few unaligned guests hold too much memory.
const BOUNCE_MAX: usize = 1 << 20;

/// Once this many bytes of bounce buffers are in use, new ones are small. Small ones are bounded by the number of
/// operations in flight, so the total is at most 32 MiB at a depth of 256.
const BYTES_MAX: usize = 16 << 20;

/// The size of a small buffer, and the number of free ones that the pool keeps: enough for a few unaligned requests of
/// ordinary size at once, and at most 256 KiB of idle memory.
const KEPT_LEN: usize = 64 << 10;
const KEPT_MAX: usize = 4;

/// A pool of bounce buffers: small ones are kept, large or excess ones are allocated.
#[derive(Default)]
pub(crate) struct BouncePool {
    kept: Vec<Arc<Buffer>>,
    /// Total size of the buffers in use.
    in_use: usize,
}

impl BouncePool {
    /// Aligned memory for `len` bytes, or for the first part of them.
    pub(crate) fn take(&mut self, len: usize) -> Bounce {
        let max = if self.in_use + len.min(BOUNCE_MAX) <= BYTES_MAX { BOUNCE_MAX } else { KEPT_LEN };
        let len = len.min(max);
        let buffer = match self.kept.pop() {
            Some(buffer) if len <= buffer.capacity() => buffer,
            popped => {
                self.kept.extend(popped);
                Buffer::zeroed(len.max(KEPT_LEN))
            }
        };
        self.in_use += buffer.capacity();
        Bounce { memory: buffer.segments(len), buffer }
    }

    /// Takes back a bounce buffer that is no longer in use.
    pub(crate) fn give(&mut self, bounce: Bounce) {
        self.in_use -= bounce.buffer.capacity();
        if bounce.buffer.capacity() == KEPT_LEN && self.kept.len() < KEPT_MAX {
            self.kept.push(bounce.buffer);
        }
    }
}

/// Aligned memory in use by one operation.
pub(crate) struct Bounce {
    buffer: Arc<Buffer>,
    memory: Segments,
}

impl Bounce {
    /// The memory, as one segment.
    pub(crate) fn memory(&self) -> &Segments {
        &self.memory
    }

    /// Copies in `from`, which is no longer than the bounce buffer.
    pub(crate) fn load(&mut self, from: &Segments) {
        from.copy_to(self.bytes(from.len()));
    }

    /// Copies out the first bytes, as many as `into` holds.
    pub(crate) fn unload(&mut self, into: &Segments) {
        into.copy_from(self.bytes(into.len()));
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.memory.len(), "larger than the bounce buffer");
        // SAFETY: `take` allocated one buffer with at least that many initialised bytes. Of the two handles of the
        // buffer, both in this value, only this one makes slices, under a borrow of the value. The kernel is not using
        // it: `flight` calls this only before an operation is submitted and after it has completed.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.base(), len) }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_pool_keeps_a_bounded_number_of_small_buffers() {
        let mut pool = BouncePool::default();
        let bounces: Vec<Bounce> = [512; 9].into_iter().chain([BOUNCE_MAX]).map(|len| pool.take(len)).collect();
        for bounce in bounces {
            pool.give(bounce);
        }
        assert_eq!(pool.kept.len(), KEPT_MAX);
        assert!(pool.kept.iter().all(|buffer| buffer.capacity() == KEPT_LEN));
    }

    #[test]
    fn total_bounce_memory_is_bounded_and_every_request_gets_some() {
        let mut pool = BouncePool::default();
        let bounces: Vec<Bounce> = (0..256).map(|_| pool.take(BOUNCE_MAX)).collect();
        let held: usize = bounces.iter().map(|bounce| bounce.buffer.capacity()).sum();
        assert!(held <= BYTES_MAX + 256 * KEPT_LEN, "{held} bytes");
        assert!(bounces.iter().all(|bounce| bounce.memory().len() >= KEPT_LEN), "a bounce buffer is too small");
        bounces.into_iter().for_each(|bounce| pool.give(bounce));
        assert_eq!(pool.in_use, 0);
        assert_eq!(pool.take(BOUNCE_MAX).memory().len(), BOUNCE_MAX);
    }

    #[test]
    fn a_bounce_is_never_larger_than_its_bound() {
        let mut pool = BouncePool::default();
        assert_eq!(pool.take(BOUNCE_MAX + 1).memory().len(), BOUNCE_MAX);
        assert_eq!(pool.take(700).memory().len(), 700);
    }
}
