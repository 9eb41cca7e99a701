//! Aligned memory that stands in for memory which the file does not take as it is.
//!
//! Invariant: a bounce is held by one operation at a time, and is read or written here only while the kernel has
//! no request in flight on it; that order is kept by `flight`.

use std::sync::Arc;

use memory::{Buffer, Segments};

/// A larger operation goes through several bounces of this size, one after the other: less than this does not
/// stream, more would let a few unaligned guests hold too much memory.
const BOUNCE_MAX: usize = 1 << 20;

/// What the pool keeps: enough for a few unaligned requests of ordinary size at once, and no more than 256 KiB
/// of idle memory.
const KEPT_LEN: usize = 64 << 10;
const KEPT_MAX: usize = 4;

/// Memory for bounces: kept for the small, allocated for the large and the many.
#[derive(Default)]
pub(crate) struct BouncePool {
    kept: Vec<Arc<Buffer>>,
}

impl BouncePool {
    /// Aligned memory for (the first part of) `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Bounce {
        let len = len.min(BOUNCE_MAX);
        let buffer = match self.kept.pop() {
            Some(buffer) if len <= buffer.capacity() => buffer,
            popped => {
                self.kept.extend(popped);
                Buffer::zeroed(len.max(KEPT_LEN))
            }
        };
        Bounce { memory: buffer.segments(len), buffer }
    }

    /// Takes a bounce back that is no longer in use.
    pub(crate) fn give(&mut self, bounce: Bounce) {
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
    fn a_bounce_is_never_larger_than_its_bound() {
        let mut pool = BouncePool::default();
        assert_eq!(pool.take(BOUNCE_MAX + 1).memory().len(), BOUNCE_MAX);
        assert_eq!(pool.take(700).memory().len(), 700);
    }
}
