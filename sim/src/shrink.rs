//! Shrinks a failure so that it can be understood: removes operations as long as any failure remains.
//!
//! The final failure need not be the original one, but it is described as completely.

use crate::crash::Explorer;
use crate::explore::{Case, Failure, explore, prepare};
use crate::schedule::{Pace, Schedule};

/// Maximum number of shorter workloads that are tried: some seconds' worth.
const TRIES_MAX: usize = 400;
/// Number of random orders tried with each workload.
const SEEDS: u64 = 3;

/// The failure, or a smaller one.
pub fn shrink(failure: Failure) -> Failure {
    let mut smallest = failure;
    let mut tries = TRIES_MAX;
    let mut piece = smallest.case.workload.len().div_ceil(2);
    while piece > 0 && tries > 0 {
        let mut at = 0;
        let mut shorter = false;
        while at < smallest.case.workload.len() && tries > 0 {
            tries -= 1;
            match fails_without(&smallest, at, piece) {
                Some(smaller) => (smallest, shorter) = (smaller, true),
                None => at += piece,
            }
        }
        if !shorter || piece > 1 {
            piece /= 2;
        }
    }
    smallest
}

/// The failure of the workload without `count` operations from the `at`th on, if it still fails.
fn fails_without(failure: &Failure, at: usize, count: usize) -> Option<Failure> {
    let case = failure.case.as_ref();
    let mut workload = case.workload.clone();
    workload.drain(at..(at + count).min(workload.len()));
    let start = prepare(&case.setup.subject).ok()?;
    let undisturbed = Pace::ALL.into_iter().map(Schedule::undisturbed);
    let mut schedules = undisturbed.chain((0..SEEDS).map(Schedule::seeded)).chain([case.schedule.again()]);
    schedules.find_map(|schedule| {
        let mut case = Case { setup: case.setup, workload: workload.clone(), schedule };
        explore(&mut Explorer::broad(), &start, &mut case).err()
    })
}
