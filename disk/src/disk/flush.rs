//! Flushes: rounds of data sync, metadata and syncs; and the reclaiming of space that a crash has left.

use super::{Disk, Op, status_of};
use crate::format::Format;
use crate::round::Step;
use crate::{Action, FileError, Io, Status};
use memory::Segments;

/// How far the reclaiming of stray space has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reclaim {
    /// Not begun. What was read at open may be in a cache only, left by a process that was killed; before
    /// space is used again that such metadata has given up, it is synced.
    Start,
    /// That sync is under way. No round begins meanwhile: of two syncs at once, the kernel tells one of a failure,
    /// and the other must not be taken for a success.
    Syncing,
    /// A deallocation is under way.
    Busy,
    /// There was nothing more.
    Done,
}

impl<F: Format> Disk<F> {
    /// Begins a round, if none is under way and there is reason for one.
    pub(super) fn begin_round<I: Io>(&mut self, io: &mut I) {
        let dirty = self.layers.first().map_or(0, |leaf| leaf.format.dirty());
        // A round that failed is tried again when somebody asks for it or as much again has changed, not at once and
        // for ever.
        let much = dirty > self.options.dirty_max.saturating_add(self.dirty_left) && !self.broken;
        let reason = !self.flushes.is_empty() || much;
        if !self.round.is_idle() || !reason || self.reclaim == Reclaim::Syncing {
            return;
        }
        self.flushing = std::mem::take(&mut self.flushes);
        self.round_status = if self.broken { Status::Failed } else { Status::Done };
        if self.broken || (!self.unsynced && dirty == 0) {
            return self.answer_round(io);
        }
        self.unsynced = false;
        let batches = self.leaf().map(Format::seal).unwrap_or_default();
        let step = self.round.begin(batches);
        self.take_step(step, io);
    }

    fn take_step<I: Io>(&mut self, step: Step, io: &mut I) {
        match step {
            Step::Sync => self.push(Op::Sync, self.leaf_file(), Action::SyncData, io),
            Step::Write(batch) => {
                for write in batch {
                    let from = Segments::copy_of(&write.bytes);
                    self.push(Op::Meta, self.leaf_file(), Action::Write { at: write.at, from }, io);
                }
            }
            Step::End { durable } => {
                if let Some(leaf) = self.leaf() {
                    leaf.settled(durable);
                    self.dirty_left = if durable { 0 } else { leaf.dirty() };
                }
                self.answer_round(io);
            }
        }
    }

    fn answer_round<I: Io>(&mut self, io: &mut I) {
        let status = self.round_status;
        for number in std::mem::take(&mut self.flushing) {
            self.fail(number, status);
            self.end(number);
        }
        self.begin_round(io);
    }

    pub(super) fn meta_written<I: Io>(&mut self, result: Result<(), FileError>, io: &mut I) {
        if self.round_status == Status::Done {
            self.round_status = status_of(result);
        }
        if let Some(step) = self.round.written(result.is_ok()) {
            self.take_step(step, io);
        }
    }

    pub(super) fn synced<I: Io>(&mut self, result: Result<(), FileError>, io: &mut I) {
        let step = match result {
            Ok(()) => self.round.synced(),
            Err(_) => {
                // The kernel may have marked the lost pages clean: a sync that succeeds later proves nothing.
                self.broken = true;
                self.round_status = Status::Failed;
                self.round.end(false)
            }
        };
        self.take_step(step, io);
    }

    /// Looks for stray space, once, when the first request comes.
    pub(super) fn begin_reclaim<I: Io>(&mut self, io: &mut I) {
        if self.reclaim != Reclaim::Start {
            return;
        }
        match self.leaf().and_then(Format::reclaim) {
            Some((at, len)) => {
                self.reclaim = Reclaim::Syncing;
                self.push(Op::ReclaimSync { at, len }, self.leaf_file(), Action::SyncData, io);
            }
            None => self.reclaim = Reclaim::Done,
        }
    }

    pub(super) fn reclaim_synced<I: Io>(&mut self, at: u64, len: u64, result: Result<(), FileError>, io: &mut I) {
        if result.is_ok() {
            self.reclaim = Reclaim::Busy;
            self.push(Op::Release { number: None, at }, self.leaf_file(), Action::Deallocate { at, len }, io);
        } else {
            self.broken = true;
            self.reclaim = Reclaim::Done;
        }
        self.begin_round(io);
    }

    pub(super) fn reclaimed<I: Io>(&mut self, io: &mut I) {
        self.reclaim = Reclaim::Done;
        self.reclaim_more(io);
    }

    /// Deallocates the next stray space, one at a time: nobody waits for it.
    pub(super) fn reclaim_more<I: Io>(&mut self, io: &mut I) {
        if self.reclaim != Reclaim::Done || self.broken {
            return;
        }
        if let Some((at, len)) = self.leaf().and_then(Format::reclaim) {
            self.reclaim = Reclaim::Busy;
            self.push(Op::Release { number: None, at }, self.leaf_file(), Action::Deallocate { at, len }, io);
        }
    }
}
