//! Log-linear histograms of durations, to three digits.
//!
//! A duration of less than 512 ns has a bucket of its own; above, each doubling is divided into 512 buckets of equal
//! width. The middle of a bucket is therefore within 0.1 % of every duration in it. A row is what lies between two
//! doublings: 512 counts of 8 bytes, a page of memory, so that a histogram takes only the memory of the magnitudes that
//! occur in it.

use memory::size::in_memory;

/// Buckets of a row.
pub(crate) const ROW: usize = 512;
/// Rows of a histogram: up to 2^41 ns, which is 36 minutes. What takes longer is in the last bucket.
pub(crate) const ROWS: usize = 33;
/// Buckets of a histogram.
pub const BUCKETS: usize = ROW * ROWS;

pub(crate) const LINEAR_BITS: u32 = 9;
const LARGEST: u64 = (1 << 41) - 1;

/// The bucket of a duration in nanoseconds.
#[inline(always)]
pub(crate) fn bucket_of(ns: u64) -> usize {
    let ns = ns.min(LARGEST);
    // How wide a bucket is, by the position of the highest bit: 1 ns in rows 0 and 1, then 2, 4 and so on.
    let width = (63 - (ns | ((2 << LINEAR_BITS) - 1)).leading_zeros()) - LINEAR_BITS;
    // What is left of the duration has its highest bit in place 9, and so begins at the row behind the width.
    ((width as usize) << LINEAR_BITS) + in_memory(ns >> width)
}

/// The durations of a bucket, in nanoseconds: from, inclusive, to, exclusive.
pub fn bucket_bounds(bucket: usize) -> (u64, u64) {
    let (row, within) = (bucket / ROW, (bucket % ROW) as u64);
    let width = row.saturating_sub(1);
    let from = if row == 0 { within } else { (ROW as u64 + within) << width };
    (from, from + (1 << width))
}

/// A histogram that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// The buckets that are not empty, in order, and their counts.
    buckets: Vec<(usize, u64)>,
}

impl Histogram {
    /// Of buckets in order.
    pub fn of(buckets: impl IntoIterator<Item = (usize, u64)>) -> Histogram {
        Histogram { buckets: buckets.into_iter().filter(|(_, count)| *count > 0).collect() }
    }

    /// The buckets that are not empty, in order, and their counts.
    pub fn buckets(&self) -> &[(usize, u64)] {
        &self.buckets
    }

    /// How many durations it has.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// The difference from an earlier reading of the same histogram.
    #[must_use]
    pub fn since(&self, before: &Histogram) -> Histogram {
        let mut old = before.buckets.iter().peekable();
        Histogram::of(self.buckets.iter().map(|(bucket, count)| {
            while old.next_if(|(other, _)| other < bucket).is_some() {}
            let was = old.next_if(|(other, _)| other == bucket).map_or(0, |(_, was)| *was);
            (*bucket, count.saturating_sub(was))
        }))
    }

    /// Together with another one.
    #[must_use]
    pub fn with(&self, other: &Histogram) -> Histogram {
        let mut sum: std::collections::BTreeMap<usize, u64> = self.buckets.iter().copied().collect();
        for (bucket, count) in &other.buckets {
            let place = sum.entry(*bucket).or_default();
            *place = place.saturating_add(*count);
        }
        Histogram::of(sum)
    }

    /// The duration, in nanoseconds, that the share `q` (0 to 1) of all durations does not exceed: the middle of its
    /// bucket. `None` if there are none.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        // The rank is at least the first and at most the last; a count of 2^53 is years away.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let rank = ((q.clamp(0.0, 1.0) * count as f64).ceil() as u64).clamp(1, count);
        let mut seen = 0u64;
        for (bucket, count) in &self.buckets {
            seen = seen.saturating_add(*count);
            if seen >= rank {
                let (from, to) = bucket_bounds(*bucket);
                return Some(from + (to - from) / 2);
            }
        }
        None
    }

    /// The longest duration: the last one of its bucket.
    pub fn max(&self) -> Option<u64> {
        self.buckets.last().map(|(bucket, _)| bucket_bounds(*bucket).1 - 1)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_duration_is_within_the_bounds_of_its_bucket() {
        let mut at = 0u64;
        while at < LARGEST {
            for ns in [at.saturating_sub(1), at, at + 1] {
                let bucket = bucket_of(ns);
                let (from, to) = bucket_bounds(bucket);
                assert!((from..to).contains(&ns), "{ns} is not in {from}..{to}, the bounds of bucket {bucket}");
            }
            at = (at + at / 700).max(at + 1);
        }
    }

    #[test]
    fn buckets_follow_each_other_without_gaps() {
        let ends = (0..BUCKETS).map(bucket_bounds);
        ends.clone().zip(ends.skip(1)).for_each(|(one, next)| assert_eq!(one.1, next.0));
        assert_eq!(bucket_bounds(BUCKETS - 1).1, LARGEST + 1);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn the_middle_of_a_bucket_is_within_a_thousandth() {
        for bucket in ROW..BUCKETS {
            let (from, to) = bucket_bounds(bucket);
            let middle = from + (to - from) / 2;
            assert!((middle - from) * 1000 <= from, "bucket {bucket}: {from}..{to}");
        }
    }

    #[test]
    fn quantiles_are_those_of_the_durations() {
        let all = Histogram::of((1..=1000u64).map(|us| (bucket_of(us * 1000), 1)));
        assert_eq!(all.count(), 1000);
        for (q, us) in [(0.5, 500), (0.99, 990), (0.999, 999), (1.0, 1000), (0.0, 1)] {
            let (ns, right) = (all.quantile(q).unwrap(), us * 1000);
            assert!(ns.abs_diff(right) * 1000 <= right, "{q}: {ns} for {right}");
        }
        assert_eq!(Histogram::default().quantile(0.5), None);
    }

    #[test]
    fn a_difference_has_what_came_between() {
        let before = Histogram::of([(3, 5), (700, 1)]);
        let after = Histogram::of([(3, 5), (4, 2), (700, 4)]);
        assert_eq!(after.since(&before), Histogram::of([(4, 2), (700, 3)]));
        assert_eq!(before.with(&after.since(&before)), after);
    }
}
