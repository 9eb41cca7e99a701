//! `clone`: creates an empty child of a read-only layer, for another disk. This disk continues undisturbed.

use serde_json::{Value, json};

use super::blocking_task::BlockingTask;
use super::child::{Child, Wanted};
use super::pause::micros;
use super::protocol::CloneOf;
use super::refusal::{Kind, Refusal};
use super::work::Work;

/// A clone under way.
#[derive(Debug)]
pub struct Clone {
    blocking_task: Option<BlockingTask<Result<Child, Refusal>>>,
    asked: CloneOf,
    parents: Vec<String>,
}

impl Clone {
    /// Begins.
    pub fn begin(asked: CloneOf, work: &mut Work<'_>) -> Result<Clone, Refusal> {
        work.name(asked.of)?;
        if asked.of == 0 && !work.geometry.read_only {
            let what = "the guest writes to layer 0, and a child needs a parent that does not change";
            return Err(Refusal::new(Kind::State, what).advise("take a snapshot first, then clone layer 1"));
        }
        let wanted = Wanted::on(work, asked.of, &asked.to, false)?;
        let parents = work.names().split_off(asked.of);
        Ok(Clone { blocking_task: Some(work.send(move || wanted.make())?), asked, parents })
    }

    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        let Some(blocking_task) = self.blocking_task.take() else { return Ok(None) };
        match work.fetch(blocking_task) {
            Ok(child) => {
                let child = child?;
                Ok(Some(json!({
                    "image": self.asked.to.to_string(),
                    "parents": self.parents,
                    "work_us": micros(child.work),
                    "sync_us": micros(child.sync),
                })))
            }
            Err(blocking_task) => {
                self.blocking_task = Some(blocking_task);
                Ok(None)
            }
        }
    }
}
