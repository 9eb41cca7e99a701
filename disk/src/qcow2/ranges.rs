//! A set of numbers of one kind, such as clusters of the file, kept as ranges.
//!
//! Knows nothing of what they are numbers of. Keeps: ranges neither overlap nor touch, so that each is as long as can
//! be.

use std::collections::BTreeMap;
use std::ops::{Add, Sub};

/// The set: the first of each range, and the one behind it.
#[derive(Debug)]
pub struct Ranges<N>(BTreeMap<N, N>);

impl<N> Default for Ranges<N> {
    fn default() -> Ranges<N> {
        Ranges(BTreeMap::new())
    }
}

impl<N: Copy + Ord + Add<u64, Output = N> + Sub<Output = u64>> Ranges<N> {
    /// Adds `count` numbers from `first` on.
    pub fn insert(&mut self, first: N, count: u64) {
        let (mut begin, mut end) = (first, first + count);
        if begin == end {
            return;
        }
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < begin {
                break;
            }
            self.0.remove(&other);
            (begin, end) = (begin.min(other), end.max(other_end));
        }
        self.0.insert(begin, end);
    }

    /// Takes `count` numbers from `first` on out.
    pub fn remove(&mut self, first: N, count: u64) {
        let end = first + count;
        if first == end {
            return;
        }
        while let Some((&other, &other_end)) = self.0.range(..end).next_back() {
            if other_end <= first {
                return;
            }
            self.0.remove(&other);
            if other_end > end {
                self.0.insert(end, other_end);
            }
            if other < first {
                self.0.insert(other, first);
                return;
            }
        }
    }

    /// Whether a number is in the set.
    pub fn contains(&self, number: N) -> bool {
        self.0.range(..=number).next_back().is_some_and(|(_, &end)| number < end)
    }

    /// Which of `count` numbers from `first` on are in the set: the first and the length of each piece.
    pub fn within(&self, first: N, count: u64) -> impl Iterator<Item = (N, u64)> {
        let end = first + count;
        let before = self.0.range(..first).next_back();
        let pieces = before.into_iter().chain(self.0.range(first..end)).map(move |(&begin, &behind)| {
            let begin = begin.max(first);
            (begin, behind.min(end).max(begin) - begin)
        });
        pieces.filter(|&(_, count)| count > 0)
    }

    /// The first range: its first number and its length.
    pub fn first(&self) -> Option<(N, u64)> {
        self.0.first_key_value().map(|(&first, &end)| (first, end - first))
    }

    /// Numbers in the set.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|(&first, &end)| end - first).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod test {
    use fastrand::Rng;

    use super::*;

    /// Against a plain list of booleans, over all operations of a seeded sequence.
    #[test]
    fn ranges_are_a_set() {
        let (mut ranges, mut plain, mut random) = (Ranges::default(), [false; 64], Rng::with_seed(7));
        let mut draw = |below| random.u64(..below);
        for _ in 0..5000 {
            let (first, insert) = (draw(64), draw(2) == 0);
            let count = draw(64 - first + 1).min(9);
            if insert {
                ranges.insert(first, count)
            } else {
                ranges.remove(first, count)
            }
            (first..first + count).for_each(|cluster| plain[usize::try_from(cluster).unwrap()] = insert);
            for (cluster, &inside) in (0..).zip(&plain) {
                assert_eq!(ranges.contains(cluster), inside, "{cluster} in {ranges:?}");
            }
            let (from, inside) = (first, draw(64 - first + 1));
            let named: Vec<u64> = ranges.within(from, inside).flat_map(|(at, len)| at..at + len).collect();
            let all = from..from + inside;
            let expected: Vec<u64> = all.filter(|&cluster| plain[usize::try_from(cluster).unwrap()]).collect();
            assert_eq!(named, expected, "{from} and {inside} of {ranges:?}");
            assert_eq!(ranges.total(), plain.iter().filter(|&&inside| inside).count() as u64);
            let mut all = ranges.0.iter().zip(ranges.0.iter().skip(1));
            assert!(all.all(|((_, end), (next, _))| end < next), "{ranges:?}");
        }
    }
}
