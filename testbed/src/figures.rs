//! Statistics over several rounds.

use std::cmp::Ordering;

/// The median; the upper one of two middle values, and zero without values.
pub fn median<T: PartialOrd + Copy + Default>(values: impl IntoIterator<Item = T>) -> T {
    let mut sorted: Vec<T> = values.into_iter().collect();
    sorted.sort_by(|one, other| one.partial_cmp(other).unwrap_or(Ordering::Equal));
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
