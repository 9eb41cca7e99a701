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
//! Nothing calls back: what becomes able to go on, because an operation has ended or something was loaded, is put into
//! the queue `ready`, and one loop takes it from there ([`Disk::work`]).
//!
//! Most requests are one operation on one file: `fast_path`. For the others, `map_load` finds where bytes live and
//! waits for metadata; `transfer` reads and writes; `fill` writes what surrounds a write (copy on write); `compressed`
//! reads compressed clusters; `budget` limits the memory of the last two; `unaligned` does requests that are not whole
//! blocks; `discard` does discards, zeroes and reports of allocation. `active` holds the requests under way and
//! `overlap` decides which of them wait for others. `flush` runs the rounds, `logging` the redo logs, which outlive the
//! process. `chain` changes the layers, `merge` merges them, one `merge_chunk` at a time. `cache_trim` frees memory of
//! an idle disk, and `damage` remembers which metadata made no sense.

mod active;
mod budget;
mod cache_trim;
mod chain;
mod compressed;
mod damage;
mod discard;
mod fast_path;
mod fill;
mod flush;
mod logging;
mod map_load;
mod merge;
mod merge_chunk;
mod options;
mod overlap;
mod queue;
mod transfer;
mod unaligned;

use std::collections::{HashMap, VecDeque};

use crate::backlog::Backlog;
use crate::chain_map::ChainMap;
use crate::format::{Format, MetaBlock, Ticket};
use crate::round::Round;
use crate::slab::Slab;
use crate::{
    Action, FileDone, FileId, FileOp, Geometry, ImageError, ImageErrorKind, Io, OpId, Operation, Request, Span, Status,
};
use active::{Active, Requests, parts_max, status_of};
use compressed::CompressedReads;
use fill::Fills;
use map_load::MapLoader;
use merge::Merge;
use overlap::is_exclusive;
use queue::{Missing, Obstacle, Parked, Ready};

pub use chain::Layer;
pub use damage::{Damage, Damaged};
pub use merge::{MergeProgress, MergeState};
pub use options::Options;

/// Layers in a chain. The Xen tools stop at 30; twice that is more likely a mistake than a chain.
pub const LAYERS_MAX: usize = 60;

/// A file operation under way, and what to do when it has ended.
#[derive(Debug)]
enum Op {
    /// Bytes of a request. A write may have a reservation to commit.
    Transfer { number: u32, ticket: Option<Ticket> },
    /// A write together with the bytes around it, and the memory that those take.
    Filled { number: u32, ticket: Option<Ticket>, bytes: u64 },
    /// Zeroes of a request, by deallocation; in place, or to be committed.
    Zero { number: u32, ticket: Option<Ticket> },
    /// A discard deallocates the content of a cluster that stays allocated.
    Trim { number: u32 },
    /// Deallocation of a freed cluster, for a request or by itself.
    Release { number: Option<u32>, at: u64 },
    /// A read of bytes around a write.
    Fill { fill: u32 },
    /// A read of a compressed cluster.
    ReadCompressed { begin: compressed::Begin },
    /// A load of metadata.
    Load { block: MetaBlock },
    /// Metadata of a round.
    Meta,
    /// A sync of a round.
    Sync,
    /// The sync in front of the first reclaim.
    ReclaimSync { at: u64, len: u64 },
}

/// A virtual disk: a chain of images, and everything that is in flight on it.
#[derive(Debug)]
pub struct Disk<F: Format> {
    /// Leaf first.
    layers: Vec<Layer<F>>,
    geometry: Geometry,
    options: Options,
    map: ChainMap,
    /// The file of the leaf, if each byte of the disk lives there at the same offset.
    flat: Option<FileId>,
    active: Requests,
    /// How many of `active` nothing may overlap.
    exclusive: usize,
    ops: Slab<Op>,
    fills: Fills,
    compressed: CompressedReads,
    /// Operations that the engine refused because it was full.
    backlog: Backlog,
    /// What can go on. Empty between two calls of the disk.
    ready: VecDeque<Ready>,
    /// There may be a reason for a round.
    round_due: bool,
    /// Requests that overlap something they must not.
    waiting: VecDeque<Request>,
    /// A request has ended since `waiting` was last gone through.
    ended: bool,
    loads: HashMap<(FileId, u64), Vec<Parked>>,
    /// What waits for another write to the same cluster, by file and ticket.
    busy: HashMap<(FileId, Ticket), Vec<Parked>>,
    map_loader: MapLoader,
    round: Round,
    /// Requests that the next round will answer, and those of the one under way.
    flushes: Vec<u32>,
    flushing: Vec<u32>,
    /// What waits for a round, because too much metadata has changed.
    throttled: Vec<Parked>,
    /// How the current round has failed, if it has.
    round_status: Status,
    /// A round is wanted, though no request asks for it.
    sync_asked: bool,
    /// The layers that can be written to, leaf first.
    writers: Vec<usize>,
    /// Damaged metadata that requests have met, until the caller asks for it.
    damage: VecDeque<Damage>,
    /// Some layers have not been scanned for leaked space yet.
    reclaim_due: bool,
    /// Syncs under way in front of a first reclaim.
    reclaim_syncs: usize,
    /// The disk is quiesced: new requests wait.
    quiesced: bool,
    /// They wait until nothing is in flight, because a merge has no space for one of them.
    draining: bool,
    merge: Option<Merge>,
    /// Bytes of metadata cached since the caches were last dropped.
    cached_bytes: usize,
    /// How often the routing of writes has started anew.
    epoch: u64,
    broken: bool,
    /// Some layer has a redo log.
    logs: bool,
    /// A format may have changed since the last entry in its log, or a log has a gap.
    log_due: bool,
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
        let mut disk = Disk {
            layers: (0..).map(FileId).zip(layers).map(|(file, format)| Layer::new(file, format)).collect(),
            geometry,
            options,
            map: ChainMap::new(geometry.len, options.map_bytes),
            flat: None,
            active: Requests::with_capacity(options.requests),
            exclusive: 0,
            ops: Slab::with_capacity(options.requests),
            fills: Fills::new(options.flight_bytes / 2),
            compressed: CompressedReads::new(options.flight_bytes / 2),
            backlog: Backlog::default(),
            ready: VecDeque::new(),
            round_due: false,
            waiting: VecDeque::new(),
            ended: false,
            loads: HashMap::new(),
            busy: HashMap::new(),
            map_loader: MapLoader::default(),
            round: Round::default(),
            flushes: Vec::new(),
            flushing: Vec::new(),
            throttled: Vec::new(),
            round_status: Status::Done,
            sync_asked: false,
            writers: Vec::new(),
            damage: VecDeque::new(),
            reclaim_due: true,
            reclaim_syncs: 0,
            quiesced: false,
            draining: false,
            merge: None,
            cached_bytes: 0,
            epoch: 0,
            broken: false,
            logs: false,
            log_due: false,
        };
        for (depth, layer) in disk.layers.iter().enumerate() {
            disk.check_block(layer.format.geometry(), &format!("layer {depth}"))?;
        }
        disk.layers_changed();
        Ok(disk)
    }

    /// Size and limits.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The layers, leaf first.
    pub fn layers(&self) -> &[Layer<F>] {
        &self.layers
    }

    /// Whether a sync has failed. Then nothing is written any more until the image is opened again.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Requests that were submitted and have not been handed back by [`Disk::answer`].
    pub fn in_flight(&self) -> usize {
        let active = self.active.len() - usize::from(self.has_merge_chunk());
        active + self.waiting.len() + self.active.answers()
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
            merge.guest_now = true;
        }
        let refused = self.broken && (request.operation().is_write() || request.operation() == Operation::Flush);
        if refused {
            let number = self.active.insert(Active::new(request, self.epoch));
            self.fail(number, Status::Refused);
            self.active.end(number);
        } else if self.must_wait(&request) {
            self.waiting.push_back(request);
        } else {
            self.start(request, io);
            self.work(io);
        }
    }

    /// Completes a file operation.
    pub fn settle<I: Io>(&mut self, done: FileDone, io: &mut I) {
        match fast_path::number_of(done.op.id) {
            Some(number) => {
                self.fast_ended(number, done, io);
                self.work(io);
            }
            None => {
                self.complete_op(done, io);
                self.work_all(io);
            }
        }
    }

    /// Continues what can go on, until nothing can, after a call that has given back no memory.
    #[inline(always)]
    fn work<I: Io>(&mut self, io: &mut I) {
        if !self.ready.is_empty() || self.round_due || self.ended {
            self.work_all(io);
        }
    }

    #[inline(never)]
    fn work_all<I: Io>(&mut self, io: &mut I) {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                self.go_on(ready, io);
            } else if let Some(parked) = self.map_loader.next() {
                self.unpark(parked);
            } else if let Some(begin) = self.compressed.next() {
                self.begin_compressed_read(begin, io);
            } else if let Some(fill) = self.fills.next() {
                self.go_on_filling(fill, io);
            } else if std::mem::take(&mut self.round_due) {
                self.begin_round(io);
            } else if !self.quiesced && std::mem::take(&mut self.ended) {
                self.recheck_waiting(io);
            } else {
                return;
            }
        }
    }

    fn go_on<I: Io>(&mut self, ready: Ready, io: &mut I) {
        match ready {
            Ready::Request { number, rest } => {
                self.run(number, rest, io);
                self.part_ended(number, Status::Done);
            }
            Ready::Fill { fill } => self.resume_fill(fill, io),
            Ready::Loaded { at } => self.load_ended(at),
        }
    }

    fn complete_op<I: Io>(&mut self, done: FileDone, io: &mut I) {
        let file = done.op.file;
        let op = u32::try_from(done.op.id.0).ok().and_then(|id| self.ops.remove(id));
        match op {
            Some(Op::Transfer { number, ticket }) => {
                let wrote = matches!(done.op.action, Action::Write { .. });
                self.transferred(number, file, ticket, wrote, done.result, io);
            }
            Some(Op::Filled { number, ticket, bytes }) => self.filled(number, ticket, bytes, done, io),
            Some(Op::Zero { number, ticket }) => self.zeroed(number, ticket, done, io),
            Some(Op::Trim { number }) => self.trimmed(number, done, io),
            Some(Op::Release { number, at }) => self.released(number, file, at, done.result, io),
            Some(Op::Fill { fill }) => self.fill_read(fill, status_of(done.result), io),
            Some(Op::ReadCompressed { begin }) => self.compressed_read(begin, done, io),
            Some(Op::Load { block }) => self.loaded(block, done, io),
            Some(Op::Meta) => self.meta_written(done.result, io),
            Some(Op::Sync) => self.synced(file, done.result, io),
            Some(Op::ReclaimSync { at, len }) => self.reclaim_synced(file, at, len, done.result, io),
            None => unreachable!("the engine has completed an operation that was never pushed: {:?}", done.op.id),
        }
    }

    /// Pushes again what a full engine has refused. To be called after reaping.
    pub fn retry<I: Io>(&mut self, io: &mut I) {
        self.backlog.retry(io);
    }

    /// The next request that has ended, to be completed by its transport.
    pub fn answer(&mut self) -> Option<(Request, Status)> {
        self.active.answer()
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
        let operation = request.operation();
        let span = request.span();
        if is_exclusive(operation) {
            self.exclusive += 1;
        }
        let number = self.active.insert(Active::new(request, self.epoch));
        self.run(number, span, io);
        self.part_ended(number, Status::Done);
    }

    /// Continues a request from `rest` on.
    fn run<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let active = self.active.get(number);
        let of_merge = active.of_merge;
        match active.request.operation() {
            // It had to wait, and a sync has failed since.
            operation if self.broken && operation.is_write() => self.fail(number, Status::Refused),
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

    /// Counts one more part of a request that is under way.
    fn part_begun(&mut self, number: u32) {
        self.active.get_mut(number).left += 1;
    }

    /// Counts a part of a request that has ended. With its last part the request ends, unless it must be durable first.
    fn part_ended(&mut self, number: u32, status: Status) {
        let active = self.active.get_mut(number);
        active.left -= 1;
        if active.status == Status::Done {
            active.status = status;
        }
        if active.left <= parts_max(active) / 2 {
            if let Some(rest) = active.rest.take() {
                return self.ready.push_back(Ready::Request { number, rest });
            }
        }
        if active.left > 0 {
            return;
        }
        let next = match active.of_merge {
            true => self.next_stage(number),
            false => self.next_of_unaligned(number),
        };
        match next {
            Some(rest) => {
                self.part_begun(number);
                self.ready.push_back(Ready::Request { number, rest });
            }
            None => {
                if self.active.get(number).of_merge {
                    self.end(number)
                } else {
                    self.quiet(number)
                }
                self.round_due = true;
            }
        }
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
        let unlogged = self.log_due && operation.is_write() && !self.log_changes();
        if (durable || unlogged) && done {
            self.flushes.push(number);
        } else {
            self.end(number);
        }
    }

    /// Answers a request.
    #[inline(always)]
    fn end(&mut self, number: u32) {
        let active = self.active.get(number);
        if is_exclusive(active.request.operation()) {
            self.exclusive -= 1;
        }
        if active.of_merge || (active.retry_without_merge && active.status == Status::NoSpace) {
            self.leave_unanswered(number);
        } else {
            self.active.end(number);
        }
        if self.merge.is_some() {
            self.leave_merge();
        }
        self.ended = !self.waiting.is_empty() || self.waiting_merge_chunk().is_some();
    }

    /// Ends a merge's chunk, or starts a request over for which a merge's target has no space.
    fn leave_unanswered(&mut self, number: u32) {
        let mut active = self.active.remove(number);
        if active.of_merge {
            self.end_merge_chunk(active.status);
        } else {
            active.request.at_limit = false;
            self.begin_draining();
            self.waiting.push_back(active.request);
        }
    }

    /// Pushes an operation that is a part of a request.
    fn push_part<I: Io>(&mut self, number: u32, op: Op, file: FileId, action: Action, io: &mut I) {
        self.part_begun(number);
        self.push(op, file, action, io);
    }

    fn push<I: Io>(&mut self, op: Op, file: FileId, action: Action, io: &mut I) {
        let id = OpId(u64::from(self.ops.insert(op)));
        self.push_op(FileOp { id, file, action }, io);
    }

    /// Hands an operation to the engine, behind those that it has refused.
    #[inline(always)]
    fn push_op<I: Io>(&mut self, op: FileOp, io: &mut I) {
        self.backlog.push(op, io);
    }

    /// The file of the leaf.
    fn leaf_file(&self) -> FileId {
        self.layer_at(0).file
    }

    fn format_of(&mut self, file: FileId) -> &mut F {
        &mut self.layer_of(file).format
    }
}

#[cfg(test)]
mod test;
