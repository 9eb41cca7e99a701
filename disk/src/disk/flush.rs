//! Flushes: rounds that make every layer durable that was written to; and the reclaiming of leaked space.
//!
//! Knows what a round must make durable; `round` knows the order. Keeps, for each layer by itself: no failed sync is
//! taken for a success, and nothing is deallocated that a power loss could bring back.

use super::{Disk, Op, Parked, status_of};
use crate::format::Format;
use crate::round::{Part, Step};
use crate::{Action, FileError, FileId, Io, Span, Status};
use memory::Segments;

/// A discard waits when this many times the metadata that begins a round has changed: a round is under way meanwhile.
const DIRTY_TIMES: usize = 4;

/// The state of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Upkeep {
    /// Something was written since the last round began, or may have been before the image was opened.
    pub unsynced: bool,
    /// Changed metadata blocks that a failed round has left.
    pub dirty_left: usize,
    /// Bytes of the redo log that a failed round has left.
    pub log_left: u64,
    /// How far the reclaiming of leaked space has come.
    pub reclaim: Reclaim,
}

impl Upkeep {
    /// Of a layer that has just been opened.
    pub fn new(read_only: bool) -> Upkeep {
        let reclaim = if read_only { Reclaim::Done } else { Reclaim::Start };
        Upkeep { unsynced: !read_only, dirty_left: 0, log_left: 0, reclaim }
    }
}

/// How far the reclaiming of leaked space has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reclaim {
    /// Not begun. Metadata that was read at open may be in a cache only, left by a process that was killed. It is
    /// synced before space is reused that it no longer refers to.
    Start,
    /// That sync is under way. No round begins meanwhile: the kernel reports a failure to one of two concurrent syncs
    /// only, and the other must not be taken for a success.
    Syncing,
    /// A deallocation is under way.
    Busy,
    /// There is nothing more to reclaim.
    Done,
}

impl<F: Format> Disk<F> {
    /// Makes everything durable that has been written until now, as a flush does. [`Disk::is_clean`] tells whether it
    /// has succeeded, once [`Disk::is_syncing`] no longer holds.
    pub fn sync<I: Io>(&mut self, io: &mut I) {
        self.sync_asked = true;
        self.round_due = true;
        self.work_all(io);
    }

    /// Whether a round is under way, or about to begin.
    pub fn is_syncing(&self) -> bool {
        self.sync_asked || !self.round.is_idle()
    }

    /// Whether everything that was ever written is durable.
    pub fn is_clean(&self) -> bool {
        let clean = |&depth: &usize| !self.layer_at(depth).is_dirty();
        !self.broken && !self.is_syncing() && self.writers.iter().all(clean)
    }

    /// How the last round ended, if none is under way.
    pub fn last_round(&self) -> Status {
        self.round_status
    }

    /// Begins a round, if there is a reason and none is under way.
    pub(super) fn begin_round<I: Io>(&mut self, io: &mut I) {
        let reason = !self.flushes.is_empty() || self.sync_asked || self.is_much_dirty();
        if !self.round.is_idle() || !reason || self.reclaim_syncs > 0 {
            return;
        }
        self.sync_asked = false;
        self.flushing = std::mem::take(&mut self.flushes);
        self.round_status = if self.broken { Status::Failed } else { Status::Done };
        let parts = if self.broken { Vec::new() } else { self.seal() };
        let step = self.round.begin(parts);
        self.take_steps(step, io);
    }

    /// Whether so much metadata has changed that it is written unasked. A failed round is retried when a request asks
    /// for it or as much again has changed, not at once and without end.
    fn is_much_dirty(&self) -> bool {
        let much = |&depth: &usize| {
            let layer = self.layer_at(depth);
            layer.format.dirty() > self.options.dirty_max.saturating_add(layer.upkeep.dirty_left) || layer.is_log_full()
        };
        !self.broken && self.writers.iter().any(much)
    }

    /// Seals all layers that were written to, at one moment; the deepest comes first.
    fn seal(&mut self) -> Vec<Part> {
        self.log_changes();
        let mut parts = Vec::new();
        for depth in self.writers.clone().into_iter().rev() {
            let layer = self.layer_at_mut(depth);
            if layer.is_dirty() {
                layer.upkeep.unsynced = false;
                parts.push(Part { file: layer.file, batches: layer.seal() });
            }
        }
        parts
    }

    /// Takes the steps of a round up to the next one that must be waited for.
    fn take_steps<I: Io>(&mut self, mut step: Step, io: &mut I) {
        loop {
            match step {
                Step::Sync(file) => return self.push(Op::Sync, file, Action::SyncData, io),
                Step::Write(file, batch) => {
                    for write in batch {
                        self.cached_bytes += write.bytes.len();
                        let from = Segments::copy_of(&write.bytes);
                        self.push(Op::Meta, file, Action::Write { at: write.at, from }, io);
                    }
                    return;
                }
                Step::Settle { file, durable } => {
                    self.settle_layer(file, durable);
                    step = self.round.next();
                }
                Step::End => return self.answer_round(io),
            }
        }
    }

    fn settle_layer(&mut self, file: FileId, durable: bool) {
        let layer = self.layer_of(file);
        let before = layer.format.geometry().len;
        layer.settled(durable);
        let grown = layer.format.geometry().len != before;
        layer.upkeep.dirty_left = if durable { 0 } else { layer.format.dirty() };
        // The round may not even have come to this layer.
        layer.upkeep.unsynced |= !durable;
        if grown {
            self.layer_grown(file);
        }
        self.freeze_if_durable(self.depth_of(file));
    }

    fn answer_round<I: Io>(&mut self, io: &mut I) {
        let status = self.round_status;
        for number in std::mem::take(&mut self.flushing) {
            self.fail(number, status);
            self.end(number);
        }
        for parked in std::mem::take(&mut self.throttled) {
            if let (Parked::Request { number, .. }, false) = (parked, status == Status::Done) {
                self.part_ended(number, status);
            } else {
                self.unpark(parked);
            }
        }
        self.reclaim_more(io);
        self.round_due = true;
    }

    /// Parks the rest of a request until a round has ended, if too much metadata has changed. For requests that change
    /// metadata and move no data: nothing else keeps them from changing all there is at once.
    pub(super) fn is_throttled(&mut self, number: u32, rest: Span) -> bool {
        let most = self.options.dirty_max.saturating_mul(DIRTY_TIMES);
        let much = |&depth: &usize| self.layer_at(depth).format.dirty() > most;
        if self.broken || !self.writers.iter().any(much) {
            return false;
        }
        self.wait_for_round(Parked::Request { number, rest });
        true
    }

    /// Parks something until a round has ended.
    pub(super) fn wait_for_round(&mut self, parked: Parked) {
        self.set_aside(parked);
        self.throttled.push(parked);
        self.sync_asked = true;
        self.round_due = true;
    }

    pub(super) fn meta_written<I: Io>(&mut self, result: Result<(), FileError>, io: &mut I) {
        if self.round_status == Status::Done {
            self.round_status = status_of(result);
        }
        if let Some(step) = self.round.written(result.is_ok()) {
            self.take_steps(step, io);
        }
    }

    pub(super) fn synced<I: Io>(&mut self, file: FileId, result: Result<(), FileError>, io: &mut I) {
        if result.is_err() {
            self.sync_failed(file);
            self.round_status = Status::Failed;
        }
        let step = self.round.synced(result.is_ok());
        self.take_steps(step, io);
    }

    /// Scans layers for leaked space that were opened since the last scan, when a request comes. The changes of the
    /// last process come first.
    pub(super) fn begin_reclaim<I: Io>(&mut self, io: &mut I) {
        // A sync that succeeds after one that has failed, perhaps in the last process, does not prove that metadata is
        // durable that no longer refers to the space.
        if !self.reclaim_due || self.quiesced || self.broken || !self.round.is_idle() {
            return;
        }
        if self.owes() {
            self.sync_asked = true;
            self.round_due = true;
            return;
        }
        self.reclaim_due = false;
        for depth in self.writers.clone() {
            let layer = self.layer_at_mut(depth);
            if layer.upkeep.reclaim != Reclaim::Start {
                continue;
            }
            layer.upkeep.reclaim = Reclaim::Done;
            if let Some((at, len)) = layer.format.reclaim() {
                layer.upkeep.reclaim = Reclaim::Syncing;
                let file = layer.file;
                self.reclaim_syncs += 1;
                self.push(Op::ReclaimSync { at, len }, file, Action::SyncData, io);
            }
        }
    }

    pub(super) fn reclaim_synced<I: Io>(
        &mut self,
        file: FileId,
        at: u64,
        len: u64,
        result: Result<(), FileError>,
        io: &mut I,
    ) {
        self.reclaim_syncs -= 1;
        if result.is_err() {
            self.sync_failed(file);
        }
        let proven = result.is_ok() && !self.broken;
        self.layer_of(file).upkeep.reclaim = if proven { Reclaim::Busy } else { Reclaim::Done };
        if proven {
            self.push(Op::Release { number: None, at }, file, Action::Deallocate { at, len }, io);
        }
        self.round_due = true;
    }

    pub(super) fn reclaimed<I: Io>(&mut self, file: FileId, io: &mut I) {
        self.layer_of(file).upkeep.reclaim = Reclaim::Done;
        self.reclaim_more(io);
    }

    /// Deallocates the next leaked space of each layer, one at a time, in the background. Not on a quiesced disk: its
    /// caller waits for an end.
    pub(super) fn reclaim_more<I: Io>(&mut self, io: &mut I) {
        if self.broken || self.quiesced {
            return;
        }
        for depth in self.writers.clone() {
            let layer = self.layer_at_mut(depth);
            if layer.upkeep.reclaim != Reclaim::Done || layer.closing {
                continue;
            }
            if let Some((at, len)) = layer.format.reclaim() {
                layer.upkeep.reclaim = Reclaim::Busy;
                let file = layer.file;
                self.push(Op::Release { number: None, at }, file, Action::Deallocate { at, len }, io);
            }
        }
    }
}
