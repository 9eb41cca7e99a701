//! Ranges of a disk that may have changed, for lookups.

use std::ops::Range;

/// Ranges in order, without overlap.
pub struct Changed(Vec<Range<u64>>);

impl Changed {
    /// Of ranges in any order.
    pub fn new(ranges: &[Range<u64>]) -> Changed {
        let mut sorted: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
        sorted.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in sorted {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Changed(merged)
    }

    /// Whether any byte of the range may have changed.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        let first = self.0.partition_point(|changed| changed.end <= range.start);
        self.0.get(first).is_some_and(|changed| changed.start < range.end)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn lookups_agree_with_every_byte() {
        let ranges = [30..40, 5..10, 8..12, 12..13, 20..20, 60..u64::MAX];
        let changed = Changed::new(&ranges);
        for start in 0..70 {
            for end in start + 1..72 {
                let expected = (start..end).any(|byte| ranges.iter().any(|range| range.contains(&byte)));
                assert_eq!(changed.touches(&(start..end)), expected, "{start}..{end}");
            }
        }
    }
}
