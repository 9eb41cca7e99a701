//! The times at which a disk's process is killed or replaced, derived from a seed.
//!
//! Invariant: the same seed and numbers yield the same times.

use std::time::Duration;

use fastrand::Rng;

/// An action on the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    Kill,
    Upgrade,
}

/// The event from which a time is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// The start of the process. It may not have opened its image yet, may be writing pending data of its predecessor,
    /// or be negotiating with QEMU.
    Start,
    /// The start of the guest's rings.
    Rings,
}

/// A time and an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    pub deed: Deed,
    pub since: Since,
    pub after: Duration,
}

/// Range of times after a start, in microseconds: a process starts in some 20 ms; the rest is recovery of requests in
/// flight.
const STARTING_US: u64 = 60_000;
/// Range of times after the rings have started, in which requests in flight are recovered.
const RETURNING_US: u64 = 200_000;
/// Range of times of normal operation.
const SERVING_US: u64 = 2_500_000;

/// The times of these kills and upgrades, in random order. One in five kills is of a process that starts, and one in
/// three of the others of one that has just begun to serve.
pub fn of(seed: u64, kills: u64, upgrades: u64) -> Vec<Moment> {
    let mut random = Rng::with_seed(seed);
    let (mut kills, mut upgrades) = (kills, upgrades);
    let mut moments = Vec::new();
    while kills + upgrades > 0 {
        let deed = if random.u64(..kills + upgrades) < kills { Deed::Kill } else { Deed::Upgrade };
        *(if deed == Deed::Kill { &mut kills } else { &mut upgrades }) -= 1;
        let since = if deed == Deed::Kill && random.u64(..5) == 0 { Since::Start } else { Since::Rings };
        let within = match since {
            Since::Start => STARTING_US,
            Since::Rings if random.u64(..3) == 0 => RETURNING_US,
            Since::Rings => SERVING_US,
        };
        moments.push(Moment { deed, since, after: Duration::from_micros(random.u64(..within)) });
    }
    moments
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_seed_yields_the_same_times_in_the_requested_numbers() {
        let moments = of(7, 30, 12);
        assert_eq!(moments, of(7, 30, 12));
        assert_ne!(moments, of(8, 30, 12));
        let count = |deed| moments.iter().filter(|moment| moment.deed == deed).count();
        assert_eq!((count(Deed::Kill), count(Deed::Upgrade)), (30, 12));
        assert!(moments.iter().all(|moment| moment.deed == Deed::Kill || moment.since == Since::Rings));
        assert!(moments.iter().any(|moment| moment.since == Since::Start));
    }
}
