//! Which parts of a read have arrived.

/// Maximum number of separate ranges of one read: chunks that follow each other are one range, and no server that sends
/// them in order has more. A hostile one must not fill memory with them.
const RANGES_MAX: usize = 4096;

/// Disjoint ranges, ascending, none of which touches another.
#[derive(Debug, Default)]
pub(super) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Adds a range that is not empty; fails if it overlaps another, or if there are too many.
    pub(super) fn add(&mut self, start: u64, end: u64) -> Result<(), &'static str> {
        let index = self.0.partition_point(|&(_, other_end)| other_end <= start);
        if self.0.get(index).is_some_and(|&(other_start, _)| other_start < end) {
            return Err("two chunks of a read overlap");
        }
        let before = index.checked_sub(1).filter(|&before| self.0.get(before).is_some_and(|range| range.1 == start));
        let touches = self.0.get(index).is_some_and(|&(other_start, _)| other_start == end);
        match (before, touches) {
            (Some(before), true) => {
                let (_, joined_end) = self.0.remove(index);
                self.end_at(before, joined_end);
            }
            (Some(before), false) => self.end_at(before, end),
            (None, true) => self.0.iter_mut().skip(index).take(1).for_each(|range| range.0 = start),
            (None, false) if self.0.len() == RANGES_MAX => return Err("a read arrives in too many separate chunks"),
            (None, false) => self.0.insert(index, (start, end)),
        }
        Ok(())
    }

    fn end_at(&mut self, index: usize, end: u64) {
        self.0.iter_mut().skip(index).take(1).for_each(|range| range.1 = end);
    }

    /// Whether there is no other byte than these, and each of them.
    pub(super) fn are(&self, start: u64, end: u64) -> bool {
        self.0 == [(start, end)]
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn ranges_of_any_order_are_joined() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut ranges = Ranges::default();
            for (n, part) in order.into_iter().enumerate() {
                assert!(!ranges.are(0, 30), "after {n} parts of {order:?}");
                ranges.add(part * 10, part * 10 + 10).unwrap();
            }
            assert!(ranges.are(0, 30), "{order:?}");
        }
    }

    #[test]
    fn an_overlap_is_refused_wherever_it_is() {
        for (start, end) in [(0, 11), (19, 21), (10, 20), (12, 13), (5, 25), (45, 46)] {
            let mut ranges = Ranges::default();
            ranges.add(40, 50).unwrap();
            ranges.add(10, 20).unwrap();
            assert!(ranges.add(start, end).is_err(), "{start}..{end}");
        }
    }

    #[test]
    fn the_number_of_ranges_is_limited() {
        let mut ranges = Ranges::default();
        let added = (0..).map(|n| 2 * n).take_while(|&at| ranges.add(at, at + 1).is_ok()).count();
        assert_eq!(added, RANGES_MAX);
    }
}
