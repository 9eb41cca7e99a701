//! Decides what happens next: by enumerating all orders within a bound, or from a seed.
//!
//! Knows only the number of possible events; the first is the one without interference. A schedule can be written down
//! and repeated.

use std::fmt;
use std::str::FromStr;

use crate::random::Random;

/// The order of events without interference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pace {
    /// Each request ends before the next begins.
    Serial,
    /// All requests begin before the first ends.
    Eager,
    /// All requests begin before the first ends, and the latest operation completes first: the oldest ones wait
    /// longest.
    Newest,
    /// Verbs on the chain proceed before anything else, and no request begins while one can proceed; an interference
    /// lets a request begin in between.
    Steps,
}

impl Pace {
    /// The paces under which all workloads are explored.
    pub const ALL: [Pace; 3] = [Pace::Serial, Pace::Eager, Pace::Newest];
    const KNOWN: [Pace; 4] = [Pace::Serial, Pace::Eager, Pace::Newest, Pace::Steps];

    fn letter(self) -> &'static str {
        match self {
            Pace::Serial => "s",
            Pace::Eager => "e",
            Pace::Newest => "n",
            Pace::Steps => "c",
        }
    }
}

/// The source of decisions.
#[derive(Clone, Debug)]
enum Source {
    Prefix(Vec<usize>),
    Seed(Random),
}

/// The decisions of one run.
#[derive(Clone, Debug)]
pub struct Schedule {
    pace: Pace,
    source: Source,
    /// The choices so far: which, out of how many.
    taken: Vec<(usize, usize)>,
}

impl Schedule {
    /// A schedule without interference.
    pub fn undisturbed(pace: Pace) -> Schedule {
        Schedule { pace, source: Source::Prefix(Vec::new()), taken: Vec::new() }
    }

    /// A schedule from a seed.
    pub fn seeded(seed: u64) -> Schedule {
        let mut random = Random::new(seed);
        let pace = Pace::ALL[random.index(Pace::ALL.len())];
        Schedule { pace, source: Source::Seed(random), taken: Vec::new() }
    }

    /// The choices so far, to be repeated.
    pub fn again(&self) -> Schedule {
        let picks = self.taken.iter().map(|(picked, _)| *picked).collect();
        Schedule { pace: self.pace, source: Source::Prefix(picks), taken: Vec::new() }
    }

    /// The order of events without interference.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// Chooses one of `count` events, at least one.
    pub fn pick(&mut self, count: usize) -> usize {
        let picked = match &mut self.source {
            Source::Prefix(prefix) => prefix.get(self.taken.len()).copied().unwrap_or(0).min(count.saturating_sub(1)),
            // Half of the choices do not interfere: long detours find less than short ones.
            Source::Seed(random) => [0, random.index(count)][random.index(2)],
        };
        self.taken.push((picked, count));
        picked
    }

    /// The next schedule of an enumeration of all with at most `interferences` interferences, to be called after the
    /// run. `None`: that was the last one.
    pub fn next(&self, interferences: usize) -> Option<Schedule> {
        let interfered = |taken: &[(usize, usize)]| taken.iter().filter(|(picked, _)| *picked > 0).count();
        let can_turn = |at: &usize| {
            self.taken.get(*at).is_some_and(|(picked, count)| picked + 1 < *count)
                && interfered(&self.taken[..*at]) < interferences
        };
        let at = (0..self.taken.len()).rev().find(can_turn)?;
        let mut prefix: Vec<usize> = self.taken[..at].iter().map(|(picked, _)| *picked).collect();
        prefix.push(self.taken[at].0 + 1);
        Some(Schedule { pace: self.pace, source: Source::Prefix(prefix), taken: Vec::new() })
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.taken.iter().rposition(|(picked, _)| *picked > 0).map_or(0, |last| last + 1);
        f.write_str(self.pace.letter())?;
        self.taken[..last].iter().try_for_each(|(picked, _)| write!(f, ".{picked}"))
    }
}

/// An error: the text is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a schedule; they look like s, e, n, c, or e.0.0.2")]
pub struct NotASchedule(String);

impl FromStr for Schedule {
    type Err = NotASchedule;

    fn from_str(text: &str) -> Result<Schedule, NotASchedule> {
        let wrong = || NotASchedule(text.into());
        let mut words = text.split('.');
        let letter = words.next().unwrap_or_default();
        let pace = Pace::KNOWN.into_iter().find(|pace| pace.letter() == letter).ok_or_else(wrong)?;
        let prefix = words.map(|word| word.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
        Ok(Schedule { pace, source: Source::Prefix(prefix), taken: Vec::new() })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn all(interferences: usize) -> Vec<Vec<usize>> {
        let mut found = Vec::new();
        let mut next = Some(Schedule::undisturbed(Pace::Serial));
        while let Some(mut schedule) = next {
            found.push((0..3).map(|_| schedule.pick(3)).collect());
            next = schedule.next(interferences);
        }
        found
    }

    #[test]
    fn the_enumeration_is_complete_within_its_bound() {
        assert_eq!(all(0).len(), 1);
        assert_eq!(all(1).len(), 1 + 3 * 2);
        assert_eq!(all(3).len(), 27);
        let distinct: std::collections::HashSet<_> = all(2).into_iter().collect();
        assert_eq!(distinct.len(), 1 + 3 * 2 + 3 * 4);
    }

    #[test]
    fn a_schedule_can_be_repeated() {
        let mut first = Schedule::seeded(4);
        let picks: Vec<_> = (0..20).map(|_| first.pick(4)).collect();
        let mut again: Schedule = first.to_string().parse().unwrap();
        assert_eq!((0..20).map(|_| again.pick(4)).collect::<Vec<_>>(), picks);
    }
}
