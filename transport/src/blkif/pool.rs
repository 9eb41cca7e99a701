//! Memory that data pass through between a guest's pages and the storage.
//!
//! Knows nothing of requests. Invariants: a buffer that is given out is nobody else's; those that are kept are bounded, and
//! few while nothing happens.

use std::sync::Arc;

use memory::{Buffer, PAGE};

/// Sizes: 1, 2, 4, … 256 pages, the last for the largest request.
const CLASSES: usize = 9;

/// Bytes that are kept for the next requests: those of a ring that is full of small ones, or of a few large ones.
const KEPT: usize = 4 << 20;

/// Bytes that are kept when the disk is idle.
const KEPT_IDLE: usize = 128 << 10;

/// Buffers by size.
#[derive(Default)]
pub struct Pool {
    free: [Vec<Arc<Buffer>>; CLASSES],
    /// Bytes of those.
    kept: usize,
    /// Bytes given out.
    lent: usize,
}

impl Pool {
    /// A buffer of at least so many bytes; what is in it is of no meaning.
    pub fn lend(&mut self, len: usize) -> Arc<Buffer> {
        let buffer = self.free.get_mut(class(len)).and_then(Vec::pop);
        self.kept = self.kept.saturating_sub(buffer.as_ref().map_or(0, |buffer| buffer.capacity()));
        let buffer = buffer.unwrap_or_else(|| Buffer::zeroed(len.max(1).next_power_of_two()));
        self.lent = self.lent.saturating_add(buffer.capacity());
        buffer
    }

    /// Takes one back.
    pub fn give_back(&mut self, buffer: Arc<Buffer>) {
        let len = buffer.capacity();
        self.lent = self.lent.saturating_sub(len);
        // Something may still hold it: then it is nobody's but theirs.
        if self.kept.saturating_add(len) > KEPT || Arc::strong_count(&buffer) > 1 {
            return;
        }
        if let Some(free) = self.free.get_mut(class(len)) {
            self.kept = self.kept.saturating_add(len);
            free.push(buffer);
        }
    }

    /// Bytes given out.
    pub fn lent(&self) -> usize {
        self.lent
    }

    /// The disk is idle: the large ones go.
    pub fn trim(&mut self) {
        for free in self.free.iter_mut().rev() {
            while self.kept > KEPT_IDLE {
                let Some(buffer) = free.pop() else { break };
                self.kept = self.kept.saturating_sub(buffer.capacity());
            }
        }
    }
}

fn class(len: usize) -> usize {
    let pages = len.max(1).div_ceil(PAGE).next_power_of_two();
    usize::try_from(pages.trailing_zeros()).unwrap_or(CLASSES)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_when_nobody_holds_it() {
        let mut pool = Pool::default();
        let first = pool.lend(5000);
        let (base, held) = (first.base(), first.clone());
        assert_eq!((first.capacity(), pool.lent()), (8192, 8192));
        pool.give_back(first);
        assert_ne!(pool.lend(8192).base(), base, "somebody held it");
        drop(held);
        let second = pool.lend(4097);
        let base = second.base();
        pool.give_back(second);
        assert_eq!(pool.lend(8000).base(), base);
    }

    #[test]
    fn an_idle_disk_keeps_little() {
        let mut pool = Pool::default();
        let lent: Vec<_> = (0..8).map(|_| pool.lend(1 << 20)).collect();
        lent.into_iter().for_each(|buffer| pool.give_back(buffer));
        assert_eq!((pool.kept, pool.lent()), (KEPT, 0));
        pool.trim();
        assert!(pool.kept <= KEPT_IDLE);
    }
}
