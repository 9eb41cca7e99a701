//! `merge`: moves the data of layers into the one below them while the guest keeps running (decision 0006). The order
//! is [`plan::merge`]; a merge that is cancelled, or fails, leaves the disk as it is, and a repeated one continues.
//!
//! It defines what clients can change in a running merge, and what is reported about it.

use control::answer::{self, MergeLayers, MergeState, Merged};
use control::{Kind, ask};
use plan::Step;

use super::copying::Copying;
use super::driver::Driver;
use super::pause::Measured;
use super::work::Work;
use crate::image::libvhd::MovedMetadata;
use crate::image::plan_layers;
use crate::process::failure::Failure;

/// A merge, from its first preparation to the removal of the files.
#[derive(Debug)]
pub struct MergeJob {
    asked: ask::Merge,
    driver: Driver,
    /// The result of the plan, while the length of the last pause is not known yet.
    ended: Option<Result<(), Failure>>,
    longest: Option<Measured>,
    measured: bool,
    /// The layers with their metadata behind their blocks at the beginning.
    behind: MovedMetadata,
}

impl MergeJob {
    /// Checks the request and starts the merge.
    pub fn begin(asked: ask::Merge, work: &mut Work<'_>) -> Result<MergeJob, Failure> {
        work.must_be_writable()?;
        work.name(asked.into)?;
        if asked.from == 0 && work.disk.tracked().is_some() {
            let what =
                "the leaf cannot be merged while its changed blocks are recorded: another file would be the leaf";
            return Err(Failure::of(Kind::Unsupported, what).advise("end the map first: untrack"));
        }
        let plan = plan_layers::merge(&work.chain()?, asked.from, asked.into, asked.delete)?;
        let copying = Copying::new(asked.rate, work)?;
        let driver = Driver::copying(copying, plan);
        Ok(MergeJob { asked, driver, ended: None, longest: None, measured: false, behind: work.behind() })
    }

    /// Advances the merge; returns the answer at its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<answer::Merge>, Failure> {
        if self.ended.is_none() {
            let ended = self.driver.advance(work);
            if self.driver.step() == Some(Step::CopyAll) {
                self.measure(work);
            }
            if !matches!(ended, Ok(false)) {
                work.behind().log_new_since(&self.behind);
                self.ended = Some(ended.map(drop));
                self.measured = false;
            }
        }
        if self.ended.is_none() || self.driver.has_held() && !self.measure(work) {
            return Ok(None);
        }
        match self.ended.take() {
            Some(Err(refusal)) => Err(refusal),
            _ => Ok(Some(self.answer(work))),
        }
    }

    /// Records the last pause; returns false if its length is not known yet.
    fn measure(&mut self, work: &Work<'_>) -> bool {
        if self.measured || work.paused {
            return true;
        }
        let Some(found) = work.pause.measured() else { return false };
        self.measured = true;
        if self.longest.is_none_or(|longest| longest.pause < found.pause) {
            self.longest = Some(found);
        }
        true
    }

    fn answer(&self, work: &Work<'_>) -> answer::Merge {
        let merged = Merged {
            unused: self.driver.sources().unused.clone(),
            deleted: self.driver.has_removed(),
            chain: work.names(),
            pause: self.longest.map(Into::into).unwrap_or_default(),
        };
        done(&self.asked, self.progress().copied, merged)
    }

    /// Returns its progress.
    pub fn status(&self) -> answer::Merge {
        let progress = self.progress();
        let state = match (self.driver.step(), progress.stopped) {
            _ if !self.has_begun() => MergeState::Beginning,
            (Some(Step::CopyAll), true) => MergeState::Paused,
            (Some(Step::CopyAll), false) => MergeState::Running,
            (Some(Step::RemoveSources), _) => MergeState::Removing,
            _ => MergeState::Ending,
        };
        answer::Merge {
            state,
            layers: Some(MergeLayers { from: self.asked.from, into: self.asked.into }),
            done: Some(progress.done),
            len: Some(progress.len),
            copied: Some(progress.copied),
            ..answer::Merge::default()
        }
    }

    fn progress(&self) -> &Copying {
        self.driver.progress()
    }

    /// Returns whether it has begun to copy.
    pub fn has_begun(&self) -> bool {
        self.driver.has_begun_to_copy()
    }

    /// Returns whether it holds requests, or is about to, or waits for a flush of its own.
    pub fn is_switching(&self) -> bool {
        let step = self.driver.step();
        let copies = matches!(step, Some(Step::CopyAll | Step::Lengthen { .. }));
        !copies && !matches!(step, Some(Step::OpenForWriting { .. } | Step::ForgetParents))
    }

    /// Returns whether there is more to do without being woken.
    pub fn is_hungry(&self) -> bool {
        self.progress().hungry
    }

    /// Returns the percentage that is done.
    pub fn percent(&self) -> u64 {
        let Copying { done, len, .. } = self.progress();
        let done = u128::from(*done).saturating_mul(100).checked_div(u128::from(*len)).unwrap_or(100);
        u64::try_from(done).unwrap_or(100)
    }

    /// Pauses the copying, or continues it.
    pub fn stop(&mut self, stopped: bool) {
        self.driver.progress_mut().stopped = stopped;
    }

    /// Cancels the merge.
    pub fn cancel(&mut self) {
        self.driver.progress_mut().cancelled = true;
    }
}

/// Makes the answer at the end of a merge.
pub fn done(asked: &ask::Merge, copied: u64, merged: Merged) -> answer::Merge {
    answer::Merge {
        state: MergeState::Done,
        layers: Some(MergeLayers { from: asked.from, into: asked.into }),
        copied: Some(copied),
        merged: Some(merged),
        ..answer::Merge::default()
    }
}
