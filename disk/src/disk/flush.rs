//! Flushes: rounds that make every layer durable that was written to; and the reclaiming of leaked space.
//!
//! Carries out the steps of a round (`rounds`, `crate::round`). Keeps, for each layer by itself: no failed sync is
//! taken for a success, and nothing is deallocated that a power loss could bring back.

use memory::Segments;

use super::Disk;
use super::layer::{Layer, Reclaim};
use super::ops::Op;
use super::queue::Parked;
use crate::format::Format;
use crate::round::Step;
use crate::{Action, FileError, FileId, FileRange, Io, Span, Status};

/// A discard waits when this many times the metadata that begins a round has changed: a round is under way meanwhile.
const DIRTY_TIMES: usize = 4;

impl<F: Format> Disk<F> {
    /// Makes everything durable that has been written until now, as a flush does. [`Disk::is_clean`] tells whether it
    /// has succeeded, once [`Disk::is_syncing`] no longer holds.
    pub fn sync<I: Io>(&mut self, io: &mut I) {
        self.rounds.ask();
        self.work_all(io);
    }

    /// Whether a round is under way, or about to begin.
    pub fn is_syncing(&self) -> bool {
        self.rounds.is_syncing()
    }

    /// Whether everything that was ever written is durable.
    pub fn is_clean(&self) -> bool {
        !self.chain.is_broken() && !self.is_syncing() && !self.chain.writers().any(Layer::is_dirty)
    }

    /// How the last round ended, if none is under way.
    pub fn last_round(&self) -> Status {
        self.rounds.status()
    }

    /// Begins a round, if there is a reason and none is under way. Returns whether it has.
    pub(super) fn begin_round<I: Io>(&mut self, io: &mut I) -> bool {
        let broken = self.chain.is_broken();
        if !self.have_stamps(io) {
            return false;
        }
        let is_much_dirty = |layer: &Layer<F>| layer.is_much_dirty(self.options.dirty_max);
        let begins = self.rounds.may_begin(|| !broken && self.chain.writers().any(is_much_dirty));
        if begins {
            let sealed = (!broken).then(|| self.chain.seal());
            let step = self.rounds.begin(sealed);
            self.take_steps(step, io);
        }
        begins
    }

    /// Takes the steps of a round up to the next one that must be waited for.
    fn take_steps<I: Io>(&mut self, mut step: Step, io: &mut I) {
        loop {
            match step {
                Step::Sync(file) => return self.ops.push(Op::Sync, file, Action::SyncData, io),
                Step::Write(file, batch) => {
                    for write in batch {
                        self.map.cached(write.bytes.len());
                        let from = Segments::copy_of(&write.bytes);
                        self.ops.push(Op::Meta, file, Action::Write { at: write.at, from }, io);
                    }
                    return;
                }
                Step::Settle { file, durable } => {
                    self.settle_layer(file, durable);
                    step = self.rounds.next();
                }
                Step::End => return self.answer_round(io),
            }
        }
    }

    /// A write of metadata has ended.
    pub(super) fn meta_written<I: Io>(&mut self, result: Result<(), FileError>, io: &mut I) {
        if let Some(step) = self.rounds.written(Status::of(result)) {
            self.take_steps(step, io);
        }
    }

    /// A sync of a round has ended.
    pub(super) fn synced<I: Io>(&mut self, file: FileId, result: Result<(), FileError>, io: &mut I) {
        if result.is_err() {
            self.chain.sync_failed(file);
        }
        let step = self.rounds.synced(result.is_ok());
        self.take_steps(step, io);
    }

    fn settle_layer(&mut self, file: FileId, durable: bool) {
        if self.chain.of(file).settled(durable) {
            self.layer_grown(file);
        }
        self.freeze_if_durable(self.chain.depth_of(file));
    }

    /// Answers the flushes that the round was for, and continues what waited for its end.
    fn answer_round<I: Io>(&mut self, io: &mut I) {
        let status = self.rounds.status();
        let (flushes, parked) = self.rounds.end();
        for number in flushes {
            self.active.waiting.wait_ended(number);
            self.active.fail(number, status);
            self.end(number);
        }
        for parked in parked {
            match parked {
                Parked::Request { number, .. } if status != Status::Done => self.part_ended(number, status),
                _ => self.go_on_soon(parked),
            }
        }
        self.reclaim_more(io);
    }

    /// Parks the rest of a request until a round has ended, if too much metadata has changed. For requests that change
    /// metadata and move no data: nothing else keeps them from changing all there is at once.
    pub(super) fn is_throttled(&mut self, number: u32, rest: Span) -> bool {
        let most = self.options.dirty_max.saturating_mul(DIRTY_TIMES);
        if self.chain.is_broken() || !self.chain.writers().any(|layer| layer.format.dirty() > most) {
            return false;
        }
        let parked = Parked::Request { number, rest };
        self.set_aside(parked);
        self.rounds.park(parked);
        true
    }

    /// Scans layers for leaked space that were opened since the last scan, when a request comes. The changes of the
    /// last process come first.
    pub(super) fn begin_reclaim<I: Io>(&mut self, io: &mut I) {
        // A sync that succeeds after one that has failed, perhaps in the last process, does not prove that metadata is
        // durable that no longer refers to the space.
        if !self.reclaim_due || self.is_quiesced() || self.chain.is_broken() || !self.rounds.is_idle() {
            return;
        }
        if self.chain.owes() {
            // After a failed round, as for want of space, only operations that need another round request one, and not
            // every request.
            if self.rounds.status() == Status::Done {
                self.rounds.ask();
            }
            return;
        }
        self.reclaim_due = false;
        for (file, range) in self.chain.reclaim_next(Reclaim::Start, Reclaim::Syncing) {
            self.rounds.reclaim_sync_begun();
            self.ops.push(Op::ReclaimSync { range }, file, Action::SyncData, io);
        }
    }

    /// The sync in front of a first reclaim, of these bytes of the file, has ended.
    pub(super) fn reclaim_synced<I: Io>(
        &mut self,
        (file, range): (FileId, FileRange),
        result: Result<(), FileError>,
        io: &mut I,
    ) {
        self.rounds.reclaim_sync_ended();
        if result.is_err() {
            self.chain.sync_failed(file);
        }
        let proven = result.is_ok() && !self.chain.is_broken();
        self.chain.of(file).upkeep.reclaim = if proven { Reclaim::Busy } else { Reclaim::Done };
        if proven {
            self.release(file, range, io);
        }
    }

    fn release<I: Io>(&mut self, file: FileId, FileRange { at, len }: FileRange, io: &mut I) {
        self.ops.push(Op::Release { number: None, at }, file, Action::Deallocate { at, len }, io);
    }

    /// Leaked space was deallocated.
    pub(super) fn reclaimed<I: Io>(&mut self, file: FileId, io: &mut I) {
        self.chain.of(file).upkeep.reclaim = Reclaim::Done;
        self.reclaim_more(io);
    }

    /// Deallocates the next leaked space of each layer, one at a time, in the background. Not on a quiesced disk: its
    /// caller waits for an end.
    pub(super) fn reclaim_more<I: Io>(&mut self, io: &mut I) {
        if self.chain.is_broken() || self.is_quiesced() {
            return;
        }
        for (file, range) in self.chain.reclaim_next(Reclaim::Done, Reclaim::Busy) {
            self.release(file, range, io);
        }
    }
}
