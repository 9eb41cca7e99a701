//! Carries out a plan in a job, which waits for each step.
//!
//! It knows nothing about how a step is done. The order of the steps is the plan's, and explored as it is
//! (`sim/src/run/steps.rs`).

use plan::{Plan, Step};

use crate::process::failure::Failure;

/// Takes the steps of a plan; after one that fails, what follows its failure. Returns the first failure.
pub fn carry_out(mut plan: Plan, mut take: impl FnMut(Step) -> Result<(), Failure>) -> Result<(), Failure> {
    let mut failed = None;
    while let Some(step) = plan.step() {
        match take(step) {
            Ok(()) => plan.done(),
            Err(failure) => {
                plan.fail();
                failed.get_or_insert(failure);
            }
        }
    }
    failed.map_or(Ok(()), Err)
}
