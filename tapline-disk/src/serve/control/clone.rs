//! `clone`: creates an empty child of a read-only layer, for another disk. This disk continues undisturbed.

use serde_json::{Value, json};

use super::driver::Driver;
use super::pause::micros;
use super::protocol::CloneOf;
use super::refusal::{Kind, Refusal};
use super::work::Work;

/// A clone under way.
#[derive(Debug)]
pub struct Clone {
    driver: Driver,
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
        let parents = work.names().split_off(asked.of);
        Ok(Clone { driver: Driver::making(&asked.to, plan::clone(asked.of)), asked, parents })
    }

    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        if !self.driver.advance(work)? {
            return Ok(None);
        }
        let (making, sync) = self.driver.took();
        Ok(Some(json!({
            "image": self.asked.to.to_string(),
            "parents": self.parents,
            "work_us": micros(making),
            "sync_us": micros(sync),
        })))
    }
}
