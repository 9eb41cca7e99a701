//! `merge`: moves the data of layers into the one below them while the guest keeps running (decision 0006). The order
//! is [`plan::merge`]; a merge that is cancelled, or fails, leaves the disk as it is, and a repeated one continues.
//!
//! It knows what a client may ask of a merge under way, and what is said about it.

use std::path::{Path, PathBuf};

use control::answer::{self, MergeLayers, MergeState, Merged};
use control::{ImageName, ask};
use plan::Step;

use super::copying::{self, Copying};
use super::driver::Driver;
use super::pause::Measured;
use super::work::Work;
use crate::files::Files;
use crate::files::identity::FileIdentity;
use crate::image::libvhd::Behind;
use crate::image::parent_link;
use crate::image::plan_layers;
use crate::process::failure::Failure;
use crate::process::log::say;

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

/// The layers that were merged: they hold nothing any more.
#[derive(Debug, Default)]
pub struct Sources {
    /// Their names.
    pub unused: Vec<String>,
    /// Their files.
    files: Vec<(PathBuf, Option<FileIdentity>)>,
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

/// The disk stands still: the merged layers leave the chain.
pub fn end(work: &mut Work<'_>) -> Result<Sources, Failure> {
    let Some(merge) = work.disk.merge() else { unreachable!("a merge ends that was never begun") };
    // A write that was under way when all was copied may have found no space in the target since then.
    if let disk::MergeState::Failed(status) = merge.state {
        return Err(copying::failed(status));
    }
    let names: Vec<_> = (merge.from..merge.into).map(|depth| work.name(depth)).collect::<Result<_, _>>()?;
    let mut files = Vec::new();
    for depth in merge.from..merge.into {
        files.extend(work.file(depth)?.1.all_files().map(FileIdentity::of_open));
    }
    for layer in work.disk.end_merge()? {
        if let Err(error) = work.engine.remove(layer.file) {
            say(format_args!("a merged file could not be closed: {error}"));
        }
    }
    *work.geometry = work.disk.geometry();
    let paths = names.iter().flat_map(ImageName::paths).map(Path::to_owned);
    Ok(Sources { unused: names.iter().map(ToString::to_string).collect(), files: paths.zip(files).collect() })
}

/// Records the target as the parent of the layer above it.
pub fn link(child: usize, work: &mut Work<'_>) -> Result<(), Failure> {
    let (name, target) = (work.name(child)?, work.name(child + 1)?);
    let mut link =
        parent_link::record(work.files, name.path(), &target, work.image(child + 1)?, work.file(child + 1)?.1)?;
    link.modified = None;
    Ok(work.disk.layer_mut(child)?.relink(Some(&link))?)
}

impl Sources {
    /// The files, which are removed elsewhere; the names stay.
    pub fn take(&mut self) -> Sources {
        Sources { unused: Vec::new(), files: std::mem::take(&mut self.files) }
    }

    /// Removes the files; those that cannot be are named in the log. Whether all are gone.
    pub fn remove(&mut self, files: &Files) -> bool {
        let problems: Vec<String> =
            std::mem::take(&mut self.files).iter().filter_map(|file| remove(files, file)).collect();
        problems.iter().for_each(say);
        problems.is_empty()
    }
}

/// Removes a file, if what has its name is it still; why not.
fn remove(files: &Files, (path, file): &(PathBuf, Option<FileIdentity>)) -> Option<String> {
    let why = match FileIdentity::of_path(files, path) {
        found if found.is_some() && found != *file => "another file now has its name".to_owned(),
        _ => std::fs::remove_file(path).err()?.to_string(),
    };
    Some(format!("the merged file {} cannot be removed: {why}", path.display()))
}
