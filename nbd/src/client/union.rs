//! The union of ranges of the export.

use std::collections::BTreeMap;

/// Disjoint ranges by their start.
#[derive(Debug, Default)]
pub(super) struct Union(BTreeMap<u64, u64>);

impl Union {
    /// Adds a range; an empty one is nothing.
    pub(super) fn add(&mut self, (mut start, mut end): (u64, u64)) {
        if start >= end {
            return;
        }
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back().filter(|&(_, &end)| end >= start) {
            self.0.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.0.insert(start, end);
    }

    /// Whether the range, if it is not empty, has a byte in common with the union.
    pub(super) fn overlaps(&self, (start, end): (u64, u64)) -> bool {
        start < end && self.0.range(..end).next_back().is_some_and(|(_, &other_end)| other_end > start)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_union_has_the_bytes_of_its_ranges_and_no_others() {
        // All triples of ranges of up to 3 bytes among 6.
        let ranges: Vec<(u64, u64)> =
            (0..6).flat_map(|start| (start..=start + 3).map(move |end| (start, end))).collect();
        for &one in &ranges {
            for &two in &ranges {
                for &three in &ranges {
                    let mut union = Union::default();
                    [one, two, three].into_iter().for_each(|range| union.add(range));
                    for byte in 0..10 {
                        let expected = [one, two, three].iter().any(|&(start, end)| start <= byte && byte < end);
                        assert_eq!(union.overlaps((byte, byte + 1)), expected, "{one:?} {two:?} {three:?} {byte}");
                    }
                    assert!(!union.overlaps((3, 3)));
                }
            }
        }
    }
}
