//! Aligned memory that stands in for memory which the file does not take as it is.
//!
//! Invariants: all bounces together hold a bounded number of bytes for each engine, however many operations need one
//! and however long those are; a bounce is held by one operation at a time, and is read or written here only while the
//! kernel has no request in flight on it; that order is kept by `flight`.

use std::sync::Arc;

use memory::{Buffer, Segments};

/// A larger operation goes through several bounces of this size, one after the other: less than this does not
/// stream, more would let a few unaligned guests hold too much memory.
const BOUNCE_MAX: usize = 1 << 20;

/// Bytes of all bounces beyond which new ones are small. With as many small ones as there are operations in flight that
/// is all there ever is: 32 MiB where there are 256.
const BYTES_MAX: usize = 16 << 20;

/// What the pool keeps, and the size of a small one: enough for a few unaligned requests of ordinary size at once, and
/// no more than 256 KiB of idle memory.
const KEPT_LEN: usize = 64 << 10;
const KEPT_MAX: usize = 4;

/// Memory for bounces: kept for the small, allocated for the large and the many.
#[derive(Default)]
pub(crate) struct BouncePool {
    kept: Vec<Arc<Buffer>>,
    /// Bytes of those that are in use.
    taken: usize,
}

impl BouncePool {
    /// Aligned memory for (the first part of) `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Bounce {
        let most = if self.taken.saturating_add(len.min(BOUNCE_MAX)) <= BYTES_MAX { BOUNCE_MAX } else { KEPT_LEN };
        let len = len.min(most);
        let buffer = match self.kept.pop() {
            Some(buffer) if len <= buffer.capacity() => buffer,
            popped => {
                self.kept.extend(popped);
                Buffer::zeroed(len.max(KEPT_LEN))
            }
        };
        self.taken = self.taken.saturating_add(buffer.capacity());
        Bounce { memory: buffer.segments(len), buffer }
    }

    /// Takes a bounce back that is no longer in use.
    pub(crate) fn give(&mut self, bounce: Bounce) {
        self.taken = self.taken.saturating_sub(bounce.buffer.capacity());
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
    /// The memory, in one part.
    pub(crate) fn memory(&self) -> &Segments {
        &self.memory
    }

    /// Copies `from` in, which is no longer than the bounce.
    pub(crate) fn load(&mut self, from: &Segments) {
        from.copy_to(self.bytes(from.len()));
    }

    /// Copies the first bytes out, as many as `into` has.
    pub(crate) fn unload(&mut self, into: &Segments) {
        into.copy_from(self.bytes(into.len()));
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.memory.len(), "more bytes than bounce");
        // SAFETY: `take` made the memory of one buffer with at least that many initialised bytes. Of the two holders
        // of the buffer, both in this value, only this one makes slices, under a borrow of the value. The kernel is
        // not using it: `flight` calls only before an operation is submitted and after it has completed.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.base(), len) }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_pool_keeps_a_bounded_number_of_small_bounces() {
        let mut pool = BouncePool::default();
        let bounces: Vec<Bounce> = [512; 9].into_iter().chain([BOUNCE_MAX]).map(|len| pool.take(len)).collect();
        for bounce in bounces {
            pool.give(bounce);
        }
        assert_eq!(pool.kept.len(), KEPT_MAX);
        assert!(pool.kept.iter().all(|buffer| buffer.capacity() == KEPT_LEN));
    }

    #[test]
    fn all_bounces_together_are_bounded_and_go_on() {
        let mut pool = BouncePool::default();
        let bounces: Vec<Bounce> = (0..256).map(|_| pool.take(BOUNCE_MAX)).collect();
        let held: usize = bounces.iter().map(|bounce| bounce.buffer.capacity()).sum();
        assert!(held <= BYTES_MAX + 256 * KEPT_LEN, "{held} bytes");
        assert!(bounces.iter().all(|bounce| bounce.memory().len() >= KEPT_LEN), "none goes on without memory");
        bounces.into_iter().for_each(|bounce| pool.give(bounce));
        assert_eq!(pool.taken, 0);
        assert_eq!(pool.take(BOUNCE_MAX).memory().len(), BOUNCE_MAX);
    }

    #[test]
    fn a_bounce_is_never_larger_than_its_bound() {
        let mut pool = BouncePool::default();
        assert_eq!(pool.take(BOUNCE_MAX + 1).memory().len(), BOUNCE_MAX);
        assert_eq!(pool.take(700).memory().len(), 700);
    }
}
