//! `pause` and `resume`: a client keeps the disk quiesced, for as long as it likes.
//!
//! Meanwhile everything is durable and nothing is in flight: copies, or queries of several disks, are of one point in
//! time.

use serde_json::{Value, json};

use super::refusal::Refusal;
use super::work::{Quiesce, Work};

/// `pause`, until the disk stands still.
#[derive(Debug, Default)]
pub struct Pausing {
    hold: Quiesce,
}

impl Pausing {
    /// Goes on; the answer, when the disk stands still.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        Ok(self.hold.advance(work)?.then(|| json!({ "paused": true })))
    }
}

/// `resume`; the answer but for the pause.
pub fn resume(work: &mut Work<'_>) -> Value {
    work.let_go();
    json!({ "paused": false })
}
