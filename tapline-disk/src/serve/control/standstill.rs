//! `pause` and `resume`: a client keeps the disk quiesced for any length of time.
//!
//! Meanwhile everything is durable and nothing is in flight: copies, or queries of several disks, are of one point in
//! time.

use control::answer::{Answer, Paused};

use super::driver::Driver;
use super::work::Work;
use crate::process::failure::Failure;

/// `pause` in progress, until the disk is quiesced.
#[derive(Debug)]
pub struct Pausing(Driver);

impl Pausing {
    /// Starts the pause.
    pub fn begin() -> Pausing {
        Pausing(Driver::new(plan::pause()))
    }

    /// Advances the pause; returns the answer when the disk is quiesced.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        Ok(self.0.advance(work)?.then(|| Paused { paused: true, pause: None }.into()))
    }
}

/// Releases requests; returns the answer without the pause.
pub fn resume(work: &mut Work<'_>) -> Answer {
    work.let_go();
    Paused { paused: false, pause: None }.into()
}
