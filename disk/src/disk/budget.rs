//! A FIFO budget of bytes in flight.
//!
//! Knows nothing of what the bytes are for. Keeps: no more bytes are taken than there are, except that one taker larger
//! than the whole budget gets it alone; takers are served in the order in which they came, and none overtakes another.
//!
//! No taker starves as long as every taker gives its bytes back without waiting for one that waits here. Giving back
//! wakes no taker: the caller calls [`Budget::next`] where nothing else is half done.

use std::collections::VecDeque;

/// A budget, and those who wait for a part of it, named by a `T`.
#[derive(Debug)]
pub(super) struct Budget<T> {
    max: u64,
    taken: u64,
    waiting: VecDeque<(T, u64)>,
}

impl<T> Budget<T> {
    /// A budget of `max` bytes.
    pub fn new(max: u64) -> Budget<T> {
        Budget { max, taken: 0, waiting: VecDeque::new() }
    }

    /// Takes `bytes` for `who`, or queues it behind all who wait. Returns whether it has them.
    pub fn take(&mut self, who: T, bytes: u64) -> bool {
        let now = self.waiting.is_empty() && self.fits(bytes);
        if now {
            self.taken += bytes;
        } else {
            self.waiting.push_back((who, bytes));
        }
        now
    }

    /// Gives bytes back.
    pub fn give_back(&mut self, bytes: u64) {
        assert!(bytes <= self.taken, "{bytes} bytes are given back, of {} that were taken", self.taken);
        self.taken -= bytes;
    }

    /// The one that has waited longest, if the bytes it waits for are free. It has them now.
    pub fn next(&mut self) -> Option<T> {
        let &(_, bytes) = self.waiting.front()?;
        if !self.fits(bytes) {
            return None;
        }
        self.taken += bytes;
        self.waiting.pop_front().map(|(who, _)| who)
    }

    /// Bytes that are taken.
    #[cfg(test)]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether nothing is taken and no taker waits.
    #[cfg(test)]
    pub fn is_whole(&self) -> bool {
        self.taken == 0 && self.waiting.is_empty()
    }

    fn fits(&self, bytes: u64) -> bool {
        self.taken == 0 || self.taken + bytes <= self.max
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn nobody_passes_who_waits() {
        let mut budget = Budget::new(10);
        assert!(budget.take('a', 6));
        assert!(!budget.take('b', 5));
        assert!(!budget.take('c', 1), "there is room for c, but b came first");
        assert_eq!(budget.next(), None);
        budget.give_back(6);
        assert_eq!((budget.next(), budget.next(), budget.next()), (Some('b'), Some('c'), None));
        assert_eq!(budget.taken(), 6);
    }

    #[test]
    fn what_is_larger_than_all_of_it_is_alone() {
        let mut budget = Budget::new(10);
        assert!(budget.take('a', 1));
        assert!(!budget.take('b', 64));
        budget.give_back(1);
        assert_eq!(budget.next(), Some('b'));
        assert!(!budget.take('c', 1));
        budget.give_back(64);
        assert_eq!(budget.next(), Some('c'));
        budget.give_back(1);
        assert!(budget.is_whole());
    }
}
