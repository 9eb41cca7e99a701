//! `clone`: creates an empty child of a read-only layer, for another disk. This disk continues undisturbed.

use control::answer::{self, Answer, Took};
use control::{Kind, ask};

use super::driver::Driver;
use super::pause::micros;
use super::work::Work;
use crate::process::failure::Failure;

/// A clone in progress.
#[derive(Debug)]
pub struct Clone {
    driver: Driver,
    asked: ask::Clone,
    parents: Vec<String>,
}

impl Clone {
    /// Checks the request and starts the clone.
    pub fn begin(asked: ask::Clone, work: &mut Work<'_>) -> Result<Clone, Failure> {
        work.must_have_file()?;
        work.name(asked.of)?;
        if asked.of == 0 && !work.geometry.read_only {
            let what = "the guest writes to layer 0, and a child needs a parent that does not change";
            return Err(Failure::of(Kind::State, what).advise("take a snapshot first, then clone layer 1"));
        }
        work.must_be_closed(asked.of)?;
        let parents = work.names().split_off(asked.of);
        Ok(Clone { driver: Driver::making(&asked.to, plan::clone(asked.of)), asked, parents })
    }

    /// Advances the clone; returns the answer at its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        if !self.driver.advance(work)? {
            return Ok(None);
        }
        let (making, sync) = self.driver.took();
        let took = Took { work_us: micros(making), sync_us: micros(sync) };
        let (image, parents) = (self.asked.to.to_string(), self.parents.clone());
        Ok(Some(answer::Clone { image, parents, took }.into()))
    }
}
