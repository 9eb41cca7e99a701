//! `pause` and `resume`: a client holds the disk still, for as long as it likes.
//!
//! While it does, everything is durable and nothing is under way: what it copies or asks of several disks is of one moment.

use serde_json::{Map, Value, json};

use super::refusal::Refusal;
use super::work::{Hold, Work, with_pause};

/// `pause`, until the disk stands still.
#[derive(Debug, Default)]
pub struct Pausing {
    hold: Hold,
}

impl Pausing {
    /// Goes on; the answer, when the disk stands still.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        Ok(self.hold.advance(work)?.then(|| json!({ "paused": true })))
    }
}

/// `resume`, until the pause can be told.
#[derive(Debug, Default)]
pub struct Resuming;

impl Resuming {
    /// Goes on; the answer, when the guest has had one.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        work.let_go();
        let mut answer = Map::new();
        answer.insert("paused".into(), false.into());
        Ok(with_pause(&mut answer, work))
    }
}
