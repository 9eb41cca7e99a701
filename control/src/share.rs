//! A disk's share of a storage that other disks use too: which weights and depths can be given.
//!
//! It knows nothing about how storage is shared (`shares`). Invariant: a weight or a depth that was checked is one that
//! a disk takes as it is.

use std::ops::RangeInclusive;

use crate::{Error, Kind};

/// The weight of a disk of which nothing else is said.
pub const WEIGHT: u32 = 100;
/// Weights that a disk can have.
pub const WEIGHTS: RangeInclusive<u32> = 1..=10_000;
/// Requests in flight of all disks that share a storage, unless another depth is set.
pub const DEPTH: u32 = 128;
/// Depths that can be set.
pub const DEPTHS: RangeInclusive<u32> = 1..=4096;

/// Whether a disk can have this weight.
pub fn check_weight(weight: u32) -> Result<(), Error> {
    within(weight, WEIGHTS, "a disk's share of its storage", "weight").map_err(|error| {
        error
            .advise("a disk with twice the weight of another one gets twice as much; 100 is what disks have by default")
    })
}

/// Whether a storage can have this depth.
pub fn check_depth(depth: u32) -> Result<(), Error> {
    within(depth, DEPTHS, "what disks have in flight at a storage", "depth")
        .map_err(|error| error.advise("give about as many requests as the storage can do at once"))
}

fn within(number: u32, range: RangeInclusive<u32>, what: &str, word: &str) -> Result<(), Error> {
    if range.contains(&number) {
        return Ok(());
    }
    let (least, most) = (range.start(), range.end());
    Err(Error::new(Kind::Invalid, format!("{what} cannot have the {word} {number}: give {least} to {most}")))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn weights_and_depths_out_of_range_are_refused_with_the_range() {
        assert!([1, 100, 10_000].into_iter().all(|weight| check_weight(weight).is_ok()));
        for weight in [0, 10_001, u32::MAX] {
            let error = check_weight(weight).unwrap_err();
            assert_eq!((error.kind, error.message.contains("give 1 to 10000")), (Kind::Invalid, true));
        }
        assert!(check_depth(1).is_ok() && check_depth(4096).is_ok());
        assert!(check_depth(0).unwrap_err().message.contains("the depth 0: give 1 to 4096"));
    }
}
