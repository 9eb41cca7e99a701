//! The steps of a merge that open the layers below the leaf for writing.
//!
//! Invariant: either all of them are opened, or all are put back as they were.

use super::{Done, Driver};
use crate::process::failure::Failure;
use crate::serve::control::access::{self, Lowered};
use crate::serve::control::work::Work;

impl Driver {
    pub(super) fn open_for_writing(&mut self, last: usize, work: &mut Work<'_>) -> Result<bool, Failure> {
        let opened = self.background(work, |_, work| {
            let closed = access::closed(work, last)?;
            Ok(move || Ok(Done::Opened(access::raise(closed))))
        });
        let Some(Done::Opened(opened)) = opened? else { return Ok(false) };
        self.results.opened = all_or_none(opened, work)?;
        Ok(true)
    }

    pub(super) fn forget_parents(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let forgotten = self.background(work, |results, _| {
            let opened = std::mem::take(&mut results.opened);
            Ok(move || Ok(Done::Forgotten(access::forget_parents(opened))))
        });
        let Some(Done::Forgotten(forgotten)) = forgotten? else { return Ok(false) };
        self.results.raised = all_or_none(forgotten, work)?;
        Ok(true)
    }

    /// Makes the disk use the files that were opened for writing. Nothing may be in flight.
    pub(super) fn use_writable(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        for layer in std::mem::take(&mut self.results.raised) {
            work.engine.replace(layer.id, layer.file)?;
            work.disk.reopen(layer.depth, layer.image)?;
            if let Some(log) = layer.log {
                work.disk.set_log(layer.id, log)?;
            }
        }
        Ok(())
    }
}

/// Returns layers that were opened for writing; if that failed, puts all of them back.
fn all_or_none<T>(opened: Result<Vec<T>, (Failure, Lowered)>, work: &mut Work<'_>) -> Result<Vec<T>, Failure> {
    opened.map_err(|(refusal, lowered)| {
        access::put_back(lowered, work);
        refusal
    })
}
