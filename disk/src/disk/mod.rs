//! The waist: every request of every transport passes here, and every rule is checked once.
//!
//! A [`Disk`] is a backing chain of layers, leaf first. It turns requests into file operations and finished operations
//! into answers; each call does what can be done now and returns. Invariants:
//!
//! - every request is answered exactly once;
//! - a mapping becomes visible to readers only after its bytes were written, and durable only in a round;
//! - no operation overlaps a discard, a write of zeroes or a write of parts of blocks: these wait for what is in
//!   flight, and later requests wait for them;
//! - after a failed sync nothing is written any more.
//!
//! # How it is put together
//!
//! Invariants are kept by types that know nothing of [`Disk`], each with its own state: `active` has the requests under
//! way and counts their parts; `overlap` says which requests wait for others; `ops` has the file operations under way;
//! `chain` has the layers (`layer`) and their redo logs; `disk_map` knows where bytes live, and `map_load` who waits
//! for metadata; `routing` says where writes go; `fill` has writes that wait for the bytes around them, `compressed`
//! reads of compressed clusters, both with a `budget` of memory; `rounds` has who waits for a round; `merge` how far a
//! merge is; `damage` which metadata made no sense; `tracker` which blocks have changed since a map of them was begun.
//!
//! [`Disk`] ties them together. This file begins and ends requests; `fast_path` (one operation on one file, as most
//! requests are), `read`, `write`, `discard`, `unaligned` and `flush` do them, `tracking` has them wait for the map of
//! changed blocks, `merge_steps` merges, `layers` changes the chain. None of these calls back: work that can continue
//! is put into a queue (`queue`), and one loop takes it from there ([`Disk::work`]).

mod active;
mod budget;
mod chain;
mod compressed;
mod damage;
mod discard;
mod disk_map;
mod fast_path;
mod fill;
mod flush;
mod layer;
mod layers;
mod map_load;
mod merge;
mod merge_steps;
mod ops;
mod options;
mod overlap;
mod purpose;
mod queue;
mod read;
mod rounds;
mod routing;
mod stages;
mod stamps;
mod tracker;
mod tracking;
mod unaligned;
mod write;

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::format::{Format, Ticket};
use crate::{Action, FileDone, FileId, Geometry, ImageError, ImageErrorKind, Io, Operation, Request, Span, Status};
use active::{Active, PartEnd, Requests};
use chain::Chain;
use compressed::CompressedReads;
use damage::MetDamage;
use disk_map::DiskMap;
use fill::Fills;
use layer::Logged;
use map_load::MapLoader;
use merge::Merge;
use ops::{Ended, Op, Ops};
use overlap::Overlap;
use queue::{Parked, Ready};
use rounds::Rounds;
use routing::WriteRouting;
use tracking::Changes;

pub use damage::{Damage, Damaged};
pub use layer::Layer;
pub use merge::{MergeProgress, MergeState};
pub use options::Options;
pub use stages::Times;
pub use tracker::MapState;

/// Layers in a chain. The Xen tools stop at 30; twice that is more likely a mistake than a chain.
pub const LAYERS_MAX: usize = 60;

/// A virtual disk: a chain of images, and everything that is in flight on it.
#[derive(Debug)]
pub struct Disk<F: Format> {
    chain: Chain<F>,
    options: Options,
    map: DiskMap,
    map_loader: MapLoader,
    routing: WriteRouting,
    active: Requests,
    overlap: Overlap,
    ops: Ops,
    fills: Fills,
    compressed: CompressedReads,
    rounds: Rounds,
    /// Requests whose changes are logged when their files have a new stamp.
    unstamped: Vec<u32>,
    merge: Option<Merge>,
    damage: MetDamage,
    changes: Changes,
    /// Operations that wait for another write to the same cluster, by file and ticket.
    busy: FxHashMap<(FileId, Ticket), Vec<Parked>>,
    /// Work that can continue. Empty between two calls of the disk.
    ready: VecDeque<Ready>,
    /// Some layers have not been scanned for leaked space yet.
    reclaim_due: bool,
}

impl<F: Format> Disk<F> {
    /// A disk over `layers`, leaf first, whose files have the numbers from 0 on in this order. The caller has checked
    /// that they belong together, by what the formats record. Layers may differ in length: one that is shorter than the
    /// layer above it reads as zero behind its end; of a longer one the rest is not seen.
    pub fn new(layers: Vec<F>, options: Options) -> Result<Disk<F>, ImageError> {
        let Some(leaf) = layers.first().map(Format::geometry) else {
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, "a disk needs at least one layer"));
        };
        let geometry = Geometry { block: leaf.block.max(options.block), ..leaf };
        if geometry.block > leaf.block && leaf.len % u64::from(geometry.block) != 0 {
            let what = format!("a disk of {} bytes is not a whole number of {}-byte blocks", leaf.len, geometry.block);
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        if layers.len() > LAYERS_MAX {
            let what = format!("a chain of {} layers is longer than the {LAYERS_MAX} that are allowed", layers.len());
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        let layers = (0..).map(FileId).zip(layers).map(|(file, format)| Layer::new(file, format)).collect();
        let disk = Disk {
            chain: Chain::new(layers, geometry),
            options,
            map: DiskMap::new(geometry.len, options.map_bytes),
            map_loader: MapLoader::default(),
            routing: WriteRouting::default(),
            active: Requests::with_capacity(options.requests),
            overlap: Overlap::default(),
            ops: Ops::with_capacity(options.requests),
            fills: Fills::new(options.flight_bytes / 2),
            compressed: CompressedReads::new(options.flight_bytes / 2),
            rounds: Rounds::new(),
            unstamped: Vec::new(),
            merge: None,
            damage: MetDamage::default(),
            changes: Changes::default(),
            busy: FxHashMap::default(),
            ready: VecDeque::new(),
            reclaim_due: true,
        };
        for (depth, layer) in disk.layers().iter().enumerate() {
            disk.check_block(layer.format.geometry(), &format!("layer {depth}"))?;
        }
        Ok(disk)
    }

    /// Size and limits.
    pub fn geometry(&self) -> Geometry {
        self.chain.geometry()
    }

    /// The layers, leaf first.
    pub fn layers(&self) -> &[Layer<F>] {
        self.chain.layers()
    }

    /// Whether a sync has failed. Then nothing is written any more until the image is opened again.
    pub fn is_broken(&self) -> bool {
        self.chain.is_broken()
    }

    /// Requests that were submitted and have not been handed back by [`Disk::answer`].
    pub fn in_flight(&self) -> usize {
        let of_merge = self.merge.as_ref().is_some_and(Merge::has_active_chunk);
        self.active.len() - usize::from(of_merge) + self.overlap.len() + self.active.answers()
    }

    /// Whether no file operation is under way either.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.ops.len() == 0
    }

    /// Starts a request.
    pub fn submit<I: Io>(&mut self, request: Request, io: &mut I) {
        if self.reclaim_due {
            self.begin_reclaim(io);
        }
        if let Some(merge) = &mut self.merge {
            merge.guest_is_busy();
        }
        let operation = request.operation();
        if self.chain.is_broken() && (operation.is_write() || operation == Operation::Flush) {
            let number = self.active.insert(Active::new(request, self.routing.epoch()));
            self.active.fail(number, Status::Refused);
            self.active.end(number);
        } else if self.overlap.must_wait(&request, &self.active) {
            self.overlap.wait(request);
        } else if self.changes.admit(&request) {
            self.start(request, io);
        } else {
            self.wait_for_map(request, io);
        }
        self.work(io);
    }

    /// Completes a file operation.
    pub fn settle<I: Io>(&mut self, done: FileDone, io: &mut I) {
        match self.ops.ended(done.op.id) {
            Ended::Request(number) => {
                self.fast_ended(number, done, io);
                self.work(io);
            }
            Ended::Op(op) => {
                self.complete(op, done, io);
                self.work_all(io);
            }
        }
    }

    /// Pushes again what a full engine has refused. To be called after reaping.
    pub fn retry<I: Io>(&mut self, io: &mut I) {
        self.ops.retry(io);
    }

    /// The next request that has ended, to be completed by its transport.
    pub fn answer(&mut self) -> Option<(Request, Status)> {
        self.active.answer().map(|(request, status, _)| (request, status))
    }

    /// The same, with what became of the request's time.
    #[inline(always)]
    pub fn answer_with_times(&mut self) -> Option<(Request, Status, &Times)> {
        self.active.answer()
    }

    /// From now on the caller passes the time in the three calls below. A disk without times works as well, and keeps
    /// no state for them.
    pub fn keep_times(&mut self) {
        self.active.waiting.time();
    }

    /// Whether something was pushed since [`Disk::submitted_at`].
    #[inline(always)]
    pub fn has_pushed(&self) -> bool {
        self.active.waiting.has_pushed()
    }

    /// The engine is about to submit what was pushed. Calls `each` with the slots of their requests.
    #[inline(always)]
    pub fn submitted_at(&mut self, now: u64, each: impl FnMut(u16)) {
        if self.ops.are_all_pushed() {
            self.active.waiting.submitted_at(now, each);
        } else {
            self.active.waiting.queued_at(now);
        }
    }

    /// Operations that are settled from now on count as ended at `now`.
    #[inline(always)]
    pub fn ended_at(&mut self, now: u64) {
        self.active.waiting.ended_at(now);
    }

    /// Takes the damage that failed a request for `span`; `None` if it was taken already. It may lie outside of `span`:
    /// the bytes around a write have to be read.
    pub fn take_damage(&mut self, span: Span) -> Option<Damage> {
        self.damage.take(span)
    }

    /// Whether enough was cached since [`Disk::drop_caches`] that an idle disk should free it. A guest that does little
    /// from time to time keeps its caches, and nothing wakes up for them.
    pub fn is_trim_due(&self) -> bool {
        self.map.cached_bytes() > self.options.trim_bytes
    }

    /// Drops everything that can be loaded again. What is not durable, or about to change, stays.
    pub fn drop_caches(&mut self) {
        self.map.clear();
        for layer in self.chain.layers_mut() {
            layer.format.drop_caches();
        }
    }

    /// Starts a request that need not wait.
    #[inline(always)]
    fn start<I: Io>(&mut self, request: Request, io: &mut I) {
        match self.fast_place(&request) {
            Some(place) => self.start_fast(request, place, io),
            None => self.start_in_pieces(request, io),
        }
    }

    // Not inlined: it would be most of `start`.
    #[inline(never)]
    fn start_in_pieces<I: Io>(&mut self, request: Request, io: &mut I) {
        let number = self.active.insert(Active::new(request, self.routing.epoch()));
        self.begin(number, io);
    }

    /// Begins a request that is among the active ones, part by part.
    fn begin<I: Io>(&mut self, number: u32, io: &mut I) {
        let request = &self.active.get(number).request;
        let (operation, span) = (request.operation(), request.span());
        self.overlap.begun(operation);
        self.run(number, span, io);
        self.part_ended(number, Status::Done);
    }

    /// Continues a request from `rest` on.
    fn run<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let active = self.active.get(number);
        let of_merge = active.of_merge;
        match active.request.operation() {
            // It had to wait, and a sync has failed since.
            operation if self.chain.is_broken() && operation.is_write() => self.active.fail(number, Status::Refused),
            _ if of_merge => self.run_merge_chunk(number, rest, io),
            Operation::Read => self.read(number, rest, io),
            Operation::Write { .. } => self.write(number, rest, io),
            Operation::Patch { .. } | Operation::WriteZeroes { .. } if active.request.unaligned().is_some() => {
                self.run_unaligned(number, rest, io);
            }
            Operation::Patch { .. } => self.write(number, rest, io),
            Operation::Discard => self.discard(number, rest, io),
            Operation::WriteZeroes { free, .. } => self.write_zeroes(number, rest, free, io),
            Operation::Extents { depths } => self.report_extents(number, rest, depths, io),
            Operation::Flush => {}
        }
    }

    /// Does what is to be done after an operation.
    fn complete<I: Io>(&mut self, op: Op, done: FileDone, io: &mut I) {
        let file = done.op.file;
        if let Some(number) = self.request_of(&op) {
            self.active.waiting.wait_ended(number);
        }
        self.note_reach(&op, &done);
        match op {
            Op::Transfer { number, ticket } => {
                let wrote = matches!(done.op.action, Action::Write { .. });
                self.transferred(number, file, ticket, wrote, done.result, io);
            }
            Op::Filled { number, ticket, bytes } => self.filled(number, ticket, bytes, done, io),
            Op::Zero { number, ticket } => self.zeroed(number, ticket, done, io),
            Op::Trim { number } => self.trimmed(number, done, io),
            Op::Release { number, at } => self.released(number, file, at, done.result, io),
            Op::Fill { fill } => self.fill_read(fill, Status::of(done.result), io),
            Op::ReadCompressed { begin } => self.compressed_read(begin, done, io),
            Op::Load { block } => self.loaded(block, done, io),
            Op::Meta => self.meta_written(done.result, io),
            Op::Stamp => self.stamped(file, done.result),
            Op::Sync => self.synced(file, done.result, io),
            Op::MapWrite | Op::MapSync => self.map_op_ended(&op, file, done.result, io),
            Op::ReclaimSync { range } => self.reclaim_synced((file, range), done.result, io),
        }
    }

    /// Does all work that can continue, after a call that has given back no memory.
    #[inline(always)]
    fn work<I: Io>(&mut self, io: &mut I) {
        if !self.ready.is_empty() || self.rounds.is_due() || self.overlap.is_due() {
            self.work_all(io);
        }
    }

    /// Does all work that can continue. Operations already under way come first, then those that wait for a turn or for
    /// memory, then a round, and last requests that have not begun.
    #[inline(never)]
    fn work_all<I: Io>(&mut self, io: &mut I) {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                self.go_on(ready, io);
            } else if let Some(parked) = self.map_loader.next() {
                let number = self.request_of_parked(parked);
                self.active.waiting.wait_ended(number);
                self.go_on(Ready::Parked(parked), io);
            } else if let Some(begin) = self.compressed.next() {
                self.begin_compressed_read(begin, io);
            } else if let Some(fill) = self.fills.next() {
                self.go_on_filling(fill, io);
            } else if self.rounds.take_due() && self.begin_round(io) {
                // Operations that it has answered or parked may continue.
            } else if let Some(waiting) = self.overlap.take_due() {
                self.start_waiting(waiting, io);
            } else {
                return;
            }
        }
    }

    fn go_on<I: Io>(&mut self, ready: Ready, io: &mut I) {
        match ready {
            Ready::Parked(Parked::Request { number, rest }) => {
                self.run(number, rest, io);
                self.part_ended(number, Status::Done);
            }
            Ready::Parked(Parked::Fill { fill, .. }) => self.resume_fill(fill, io),
            Ready::Loaded { at } => self.load_ended(at),
        }
    }

    /// Starts those of the waiting requests that need not wait any more.
    // Not inlined: it would be most of `work_all`.
    #[inline(never)]
    fn start_waiting<I: Io>(&mut self, waiting: VecDeque<Request>, io: &mut I) {
        self.start_merge_chunk(io);
        for request in waiting {
            if self.overlap.must_wait(&request, &self.active) || !self.changes.admit(&request) {
                self.overlap.wait(request);
            } else {
                self.start(request, io);
            }
        }
        self.record_changes(io);
    }

    /// Counts what is parked as a part of its request, or as a read of its fill.
    fn set_aside(&mut self, parked: Parked) {
        match parked {
            Parked::Request { number, .. } => self.active.part_begun(number),
            Parked::Fill { fill, .. } => self.fills.get(fill).read_begun(),
        }
    }

    /// A parked operation need not wait any more.
    fn go_on_soon(&mut self, parked: Parked) {
        self.ready.push_back(Ready::Parked(parked));
    }

    /// Pushes an operation that is a part of a request.
    fn push_part<I: Io>(&mut self, number: u32, op: Op, file: FileId, action: Action, io: &mut I) {
        self.active.part_begun(number);
        self.active.waiting.wait_begun(number);
        self.ops.push(op, file, action, io);
    }

    /// Counts a part of a request that has ended. With its last part the request ends, unless there is another stage.
    fn part_ended(&mut self, number: u32, status: Status) {
        match self.active.part_ended(number, status) {
            PartEnd::UnderWay => {}
            PartEnd::Split(rest) => self.go_on_soon(Parked::Request { number, rest }),
            PartEnd::Last => match self.next_stage(number) {
                Some(rest) => {
                    let parked = Parked::Request { number, rest };
                    self.set_aside(parked);
                    self.go_on_soon(parked);
                }
                None => {
                    self.quiet(number);
                    self.rounds.consider();
                }
            },
        }
    }

    /// Returns the span of the next stage of a request, of which nothing is under way: a chunk of a merge has several
    /// stages, and a write of parts of blocks reads the blocks at its ends first.
    fn next_stage(&mut self, number: u32) -> Option<Span> {
        let (of_merge, failed) = (self.active.get(number).of_merge, self.active.has_failed(number));
        if of_merge { self.merge_mut().next_stage(failed) } else { self.active.edges_read(number) }
    }

    /// Ends a request of which nothing is under way any more, unless it must be durable first.
    #[inline(always)]
    fn quiet(&mut self, number: u32) {
        let active = self.active.get(number);
        let operation = active.request.operation();
        let done = active.status == Status::Done;
        let durable = match operation {
            Operation::Flush => true,
            Operation::Write { durable } | Operation::Patch { durable } => durable,
            Operation::WriteZeroes { durable, .. } => durable,
            Operation::Read | Operation::Discard | Operation::Extents { .. } => false,
        };
        let is_to_log = self.chain.is_log_due() && operation.is_write() && !active.of_merge;
        let logged = if is_to_log { self.chain.log_changes() } else { Logged::All };
        if logged == Logged::Waits && done && !durable {
            return self.wait_for_stamps(number);
        }
        if (durable || logged != Logged::All) && done {
            self.active.waiting.wait_begun(number);
            self.rounds.join(number);
        } else {
            self.end(number);
        }
    }

    /// Answers a request.
    #[inline(always)]
    fn end(&mut self, number: u32) {
        let active = self.active.get(number);
        let operation = active.request.operation();
        if active.of_merge || (active.retry_without_merge && active.status == Status::NoSpace) {
            self.leave_unanswered(number);
        } else {
            self.active.end(number);
        }
        if self.merge.is_some() {
            self.leave_merge();
        }
        self.overlap.ended(operation);
    }

    /// Ends a merge's chunk, or starts a request over for which a merge's target has no space.
    fn leave_unanswered(&mut self, number: u32) {
        let mut active = self.active.remove(number);
        if active.of_merge {
            self.end_merge_chunk(active.status);
        } else {
            active.request.at_limit = false;
            self.begin_draining();
            self.overlap.wait(active.request);
        }
    }
}

#[cfg(test)]
mod test;
