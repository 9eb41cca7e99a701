//! Memory that data pass through between a guest's pages and the storage.
//!
//! Knows nothing of requests. Invariants: bytes that are lent are nobody else's until they are given back; what is kept is
//! bounded, and little while nothing happens.
//!
//! One piece of memory, the *staging*, is there for as long as the server is. What it has no room for comes in pieces of
//! 1 MiB, which are there while large requests are. An engine is told of all these pieces: it may have them registered, and
//! then spares itself looking up their pages each time. Only what fits into none of them has a buffer of its own.

use std::collections::VecDeque;
use std::sync::Arc;

use memory::{Buffer, PAGE, Segments};

use super::request::SEGMENTS_MAX;
use crate::MemoryChange;

/// Bytes of the staging: four requests of 64 KiB, or two rings of a page full of small ones. It stays while the disk is idle.
pub const STAGING_LEN: usize = PAGE * UNITS;

/// Units of a piece, one bit each.
const UNITS: usize = 64;
const _: () = assert!(UNITS as u64 == u64::BITS as u64);

/// Bytes of a unit of the pieces that come and go: such a piece has room for the largest request.
const LARGE_UNIT: usize = 16 << 10;
const _: () = assert!(LARGE_UNIT * UNITS >= SEGMENTS_MAX as usize * PAGE);

/// Such pieces: for all bytes that a disk may have under way.
const LARGE_MAX: usize = 32;

/// Memory that is lent for one request.
pub struct Loan {
    /// Where it lies.
    place: Place,
    /// The first byte of it there.
    at: usize,
    len: usize,
    /// Its units of the piece; none of a buffer of its own.
    units: u64,
}

enum Place {
    Staging,
    /// In the large piece of this number.
    Large(u8, Arc<Buffer>),
    Own(Arc<Buffer>),
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

/// A piece of memory that comes and goes.
struct Large {
    buffer: Arc<Buffer>,
    /// Units that are lent.
    lent: u64,
}

/// What is there to be lent.
pub struct Pool {
    staging: Arc<Buffer>,
    /// Pages of the staging that are lent.
    lent_pages: u64,
    large: [Option<Large>; LARGE_MAX],
    /// How many of these there are.
    large_count: usize,
    /// What an engine has not yet been told.
    changes: VecDeque<MemoryChange>,
    /// Bytes lent.
    lent: usize,
}

impl Pool {
    /// A pool over this staging, nothing of which is in use.
    pub fn new(staging: Arc<Buffer>) -> Pool {
        Pool {
            staging,
            lent_pages: 0,
            large: [const { None }; LARGE_MAX],
            large_count: 0,
            changes: VecDeque::new(),
            lent: 0,
        }
    }

    /// So many bytes; what is in them is of no meaning.
    #[inline(always)]
    pub fn lend(&mut self, len: usize) -> Loan {
        let count = units(len, PAGE);
        self.lent = self.lent.saturating_add(count.saturating_mul(PAGE));
        match run(!self.lent_pages, count) {
            Some((first, units)) => {
                self.lent_pages |= units;
                Loan { place: Place::Staging, at: first.saturating_mul(PAGE), len, units }
            }
            None => self.lend_large(len),
        }
    }

    #[inline(never)]
    fn lend_large(&mut self, len: usize) -> Loan {
        let count = units(len, LARGE_UNIT);
        for (number, place) in (0..).zip(&mut self.large) {
            // Those that there are come first: one is made when the others have no room.
            let large = place.get_or_insert_with(|| {
                let buffer = Buffer::zeroed(LARGE_UNIT * UNITS);
                self.changes.push_back(MemoryChange::Comes(buffer.clone()));
                self.large_count = self.large_count.saturating_add(1);
                Large { buffer, lent: 0 }
            });
            if let Some((first, units)) = run(!large.lent, count) {
                large.lent |= units;
                let place = Place::Large(number, large.buffer.clone());
                return Loan { place, at: first.saturating_mul(LARGE_UNIT), len, units };
            }
        }
        Loan { place: Place::Own(Buffer::zeroed(len)), at: 0, len, units: 0 }
    }

    /// Takes it back: nobody uses it any more.
    #[inline]
    pub fn give_back(&mut self, loan: Loan) {
        self.lent = self.lent.saturating_sub(units(loan.len, PAGE).saturating_mul(PAGE));
        match loan.place {
            Place::Staging => self.lent_pages &= !loan.units,
            Place::Large(number, _) => {
                if let Some(Some(large)) = self.large.get_mut(usize::from(number)) {
                    large.lent &= !loan.units;
                }
            }
            Place::Own(_) => {}
        }
    }

    /// Where the bytes of a loan are.
    #[inline]
    pub fn buffer<'a>(&'a self, loan: &'a Loan) -> &'a Arc<Buffer> {
        match &loan.place {
            Place::Staging => &self.staging,
            Place::Large(_, buffer) | Place::Own(buffer) => buffer,
        }
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

    /// What an engine should know of this memory, beside the staging, and was not yet told.
    #[inline]
    pub fn take_change(&mut self) -> Option<MemoryChange> {
        self.changes.pop_front()
    }

    /// Whether there is something to trim.
    pub fn keeps_much(&self) -> bool {
        self.large_count > 0
    }

    /// Large pieces that are not in use go.
    pub fn trim(&mut self) {
        self.drop_large(|large| large.lent == 0);
    }

    /// They all go: whoever still has something of them keeps it alive.
    pub fn let_go(&mut self) {
        self.drop_large(|_| true);
    }

    fn drop_large(&mut self, which: impl Fn(&Large) -> bool) {
        for place in &mut self.large {
            if let Some(large) = place.take_if(|large| which(large)) {
                self.changes.push_back(MemoryChange::Goes(large.buffer));
                self.large_count = self.large_count.saturating_sub(1);
            }
        }
    }
}

/// Units for so many bytes: one for none.
fn units(len: usize, unit: usize) -> usize {
    len.max(1).div_ceil(unit)
}

/// The first `count` bits in a row that are set: the number of the first, and all of them.
#[inline]
fn run(set: u64, count: usize) -> Option<(usize, u64)> {
    if count == 1 {
        // Nearly always.
        return (set != 0).then(|| (usize::try_from(set.trailing_zeros()).unwrap_or(0), set & set.wrapping_neg()));
    }
    long_run(set, u32::try_from(count).ok().filter(|&count| count <= u64::BITS)?)
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

    /// What an engine that hears of all changes knows.
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
    fn large_pieces_come_when_they_are_needed_and_go_when_they_are_not() {
        let mut pool = pool();
        let small: Vec<Loan> = (0..64).map(|_| pool.lend(PAGE)).collect();
        assert!(!pool.keeps_much() && pool.take_change().is_none(), "the staging has room");
        let large: Vec<Loan> = (0..3).map(|_| pool.lend(1 << 20)).collect();
        let told = known(&mut pool, Vec::new());
        assert_eq!(told.len(), 3);
        assert!(large.iter().all(|loan| told.contains(&pool.buffer(loan).base())));
        small.into_iter().chain(large).skip(1).for_each(|loan| pool.give_back(loan));
        let kept = pool.lend(300_000);
        pool.trim();
        let told = known(&mut pool, told);
        assert_eq!(told, [pool.buffer(&kept).base()], "one is in use");
        pool.give_back(kept);
        pool.trim();
        assert!(!pool.keeps_much() && pool.lent() == PAGE);
        assert!(known(&mut pool, told).is_empty());
    }

    #[test]
    fn what_has_no_room_in_any_piece_has_a_buffer_of_its_own() {
        let mut pool = pool();
        let loans: Vec<Loan> = (0..LARGE_MAX + 1).map(|_| pool.lend(1 << 20)).collect();
        assert_eq!(loans.iter().filter(|loan| matches!(loan.place, Place::Own(_))).count(), 1);
        assert_eq!(known(&mut pool, Vec::new()).len(), LARGE_MAX);
        loans.into_iter().for_each(|loan| pool.give_back(loan));
        assert_eq!(pool.lent(), 0);
    }
}
