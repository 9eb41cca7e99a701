//! Executes a plan in a job, which waits for each step.
//!
//! It knows nothing about the steps themselves. Their order comes from the plan, which is explored exhaustively
//! (`sim/src/run/steps.rs`).

use plan::{Plan, Step};

use crate::process::failure::Failure;

/// Executes the steps of a plan, and if one fails, the steps for that failure. Returns the first failure.
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
