//! Faults planted in the disk process (`tapline-disk/src/process/fault.rs`); the rounds must find each.
//!
//! Defines the actions that expose each fault; rounds are restricted to them.

use std::time::Instant;

use super::action::Action;
use super::program::Programs;
use super::{Options, rounds};
use crate::planted::planted_program;

/// Seconds in which a fault must be found.
const PATIENCE: u64 = 60;

/// The faults, each with the actions that expose it.
const ALL: &[(&str, &[Action])] = &[
    ("any-stamp", &[Action::Overwrite, Action::GiveNumber]),
    ("time-decides", &[Action::TouchFuture]),
    ("link-decides", &[Action::Link]),
    ("reader-ignores-log", &[Action::Nothing]),
];

/// Runs `--planted` with a fault or `all`.
pub fn run(options: &Options, wanted: &str) -> Result<(), String> {
    let chosen: Vec<_> = ALL.iter().filter(|(name, _)| wanted == "all" || *name == wanted).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = ALL.iter().map(|(name, _)| *name).collect();
        return Err(format!("there is no planted fault '{wanted}'; there are {}", names.join(", ")));
    }
    let directory = planted_program("tapline-disk")?;
    let mut missed = Vec::new();
    for (name, actions) in chosen {
        let programs = Programs { directory: directory.clone(), planted: Some(name) };
        let sought = Options {
            only: actions.to_vec(),
            seconds: Some(PATIENCE),
            rounds: u64::MAX,
            survey: false,
            ..options.clone()
        };
        let begun = Instant::now();
        let sum = rounds(&sought, programs)?;
        let seconds = begun.elapsed().as_secs();
        match sum.failed.first() {
            Some(failed) => {
                println!("{name}: found in {seconds} s, {} rounds: {:?}", sum.rounds, failed.failure.class);
            }
            None => {
                println!("{name}: not found in {seconds} s, {} rounds", sum.rounds);
                missed.push(*name);
            }
        }
    }
    if missed.is_empty() { Ok(()) } else { Err(format!("not found: {}", missed.join(", "))) }
}
