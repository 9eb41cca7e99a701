//! When a disk's process is killed or replaced: what the seed says of it.
//!
//! Knows nothing of processes. Keeps: the same seed and numbers give the same moments.

use std::time::Duration;

use fastrand::Rng;

/// What happens to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    Kill,
    Upgrade,
}

/// From what a moment is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// The start of the process. It may not have opened its image yet, may write back what its predecessor left, or be
    /// asked by QEMU.
    Start,
    /// The moment in which the guest's rings run again.
    Rings,
}

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    pub deed: Deed,
    pub since: Since,
    pub after: Duration,
}

/// A process is started in some 20 ms; the rest is the recovery of what was in flight.
const STARTING_US: u64 = 60_000;
/// So long a disk that has its guest back is at what was in flight before.
const RETURNING_US: u64 = 200_000;
/// At work.
const SERVING_US: u64 = 2_500_000;

/// The moments of so many kills and upgrades, in a random order. One of five kills is of a process that starts, and one
/// of three among the others of one that has just begun to serve.
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
    fn a_seed_gives_the_same_moments_and_each_as_often_as_it_is_asked_for() {
        let moments = of(7, 30, 12);
        assert_eq!(moments, of(7, 30, 12));
        assert_ne!(moments, of(8, 30, 12));
        let count = |deed| moments.iter().filter(|moment| moment.deed == deed).count();
        assert_eq!((count(Deed::Kill), count(Deed::Upgrade)), (30, 12));
        assert!(moments.iter().all(|moment| moment.deed == Deed::Kill || moment.since == Since::Rings));
        assert!(moments.iter().any(|moment| moment.since == Since::Start));
    }
}
