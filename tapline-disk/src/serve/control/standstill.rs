//! `pause` and `resume`: a client keeps the disk quiesced, for as long as it likes.
//!
//! Meanwhile everything is durable and nothing is in flight: copies, or queries of several disks, are of one point in
//! time.

use control::answer::{Answer, Paused};

use super::driver::Driver;
use super::work::Work;
use crate::process::failure::Failure;

/// `pause`, until the disk stands still.
#[derive(Debug)]
pub struct Pausing(Driver);

impl Pausing {
    /// Begins.
    pub fn begin() -> Pausing {
        Pausing(Driver::new(plan::pause()))
    }

    /// Goes on; the answer, when the disk stands still.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        Ok(self.0.advance(work)?.then(|| Paused { paused: true, pause: None }.into()))
    }
}

/// `resume`; the answer but for the pause.
pub fn resume(work: &mut Work<'_>) -> Answer {
    work.let_go();
    Paused { paused: false, pause: None }.into()
}
