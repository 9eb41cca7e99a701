//! Ids by a seed: the same test has the same names in each run.

use std::cell::RefCell;

thread_local! {
    static RANDOM: RefCell<Option<fastrand::Rng>> = const { RefCell::new(None) };
}

/// From now on ids of this thread are by the seed.
pub(crate) fn set(seed: u64) {
    RANDOM.with_borrow_mut(|random| *random = Some(fastrand::Rng::with_seed(seed)));
}

/// Fills with bytes by the seed; false if no seed is set.
pub(crate) fn fill(bytes: &mut [u8]) -> bool {
    RANDOM.with_borrow_mut(|random| random.as_mut().map(|random| random.fill(bytes)).is_some())
}
