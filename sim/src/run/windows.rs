//! The windows to read after an event: around every place that was touched.
//!
//! Knows nothing about their contents.

use std::ops::Range;

/// The sectors around some borders on a disk of this size, ascending and without overlaps.
pub fn around(borders: impl Iterator<Item = u64>, disk: u64) -> Vec<Range<u64>> {
    /// Sectors on each side.
    const AROUND: u64 = 8;
    let window = |at: u64| at.saturating_sub(AROUND)..(at + AROUND).min(disk);
    let mut windows: Vec<Range<u64>> = borders.map(window).filter(|window| !window.is_empty()).collect();
    windows.sort_unstable_by_key(|window| window.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for window in windows {
        match merged.last_mut() {
            Some(last) if window.start <= last.end => last.end = last.end.max(window.end),
            _ => merged.push(window),
        }
    }
    merged
}
