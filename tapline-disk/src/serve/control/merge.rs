//! `merge`: moves the data of layers into the one below them while the guest keeps running (decision 0006). The order
//! is [`plan::merge`]; a merge that is cancelled, or fails, leaves the disk as it is, and a repeated one continues.
//!
//! It knows what a client may ask of a merge under way, and what is said about it.

use control::answer::{self, MergeLayers, MergeState, Merged};
use control::ask;
use plan::Step;

use super::copying::Copying;
use super::driver::Driver;
use super::pause::Measured;
use super::work::Work;
use crate::image::libvhd::Behind;
use crate::image::plan_layers;
use crate::process::failure::Failure;

/// A merge, from its first preparation to its last cleaning up.
#[derive(Debug)]
pub struct MergeJob {
    asked: ask::Merge,
    driver: Driver,
    /// The plan has come to its end; the figures of the last pause are waited for.
    ended: Option<Result<(), Failure>>,
    longest: Option<Measured>,
    measured: bool,
    /// As it was at the beginning.
    behind: Behind,
}

impl MergeJob {
    /// Begins.
    pub fn begin(asked: ask::Merge, work: &mut Work<'_>) -> Result<MergeJob, Failure> {
        work.must_be_writable()?;
        work.name(asked.into)?;
        let plan = plan_layers::merge(&work.chain()?, asked.from, asked.into, asked.delete)?;
        let copying = Copying::new(asked.rate, work)?;
        let driver = Driver::copying(copying, plan);
        Ok(MergeJob { asked, driver, ended: None, longest: None, measured: false, behind: work.behind() })
    }

    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<answer::Merge>, Failure> {
        if self.ended.is_none() {
            let ended = self.driver.advance(work);
            if self.driver.step() == Some(Step::CopyAll) {
                self.measure(work);
            }
            if !matches!(ended, Ok(false)) {
                work.behind().tell_since(&self.behind);
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

    /// Takes note of the pause that was last; whether it is known.
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

    /// How far it is.
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

    /// Whether it has begun to copy.
    pub fn has_begun(&self) -> bool {
        self.driver.has_begun_to_copy()
    }

    /// Whether it holds requests, or is about to, or waits for a flush of its own.
    pub fn is_switching(&self) -> bool {
        let step = self.driver.step();
        let copies = matches!(step, Some(Step::CopyAll | Step::Lengthen { .. }));
        !copies && !matches!(step, Some(Step::OpenForWriting { .. } | Step::ForgetParents))
    }

    /// Whether there is more to do without being woken.
    pub fn is_hungry(&self) -> bool {
        self.progress().hungry
    }

    /// Hundredths of it that are done.
    pub fn percent(&self) -> u64 {
        let Copying { done, len, .. } = self.progress();
        let done = u128::from(*done).saturating_mul(100).checked_div(u128::from(*len)).unwrap_or(100);
        u64::try_from(done).unwrap_or(100)
    }

    /// Stops it for a while, or goes on.
    pub fn stop(&mut self, stopped: bool) {
        self.driver.progress_mut().stopped = stopped;
    }

    /// Stops it for good.
    pub fn cancel(&mut self) {
        self.driver.progress_mut().cancelled = true;
    }
}

/// The answer at the end.
pub fn done(asked: &ask::Merge, copied: u64, merged: Merged) -> answer::Merge {
    answer::Merge {
        state: MergeState::Done,
        layers: Some(MergeLayers { from: asked.from, into: asked.into }),
        copied: Some(copied),
        merged: Some(merged),
        ..answer::Merge::default()
    }
}
