//! A merge of layers, driven from start to end while nothing else uses the disk.
//!
//! It knows how to pace a merge without a guest: as fast as possible, with an occasional flush, after which the
//! sources' space is freed. The caller handles names and links of the layers.

use disk::{MergeProgress, MergeState, Status};

use super::Runner;
use crate::process::failure::Failure;

/// The bytes copied between two flushes, each of which frees the sources' space.
const FLUSH_EVERY: u64 = 256 << 20;

impl Runner {
    /// Begins to merge the layers `from..into` into `into`.
    pub fn begin_merge(&mut self, from: usize, into: usize) -> Result<(), Failure> {
        // A disk searches for leaked space when the first request arrives.
        self.flush()?;
        self.disk.begin_merge(from, into).map_err(|error| Failure::new("begin the merge", error))
    }

    /// Copies everything; returns the number of bytes copied. `each` receives the progress, and ends the copying by
    /// returning a failure. If it ends early for any reason, the chain is valid, and the same merge continues with the
    /// rest.
    pub fn copy_all(
        &mut self,
        from: usize,
        into: usize,
        mut each: impl FnMut(&MergeProgress) -> Result<(), Failure>,
    ) -> Result<u64, Failure> {
        let mut durable = 0;
        // The progress when space last ran out.
        let mut full_at = None;
        loop {
            let Some(progress) = self.disk.merge() else {
                return Err(Failure::new("continue the merge", "its state is no longer known"));
            };
            each(&progress)?;
            match progress.state {
                MergeState::Running if progress.copied - durable >= FLUSH_EVERY => {
                    durable = progress.copied;
                    self.make_durable()?;
                }
                MergeState::Running => self.step_merge()?,
                MergeState::Copied => return Ok(progress.copied),
                // The space that the sources have freed since then may suffice to continue.
                MergeState::Failed(Status::NoSpace) if full_at.is_none_or(|at| progress.done > at) => {
                    full_at = Some(progress.done);
                    durable = progress.copied;
                    self.make_durable()?;
                    self.disk.begin_merge(from, into).map_err(|error| Failure::new("begin the merge", error))?;
                }
                MergeState::Failed(status) => return Err(merge_failed(status)),
            }
        }
    }

    fn step_merge(&mut self) -> Result<(), Failure> {
        self.disk.step_merge(&mut self.engine);
        if self.disk.merge().is_some_and(|progress| progress.busy) { self.step() } else { Ok(()) }
    }

    /// Cancels the merge, and makes durable what it has done.
    pub fn stop_merge(&mut self) -> Result<(), Failure> {
        self.disk.cancel_merge();
        if self.disk.is_broken() { Ok(()) } else { self.make_durable() }
    }

    /// Waits until everything is durable and the space freed by that is deallocated.
    pub fn make_durable(&mut self) -> Result<(), Failure> {
        if self.disk.is_broken() {
            return Err(merge_failed(Status::Refused));
        }
        self.disk.sync(&mut self.engine);
        while self.disk.is_syncing() || !self.disk.is_idle() {
            self.step()?;
        }
        Ok(())
    }

    /// Removes the merged layers from the chain.
    pub fn end_merge(&mut self) -> Result<(), Failure> {
        // Space discarded by the sources is deallocated after a flush, and not while requests are held.
        self.make_durable()?;
        self.disk.quiesce();
        self.make_durable()?;
        self.disk.end_merge().map_err(|error| Failure::new("end the merge", error))?;
        self.disk.resume(&mut self.engine);
        Ok(())
    }
}

fn merge_failed(status: Status) -> Failure {
    let tried = "continue the merge";
    match status {
        Status::NoSpace => Failure::new(tried, "no space is left for the merge target")
            .advise("the chain is valid and its contents are unchanged; free some space and repeat the command"),
        Status::Refused => Failure::new(tried, "a sync has failed, so the disk no longer writes")
            .advise("see the kernel log for the reason; repeat the command to continue where it stopped"),
        Status::Failed | Status::Unsupported | Status::Done => Failure::new(tried, "the storage failed")
            .advise("see the kernel log for the reason; repeat the command to continue where it stopped"),
    }
}
