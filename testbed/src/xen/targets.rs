//! The performance targets of Tapline relative to the kernel's backend on Xen, and whether a run reached them.
//!
//! It knows nothing about the measurement. A target is a minimum ratio of speeds; it may apply to each round, so that a
//! load that is only sometimes slow is detected.

use std::fmt;

use crate::figures::median;

/// The rounds to which a ratio applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rounds {
    /// To the medians of all rounds.
    Middle,
    /// To each round; the worst counts.
    Each,
}

/// A minimum ratio of two backends.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of the case.
    pub case: &'static str,
    /// The backend that is to reach it.
    pub of: &'static str,
    /// The backend that it is compared with.
    pub base: &'static str,
    least: f64,
    rounds: Rounds,
}

/// The result of a target.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetResult {
    pub what: String,
    pub has: f64,
    pub is_met: bool,
}

const fn target(case: &'static str, of: &'static str, least: f64, rounds: Rounds) -> Target {
    Target { case, of, base: "blkback", least, rounds }
}

/// Targets with a guest that shares its processor with dom0.
const SHARED: &[Target] = &[
    target("rr4k1", "tapline", 0.90, Rounds::Middle),
    target("rr4k1", "tapline+polling-off", 0.90, Rounds::Middle),
    target("rr4k32", "tapline", 0.92, Rounds::Each),
    target("sr64k8", "tapline", 0.92, Rounds::Middle),
];

/// Targets with a guest that has its own processor.
const APART: &[Target] = &[
    target("rr4k1", "tapline+polling-off", 0.90, Rounds::Middle),
    target("rr4k1", "tapline+polling-adaptive", 1.0, Rounds::Middle),
    target("rr4k32", "tapline", 0.92, Rounds::Each),
    target("sr64k8", "tapline", 0.92, Rounds::Middle),
];

/// The targets for an arrangement of processors.
pub fn of(own_processor: bool) -> impl Iterator<Item = &'static Target> {
    if own_processor { APART } else { SHARED }.iter()
}

impl Target {
    /// Whether both of its backends are among these.
    pub fn concerns(&self, backends: &[String]) -> bool {
        [self.of, self.base].iter().all(|name| backends.iter().any(|backend| backend == name))
    }

    /// Computes the result from the rates of the rounds of both backends.
    pub fn judge(&self, title: &str, own: &[f64], base: &[f64]) -> TargetResult {
        let (has, which) = match self.rounds {
            Rounds::Middle => (middle(own) / middle(base), ""),
            Rounds::Each => {
                (own.iter().zip(base).map(|(own, base)| own / base).fold(f64::NAN, f64::min), " in every round")
            }
        };
        let Target { of, base, least, .. } = self;
        TargetResult { what: format!("{title}, {of} at least {least} of {base}{which}"), has, is_met: has >= *least }
    }
}

impl fmt::Display for TargetResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:.3}, {}", self.what, self.has, if self.is_met { "met" } else { "MISSED" })
    }
}

/// The median of the rates of some rounds.
pub fn middle(rates: &[f64]) -> f64 {
    median(rates.iter().copied())
}

#[cfg(test)]
mod test {
    use super::*;

    const EACH: Target = target("c", "tapline", 0.92, Rounds::Each);

    #[test]
    fn one_slow_round_misses_a_target_of_every_round() {
        assert!(EACH.judge("c", &[93.0, 95.0, 94.0], &[100.0; 3]).is_met);
        let judged = EACH.judge("c", &[93.0, 86.0, 94.0], &[100.0; 3]);
        assert_eq!((judged.has, judged.is_met), (0.86, false));
        assert_eq!(judged.to_string(), "c, tapline at least 0.92 of blkback in every round: 0.860, MISSED");
    }

    #[test]
    fn a_median_is_not_missed_for_one_slow_round_but_without_figures() {
        let middle = Target { rounds: Rounds::Middle, ..EACH };
        assert!(middle.judge("c", &[93.0, 86.0, 94.0], &[100.0; 3]).is_met);
        assert!(!middle.judge("c", &[], &[]).is_met && !EACH.judge("c", &[], &[]).is_met);
    }

    #[test]
    fn a_target_concerns_a_run_of_both_of_its_backends() {
        let run = |names: &[&str]| EACH.concerns(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert!(run(&["blkback", "tapline"]) && !run(&["tapline"]) && !run(&["blkback", "tapline+copy"]));
    }
}
