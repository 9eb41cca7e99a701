//! Memory that data pass through between a guest's pages and the storage.
//!
//! Knows nothing of requests. Invariants: bytes that are lent are nobody else's until they are given back; what is kept is
//! bounded, and little while nothing happens.
//!
//! One piece of memory, the *staging*, is there for as long as the server is: an engine may have it registered, and then
//! spares itself looking up its pages each time. What it has no room for gets a buffer of its own.

use std::sync::Arc;

use memory::{Buffer, PAGE, Segments};

/// Pages of the staging, one bit each: four requests of 64 KiB, or two rings of a page full of small ones. It stays while the
/// disk is idle.
const STAGED: u32 = u64::BITS;

/// Bytes of the staging.
pub const STAGING_LEN: usize = PAGE * 64;
const _: () = assert!(STAGED == 64);

/// Sizes of buffers of their own: 1, 2, 4, … 256 pages, the last for the largest request.
const CLASSES: usize = 9;

/// Bytes of such buffers that are kept for the next requests: those of a few large ones.
const KEPT: usize = 4 << 20;

/// Bytes of those that are kept when the disk is idle.
const KEPT_IDLE: usize = 128 << 10;

/// Memory that is lent for one request.
pub struct Loan {
    /// A buffer of its own; none where it lies in the staging.
    own: Option<Arc<Buffer>>,
    /// The first byte of it.
    at: usize,
    len: usize,
    /// Its pages of the staging; none of a buffer of its own.
    pages: u64,
    /// What it takes of the bounds: whole pages.
    taken: usize,
}

impl Loan {
    /// The first byte in the buffer.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Bytes lent.
    pub fn len(&self) -> usize {
        self.len
    }
}

/// What is there to be lent.
pub struct Pool {
    staging: Arc<Buffer>,
    /// Pages of the staging that are lent.
    lent_pages: u64,
    /// Buffers of their own, by size.
    free: [Vec<Arc<Buffer>>; CLASSES],
    /// Bytes of those.
    kept: usize,
    /// Bytes lent.
    lent: usize,
}

impl Pool {
    /// A pool over this staging, nothing of which is in use.
    pub fn new(staging: Arc<Buffer>) -> Pool {
        Pool { staging, lent_pages: 0, free: Default::default(), kept: 0, lent: 0 }
    }

    /// So many bytes; what is in them is of no meaning.
    #[inline(always)]
    pub fn lend(&mut self, len: usize) -> Loan {
        let count = pages(len);
        let taken = count.saturating_mul(PAGE);
        self.lent = self.lent.saturating_add(taken);
        match run(!self.lent_pages, count) {
            Some((first, pages)) => {
                self.lent_pages |= pages;
                Loan { own: None, at: first.saturating_mul(PAGE), len, pages, taken }
            }
            None => Loan { own: Some(self.buffer_for(len)), at: 0, len, pages: 0, taken },
        }
    }

    fn buffer_for(&mut self, len: usize) -> Arc<Buffer> {
        let buffer = self.free.get_mut(class(len)).and_then(Vec::pop);
        self.kept = self.kept.saturating_sub(buffer.as_ref().map_or(0, |buffer| buffer.capacity()));
        buffer.unwrap_or_else(|| Buffer::zeroed(len.max(1).next_power_of_two()))
    }

    /// Takes it back: nobody uses it any more.
    #[inline]
    pub fn give_back(&mut self, loan: Loan) {
        self.lent = self.lent.saturating_sub(loan.taken);
        self.lent_pages &= !loan.pages;
        if let Some(buffer) = loan.own {
            self.keep(buffer, loan.len);
        }
    }

    fn keep(&mut self, buffer: Arc<Buffer>, len: usize) {
        let capacity = buffer.capacity();
        if self.kept.saturating_add(capacity) > KEPT {
            return;
        }
        if let Some(free) = self.free.get_mut(class(len)) {
            self.kept = self.kept.saturating_add(capacity);
            free.push(buffer);
        }
    }

    /// Where the bytes of a loan are.
    #[inline]
    pub fn buffer<'a>(&'a self, loan: &'a Loan) -> &'a Arc<Buffer> {
        loan.own.as_ref().unwrap_or(&self.staging)
    }

    /// The same as memory for the disk.
    #[inline]
    pub fn segments(&self, loan: &Loan) -> Segments {
        self.buffer(loan).range(loan.at, loan.len)
    }

    /// Bytes lent.
    pub fn lent(&self) -> usize {
        self.lent
    }

    /// Whether there is something to trim.
    pub fn keeps_much(&self) -> bool {
        self.kept > KEPT_IDLE
    }

    /// The large ones go.
    pub fn trim(&mut self) {
        for free in self.free.iter_mut().rev() {
            while self.kept > KEPT_IDLE {
                let Some(buffer) = free.pop() else { break };
                self.kept = self.kept.saturating_sub(buffer.capacity());
            }
        }
    }
}

/// Pages for so many bytes: one for none.
fn pages(len: usize) -> usize {
    len.max(1).div_ceil(PAGE)
}

/// The first `count` bits in a row that are set: the number of the first, and all of them.
#[inline]
fn run(set: u64, count: usize) -> Option<(usize, u64)> {
    if count == 1 {
        // Nearly always.
        return (set != 0).then(|| (usize::try_from(set.trailing_zeros()).unwrap_or(0), set & set.wrapping_neg()));
    }
    long_run(set, u32::try_from(count).ok().filter(|&count| count <= STAGED)?)
}

fn long_run(set: u64, count: u32) -> Option<(usize, u64)> {
    // Where a run of `have` begins; two of those beside each other are one of twice as many.
    let (mut starts, mut have) = (set, 1);
    while have < count {
        let more = have.min(count.saturating_sub(have));
        starts &= starts.checked_shr(more)?;
        have = have.saturating_add(more);
    }
    let first = starts.trailing_zeros();
    let bits = u64::MAX.checked_shr(STAGED.saturating_sub(count))?;
    let pages = bits.checked_shl(first).filter(|_| starts != 0)?;
    Some((usize::try_from(first).ok()?, pages))
}

fn class(len: usize) -> usize {
    let pages = pages(len).next_power_of_two();
    usize::try_from(pages.trailing_zeros()).unwrap_or(CLASSES)
}

#[cfg(test)]
mod test {
    use super::*;

    fn pool() -> Pool {
        Pool::new(Buffer::zeroed(STAGING_LEN))
    }

    #[test]
    fn a_run_is_the_first_that_is_long_enough() {
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
    fn what_is_lent_is_nobody_elses() {
        let mut pool = pool();
        let mut seen = std::collections::BTreeSet::new();
        let loans: Vec<Loan> = [5000, 1, 4096, 70_000, 300_000, 512, 600_000, 1 << 20].map(|len| pool.lend(len)).into();
        for loan in &loans {
            let base = pool.buffer(loan).base().addr() + loan.at();
            for page in 0..loan.len.div_ceil(PAGE) {
                assert!(seen.insert(base + page * PAGE), "{} bytes", loan.len);
            }
            assert_eq!(pool.segments(loan).len(), loan.len);
        }
        loans.into_iter().for_each(|loan| pool.give_back(loan));
        assert_eq!((pool.lent(), pool.lent_pages), (0, 0));
    }

    #[test]
    fn an_idle_disk_keeps_little() {
        let mut pool = pool();
        let lent: Vec<Loan> = (0..8).map(|_| pool.lend(1 << 20)).collect();
        lent.into_iter().for_each(|loan| pool.give_back(loan));
        assert_eq!((pool.kept, pool.lent()), (KEPT, 0));
        assert!(pool.keeps_much());
        pool.trim();
        assert!(!pool.keeps_much());
    }
}
