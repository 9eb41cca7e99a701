//! The changed parts of a range, by maps of successive intervals that are not joined: one of them may still be written.
//!
//! Its time depends on the range only, not on the size of the disk or on what has changed.

use super::{ChangeMap, REGION};
use crate::size::in_memory;
use crate::{DiskOffset, ImageError, ImageErrorKind, Span};

impl ChangeMap {
    /// Describes `span` from its beginning: the lengths of successive runs, and whether they may have changed by any of
    /// `maps`, of which each continues the one before it. There are at most `most` runs; the last may end before the
    /// span does. Without a map, and behind the end of the last map, everything may have changed.
    pub fn runs(maps: &[&ChangeMap], span: Span, most: usize) -> Vec<(u64, bool)> {
        let Some(last) = maps.last() else { return vec![(span.len, true)] };
        let block = u64::from(last.spec.block);
        let word = |region: usize| {
            let words = maps.iter().filter_map(|map| map.changed.get(region));
            words.fold(!last.whole(region), |all, word| all | word)
        };
        let mut runs: Vec<(u64, bool)> = Vec::new();
        let mut at = span.at;
        while at < span.end() {
            let number = at / block;
            let bit = number % u64::from(REGION);
            let word = word(in_memory(number / u64::from(REGION))) >> bit;
            let has_changed = word & 1 == 1;
            let alike = u64::from(if has_changed { word.trailing_ones() } else { word.trailing_zeros() });
            let blocks = alike.min(u64::from(REGION) - bit);
            let end = DiskOffset(number.saturating_add(blocks).saturating_mul(block)).min(span.end());
            let is_full = runs.len() == most;
            match runs.last_mut() {
                Some((len, same)) if *same == has_changed => *len += end - at,
                _ if is_full => break,
                _ => runs.push((end - at, has_changed)),
            }
            at = end;
        }
        runs
    }

    /// Fails unless this map is of the interval that follows that of `earlier`, and of the same disk.
    pub fn must_continue(&self, earlier: &ChangeMap) -> Result<(), ImageError> {
        let mismatch = |what: String| Err(ImageError::new(ImageErrorKind::Mismatch, what));
        let [this, that] = [self, earlier].map(|map| super::hex(map.spec.id));
        if self.spec.continues != Some(earlier.spec.id) {
            return mismatch(format!("map {this} does not continue map {that}: name all maps, the oldest first"));
        }
        // The earlier one may be longer, although disks do not shrink: it was extended for a disk that did not grow.
        if self.spec.block != earlier.spec.block {
            let (own, other) = (self.spec.block, earlier.spec.block);
            return mismatch(format!(
                "map {this} is in blocks of {own} bytes, and the one before it in blocks of {other}"
            ));
        }
        Ok(())
    }

    /// Forgets what lies behind `len` bytes: the map was extended for a disk that did not grow. The next header has the
    /// new length.
    pub fn shorten(&mut self, len: u64) {
        self.spec.len = self.spec.len.min(len);
        let regions = in_memory(self.spec.len.div_ceil(u64::from(self.spec.block) * u64::from(REGION)));
        self.changed.truncate(regions);
        let whole = self.whole(regions.saturating_sub(1));
        self.changed.last_mut().into_iter().for_each(|word| *word &= whole);
        self.stale.retain(|page| *page < super::page_count(regions));
    }
}

#[cfg(test)]
mod test {
    use super::super::{BLOCK, Spec};
    use super::*;

    const LEN: u64 = (20 << 20) + 512;

    /// A map in which these blocks have changed.
    fn map(len: u64, blocks: &[u64]) -> ChangeMap {
        let mut map = ChangeMap::new(Spec { id: [1; 16], continues: None, len, block: BLOCK }).unwrap();
        for block in blocks {
            map.words()[in_memory(block / 64)] |= 1 << (block % 64);
        }
        map
    }

    fn by_bytes(maps: &[&ChangeMap], span: Span) -> Vec<(u64, bool)> {
        let mut runs: Vec<(u64, bool)> = Vec::new();
        let end = maps.last().unwrap().len();
        for at in span.at.0..span.end().0 {
            let has_changed = at >= end || maps.iter().any(|map| map.has_changed(DiskOffset(at)));
            match runs.last_mut() {
                Some((len, same)) if *same == has_changed => *len += 1,
                _ => runs.push((1, has_changed)),
            }
        }
        runs
    }

    #[test]
    fn runs_are_those_of_single_bytes() {
        let (a, b) = (map(LEN - (5 << 20), &[0, 1, 63, 64, 130, 200]), map(LEN, &[2, 64, 65, 200, 320]));
        let block = u64::from(BLOCK);
        for maps in [&[&a, &b][..], &[&b]] {
            for (at, end) in
                [(0, LEN), (1, block), (block - 1, 3 * block + 1), (63 * block, 66 * block), (LEN - 513, LEN)]
            {
                let span = Span { at: DiskOffset(at), len: end - at };
                let all = by_bytes(maps, span);
                assert_eq!(ChangeMap::runs(maps, span, usize::MAX), all, "{span:?}");
                let few = ChangeMap::runs(maps, span, 2);
                assert_eq!(few, all[..all.len().min(2)], "{span:?}");
            }
        }
    }

    #[test]
    fn everything_may_have_changed_behind_the_last_map_and_without_a_map() {
        let span = Span { at: DiskOffset(LEN - 512), len: 1 << 40 };
        assert_eq!(ChangeMap::runs(&[&map(LEN, &[])], span, 9), [(65_536, false), ((1 << 40) - 65_536, true)]);
        assert_eq!(ChangeMap::runs(&[], span, 9), [(1 << 40, true)]);
        // A longer map of an earlier interval says nothing about what the last does not reach.
        let (long, short) = (map(2 * LEN, &[]), map(LEN, &[]));
        assert_eq!(ChangeMap::runs(&[&long, &short], span, 9), [(65_536, false), ((1 << 40) - 65_536, true)]);
        let nowhere = Span { at: DiskOffset(u64::MAX - 512), len: 512 };
        assert_eq!(ChangeMap::runs(&[&long], nowhere, 9), [(512, true)]);
        assert_eq!(ChangeMap::runs(&[&long], Span { len: 0, ..nowhere }, 9), []);
    }
}
