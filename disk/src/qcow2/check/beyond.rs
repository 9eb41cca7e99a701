//! References to what lies behind the end of the file, where now there is nothing and reads are zero.
//!
//! Knows nothing of what they are for. Keeps: a place that is clear here is none that was noted; nothing may be put
//! anywhere else behind the end, or it would come to be the content of a disk.
//!
//! A damaged image may have any number of them, anywhere: what is kept is one bit for each power of two.

use std::ops::Range;

/// Where such references are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beyond {
    /// Bit n: some are to clusters from 2^n on, before 2^(n + 1).
    octaves: u64,
}

impl Beyond {
    /// There is a reference to these clusters, the first and the last of them.
    pub fn note(&mut self, first: u64, last: u64) {
        self.octaves |= bits(first, last);
    }

    /// Whether nothing refers to any of these clusters.
    pub fn is_clear(self, clusters: Range<u64>) -> bool {
        self.octaves & bits(clusters.start, clusters.end.saturating_sub(1)) == 0
    }

    /// The next cluster at which something may begin, if it cannot begin at this one.
    pub fn next(cluster: u64) -> u64 {
        cluster.saturating_add(1).checked_next_power_of_two().unwrap_or(u64::MAX)
    }
}

/// The octaves of these clusters.
fn bits(first: u64, last: u64) -> u64 {
    let octave = |cluster: u64| cluster.max(1).ilog2();
    (octave(first)..=octave(last)).fold(0, |bits, octave| bits | 1 << octave)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_is_noted_is_not_clear() {
        let mut beyond = Beyond::default();
        beyond.note(100, 130);
        assert!(beyond.is_clear(0..64) && beyond.is_clear(256..1000));
        assert!(!beyond.is_clear(60..65) && !beyond.is_clear(130..131) && !beyond.is_clear(0..1000));
        assert_eq!([0, 64, 100, 255, 256].map(Beyond::next), [1, 128, 128, 256, 512]);
        beyond.note(u64::MAX, u64::MAX);
        assert!(!beyond.is_clear(1 << 63..u64::MAX));
    }
}
