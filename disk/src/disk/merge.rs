//! Merging layers into the one below them, while the guest goes on.
//!
//! Knows which chunks are merged, where the guest's writes go meanwhile, and how a merge begins and ends; `chunk` how one
//! chunk is done. Knows nothing of clocks and rates: whoever calls [`Disk::step_merge`] paces. Keeps: at every moment the
//! chain reads as the guest left it, and so does every chain that a power loss leaves (decision 0006).
//!
//! # What is durable when
//!
//! Let T be the target, S1 to Sn the sources from the deepest up, g a chunk, C what is visible of the sources and of T
//! in g when the sources are held apart from the guest.
//!
//! 1. Nothing in flight overlaps g, and what comes waits. C is written to T and committed. *Power loss:* T holds any part
//!    of C, where a source holds the same above it; elsewhere T has what it had (what a fill takes over is the same
//!    bytes). The chain reads C, less what was never flushed.
//! 2. In memory, S1 to Sn forget g, at once as far as anyone can see: readers of g still wait. *Power loss:* as before.
//! 3. g is merged. The guest's writes to g go to T if the leaf is among the sources. *Power loss:* S1 to Sn still hold g
//!    and hide these writes, none of which was flushed.
//! 4. A round seals T, S1, ..., Sn at one moment. The seal of a source that has forgotten g comes with a seal of T that has
//!    C, and with every write to g that was answered before.
//! 5. T is durable. *Power loss:* the sources hide it in g and hold the same but for what was not flushed.
//! 6. S1, then S2, up to Sn are durable. *Power loss after Sk:* what S1 to Sk showed in g is in T, and Sk+1 to Sn hide as
//!    much of it as they did. Were an upper source first, a lower one would come to light that it hides.
//! 7. The places that were forgotten are deallocated and used again.
//!
//! # What the guest's writes may meet
//!
//! With the leaf among the sources a chunk is undecided, the leaf's, or merged; it is decided by its first write or by its
//! chunk, once, and the first two become merged only while nothing in flight overlaps the chunk.
//!
//! - *A write to the leaf in flight when the chunk begins:* the chunk waits for it, and copies it.
//! - *A write while the chunk is under way:* it waits, is decided afterwards, and goes to T. It cannot overtake the copy.
//! - *Two writes to one chunk:* they go to the same layer, so that a cluster they share is seen to by that layer's format.
//! - *A write from before the merge in an undecided chunk,* whose commit in the leaf is still to come: the chunk is the
//!   leaf's. So are the later chunks of that write.
//! - *A write to an undecided chunk of which no source holds anything:* there is nothing to copy and nothing to hide it.
//!   The chunk is merged, this write goes to T, and the fill it needs is read as a reader would: from T and below.
//! - *A merge that fails or is cancelled* decides no more chunks. The merged ones stay T's until nothing at all is in
//!   flight: a write to the leaf would take over a cluster from T to which another write is under way. Then all of the
//!   disk is the leaf's again, and a new merge begins with nothing decided.
//! - *A write for which the target has no space:* the merge has failed. The write is not answered: it is done again when
//!   nothing at all is in flight, and everything that comes waits for that. All of the disk is the leaf's then, which may
//!   have the space, as it would have had without the merge.
//! - *A fill of a write to the leaf*, with the leaf not among the sources: it stays inside the chunk of its write, so the
//!   chunk waits for it as for the write.

use super::merge_chunk::MergeChunk;
use super::{Disk, Missing, Obstacle};
use crate::chain_map::Location;
use crate::chain_map::{CHUNK, ChainMap};
use crate::format::{Committed, Format};
use crate::size::in_memory;
use crate::{FileId, ImageError, ImageErrorKind, Io, Layer, Span, Status};

/// Chunks of which no source holds anything that one step passes over: a disk of 2 TiB has a million.
const EMPTY_MAX: usize = 256;
/// Bytes in a row for which a request is told at once where it goes: the largest block of a VHD, so that a discard of a
/// whole one is seen as such.
const ALIKE_MAX: u64 = 16 << 20;

/// How far a merge has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeState {
    /// There is more to do.
    Running,
    /// The sources hold nothing any more: [`Disk::end_merge`].
    Copied,
    /// It has stopped, the chain is valid, and [`Disk::begin_merge`] goes on: no space in the target, or the storage or
    /// the disk has failed, or a source cannot forget.
    Failed(Status),
}

/// A merge under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeProgress {
    /// The first layer that is merged.
    pub from: usize,
    /// The layer it is merged into.
    pub into: usize,
    /// Bytes of the disk that were visited.
    pub done: u64,
    /// Bytes of the disk in all.
    pub len: u64,
    /// Bytes written to the target.
    pub copied: u64,
    /// Whether a chunk is under way or waits for requests to end, or the target grows.
    pub busy: bool,
    /// How far it has come.
    pub state: MergeState,
}

/// A merge, until it has ended or nothing is left of it.
#[derive(Debug)]
pub(super) struct Merge {
    /// Depths; the layers do not change during a merge.
    pub from: usize,
    pub into: usize,
    pub target: FileId,
    pub len: u64,
    pub copied: u64,
    pub chunk: Option<MergeChunk>,
    state: MergeState,
    /// Whether the guest has asked for anything between the last two chunks, and since.
    pub guest_before: bool,
    pub guest_now: bool,
    /// Nobody wants it any more.
    cancelled: bool,
    /// A round was asked for with which the target grows.
    growth_asked: bool,
    /// Where to go on.
    next: u64,
    /// With the leaf among the sources: where the guest's writes go.
    routing: Option<WriteRouting>,
}

/// What is decided of the chunks: two bits of each.
#[derive(Debug)]
struct WriteRouting {
    merged: Bits,
    leafs: Bits,
}

#[derive(Debug)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: u64) -> Bits {
        Bits(vec![0; in_memory(count.div_ceil(64))])
    }

    fn has(&self, bit: u64) -> bool {
        self.0.get(in_memory(bit / 64)).is_some_and(|word| word & (1 << (bit % 64)) != 0)
    }

    fn set(&mut self, bit: u64) {
        let Some(word) = self.0.get_mut(in_memory(bit / 64)) else { unreachable!("bit {bit} is behind the end") };
        *word |= 1 << (bit % 64);
    }
}

impl WriteRouting {
    fn new(len: u64) -> WriteRouting {
        let chunks = len.div_ceil(CHUNK);
        WriteRouting { merged: Bits::new(chunks), leafs: Bits::new(chunks) }
    }

    /// Whether the chunk around a byte is merged, if that is decided.
    fn of(&self, at: u64) -> Option<bool> {
        let chunk = at / CHUNK;
        if self.merged.has(chunk) { Some(true) } else { self.leafs.has(chunk).then_some(false) }
    }

    fn route(&mut self, at: u64, merged: bool) {
        if merged { self.merged.set(at / CHUNK) } else { self.leafs.set(at / CHUNK) }
    }
}

impl Merge {
    fn is_merged(&self, at: u64) -> bool {
        self.routing.as_ref().is_some_and(|routing| routing.of(at) == Some(true))
    }

    /// Whether chunks are still decided.
    fn goes_on(&self) -> bool {
        !self.cancelled && !matches!(self.state, MergeState::Failed(_))
    }

    /// Goes to the next chunk that is not merged.
    fn advance(&mut self) {
        while self.next < self.len && self.is_merged(self.next) {
            self.next += CHUNK;
        }
        if self.next >= self.len && self.state == MergeState::Running {
            self.state = MergeState::Copied;
        }
    }

    /// Its chunk has ended.
    pub fn visited(&mut self, chunk: Span, status: Status) {
        if status != Status::Done {
            self.state = MergeState::Failed(status);
            return;
        }
        if let Some(routing) = &mut self.routing {
            routing.route(chunk.at, true);
        }
        self.next = chunk.end();
        self.advance();
    }
}

impl<F: Format> Disk<F> {
    /// Begins to merge the layers `from..into` into the layer `into`, the first of them the uppermost: the leaf if `from`
    /// is 0. All of them are open for writing, none is smaller than the one below it, and they are made as large as the
    /// first (the length of a raw image's file is for the caller to set). A merge that has failed goes on.
    pub fn begin_merge(&mut self, from: usize, into: usize) -> Result<(), ImageError> {
        if let Some(merge) = &self.merge {
            let what = match (merge.goes_on(), (merge.from, merge.into) == (from, into)) {
                (true, _) => "a merge is under way already",
                (false, false) => "another merge has not come to its end",
                (false, true) => return self.resume_merge(),
            };
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        self.check_merge(from, into)?;
        let len = self.layer_at(from).format.geometry().len;
        let (below, count) = (from + 1, into - from);
        self.check_hidden(into, len)?;
        self.may_change();
        // The deepest first: if it cannot be made larger, nothing has changed.
        let mut grown = Vec::new();
        for layer in self.layers.iter_mut().skip(below).take(count).rev() {
            if layer.format.geometry().len < len {
                layer.format.grow(len)?;
                grown.push(layer.file);
            }
        }
        // The map must not say any more that nothing is behind their old ends: a write there may change no metadata.
        grown.into_iter().for_each(|file| self.layer_grown(file));
        let target = self.layer_at(into).file;
        self.epoch += 1;
        let mut merge = Merge {
            from,
            into,
            target,
            len,
            copied: 0,
            chunk: None,
            guest_before: false,
            guest_now: false,
            state: MergeState::Running,
            cancelled: false,
            growth_asked: false,
            next: 0,
            routing: (from == 0).then(|| WriteRouting::new(len)),
        };
        merge.advance();
        self.merge = Some(merge);
        Ok(())
    }

    fn resume_merge(&mut self) -> Result<(), ImageError> {
        self.check_merge_alive()?;
        let merge = self.merge_mut();
        (merge.state, merge.cancelled, merge.growth_asked) = (MergeState::Running, false, false);
        if merge.from == 0 && merge.routing.is_none() {
            merge.routing = Some(WriteRouting::new(merge.len));
            merge.next = 0;
            self.epoch += 1;
        }
        self.merge_mut().advance();
        Ok(())
    }

    fn check_merge_alive(&self) -> Result<(), ImageError> {
        if self.broken {
            return Err(ImageError::new(ImageErrorKind::Storage, "a sync of the disk has failed: nothing is written"));
        }
        Ok(())
    }

    fn check_merge(&self, from: usize, into: usize) -> Result<(), ImageError> {
        self.check_merge_alive()?;
        if from >= into || into >= self.layers.len() {
            let what =
                format!("layers {from} to {into} of a chain of {} cannot be merged into the last", self.layers.len());
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        (from..=into).try_for_each(|depth| self.require_nothing_owed(depth))?;
        let layers = || self.layers.iter().enumerate().take(into + 1).skip(from);
        if let Some((depth, _)) = layers().find(|(_, layer)| layer.closing || layer.format.geometry().read_only) {
            let what = format!("layer {depth} takes part in the merge and is not open for writing");
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        for ((_, upper), (depth, lower)) in layers().zip(layers().skip(1)) {
            let (upper, lower) = (upper.format.geometry(), lower.format.geometry());
            if lower.len > upper.len {
                let what = format!(
                    "layer {depth} has {} bytes, the one above it {}: what that hides would come to light",
                    lower.len, upper.len
                );
                return Err(ImageError::new(ImageErrorKind::Mismatch, what));
            }
            if lower.block > upper.block {
                let what = format!("layer {depth} has blocks of {} bytes, too coarse for the one above", lower.block);
                return Err(ImageError::new(ImageErrorKind::Unsupported, what));
            }
        }
        Ok(())
    }

    /// Begins the next chunk, unless one is under way, the merge has ended or requests are held back; whether it did.
    pub fn step_merge<I: Io>(&mut self, io: &mut I) -> bool {
        if self.is_target_short() {
            self.grow_target(io);
            return false;
        }
        let copied = self.merge.as_ref().map_or(0, |merge| merge.copied);
        let mut begun = false;
        for _ in 0..EMPTY_MAX {
            let Some(chunk) = self.next_chunk() else { break };
            begun = true;
            self.begin_merge_chunk(chunk, io);
            if self.merge.as_ref().is_none_or(|merge| merge.copied != copied) {
                break;
            }
        }
        begun
    }

    /// The merge under way.
    pub(super) fn merge_mut(&mut self) -> &mut Merge {
        let Some(merge) = &mut self.merge else { unreachable!("no merge is under way") };
        merge
    }

    /// The file that the merge under way writes to.
    pub(super) fn merge_target(&self) -> FileId {
        let Some(merge) = &self.merge else { unreachable!("no merge is under way") };
        merge.target
    }

    /// Where the guest's writes go, if a merge of the leaf routes them.
    fn routing(&self) -> Option<&WriteRouting> {
        self.merge.as_ref().and_then(|merge| merge.routing.as_ref())
    }

    /// Whether the target is not as large yet as it is to be: some formats grow with a round only.
    fn is_target_short(&self) -> bool {
        self.merge.as_ref().is_some_and(|merge| self.layer_at(merge.into).format.geometry().len < merge.len)
    }

    /// Sees to it that there is a round with which the target grows.
    fn grow_target<I: Io>(&mut self, io: &mut I) {
        let (syncing, broken) = (self.is_syncing(), self.broken);
        let Some(merge) = self.merge.as_mut().filter(|merge| merge.goes_on() && !syncing) else { return };
        if broken || std::mem::replace(&mut merge.growth_asked, true) {
            merge.state = MergeState::Failed(if broken { Status::Refused } else { Status::Failed });
            return;
        }
        self.sync(io);
    }

    /// The chunk of the chunk that can begin now.
    fn next_chunk(&mut self) -> Option<Span> {
        let (broken, quiesced) = (self.broken, self.quiesced);
        let merge = self.merge.as_mut().filter(|merge| merge.goes_on() && merge.chunk.is_none() && !quiesced)?;
        if broken && merge.state == MergeState::Running {
            merge.state = MergeState::Failed(Status::Refused);
        }
        merge.advance();
        let chunk = ChainMap::chunk_of(merge.next);
        (merge.state == MergeState::Running).then(|| chunk.intersection(Span { at: 0, len: merge.len }))?
    }

    /// How far the merge has come, if there is one.
    pub fn merge(&self) -> Option<MergeProgress> {
        let merge = self.merge.as_ref().filter(|merge| !merge.cancelled)?;
        Some(MergeProgress {
            from: merge.from,
            into: merge.into,
            done: merge.next.min(merge.len),
            len: merge.len,
            copied: merge.copied,
            busy: merge.chunk.is_some() || (self.is_syncing() && self.is_target_short()),
            state: merge.state,
        })
    }

    /// Stops the merge; the chain is valid, and what is merged stays so. A chunk under way ends. The target is written to
    /// no more once the disk was quiet.
    pub fn cancel_merge(&mut self) {
        self.withdraw_merge_chunk();
        if let Some(merge) = &mut self.merge {
            merge.cancelled = true;
        }
        self.leave_merge();
    }

    /// Takes the sources, which hold nothing any more, out of the chain, and hands them back. Only when all is copied,
    /// requests are held back, nothing is in flight and everything durable.
    pub fn end_merge(&mut self) -> Result<Vec<Layer<F>>, ImageError> {
        let Some((from, into)) = self.merge.as_ref().and_then(|merge| {
            (merge.goes_on() && merge.state == MergeState::Copied).then_some((merge.from, merge.into))
        }) else {
            return Err(ImageError::new(ImageErrorKind::Unsupported, "there is no merge that has copied everything"));
        };
        self.require_clean("the merged layers cannot be cached_bytes off the chain")?;
        self.merge = None;
        let sources: Vec<Layer<F>> = self.layers.drain(from..into).collect();
        // The map does not speak of them: each chunk was forgotten there with its chunk, or nothing was in the sources.
        sources.iter().for_each(|layer| self.compressed.closed(layer.file));
        self.layers_changed();
        Ok(sources)
    }

    /// With nothing in flight, the chunks of a merge that has stopped are the leaf's again, and one that was cancelled is
    /// gone.
    pub(super) fn leave_merge(&mut self) {
        if self.active.len() > 0 {
            return;
        }
        self.draining = false;
        match &mut self.merge {
            Some(merge) if merge.cancelled => self.merge = None,
            Some(merge) if !merge.goes_on() => merge.routing = None,
            _ => {}
        }
    }

    /// The file has no space for a request. If that is so because of a merge, it is to be done again without.
    pub(super) fn retry_without_merge(&mut self, number: u32, file: FileId) {
        let by_merge = self.merge.as_ref().is_some_and(|merge| merge.routing.is_some() && merge.target == file);
        let active = self.active.get_mut(number);
        active.retry_without_merge |= by_merge && !active.of_merge;
    }

    /// The merge has failed for want of space; what comes waits until it is left.
    pub(super) fn begin_draining(&mut self) {
        self.withdraw_merge_chunk();
        self.draining = true;
        if let Some(merge) = self.merge.as_mut().filter(|merge| merge.goes_on()) {
            merge.state = MergeState::Failed(Status::NoSpace);
        }
    }

    /// The file that takes a write to the first bytes of `span`, and how many of them.
    pub(super) fn route_write(&mut self, span: Span) -> Result<(FileId, Span), Obstacle> {
        let leaf = self.leaf_file();
        if self.routing().is_none() {
            return Ok((leaf, span));
        }
        let chunk = ChainMap::chunk_of(span.at);
        let merged = self.route(chunk).map_err(|missing| {
            // As long as the chunk is not known, loading for it counts as learning.
            self.map.forget(chunk.at);
            Obstacle::Chunk(missing)
        })?;
        let Some(routing) = self.routing() else { unreachable!("this merge routes no writes") };
        let limit = span.end().min(span.at + ALIKE_MAX);
        let mut end = chunk.end();
        while end < limit && routing.of(end) == Some(merged) {
            end += CHUNK;
        }
        let span = Span { at: span.at, len: end.min(limit) - span.at };
        Ok((if merged { self.merge_target() } else { leaf }, span))
    }

    /// Whether writes to the chunk go to the target; decided now if it is not yet.
    fn route(&mut self, chunk: Span) -> Result<bool, Missing> {
        if let Some(merged) = self.routing().and_then(|routing| routing.of(chunk.at)) {
            return Ok(merged);
        }
        // A target that is still to grow has no space behind its end.
        let may = self.merge_mut().goes_on() && !self.is_target_short() && !self.is_written_since_before_merge(chunk);
        let merged = may && self.allocated_in_sources(chunk)?.is_empty();
        let Some(routing) = &mut self.merge_mut().routing else { unreachable!("this merge routes no writes") };
        routing.route(chunk.at, merged);
        Ok(merged)
    }

    /// Whether a write to the chunk is in flight that began before the merge.
    fn is_written_since_before_merge(&self, chunk: Span) -> bool {
        let mut old = self.active.iter().filter(|active| active.epoch != self.epoch).map(|active| &active.request);
        old.any(|request| request.operation().is_write() && request.span().overlaps(chunk))
    }

    /// Lets readers see what has been written to `file`.
    pub(super) fn publish_mapping(&mut self, file: FileId, placed: Committed) {
        let Committed { span, at } = placed;
        if file == self.leaf_file() {
            return self.map.overlay(span, Location::Data { file, at });
        }
        // Below the leaf only where nothing can be above it: in a chunk that is merged. A place may be larger than what
        // was written; elsewhere the map is to be loaded again.
        let mut begin = span.at;
        while begin < span.end() {
            let chunk = ChainMap::chunk_of(begin);
            let part = chunk.intersection(span).unwrap_or(chunk);
            if self.merge.as_ref().is_some_and(|merge| merge.is_merged(begin)) {
                let place = Location::Data { file, at: at + (begin - span.at) };
                self.map.overlay(part, place);
            } else {
                self.map.forget(begin);
            }
            begin = chunk.end();
        }
    }
}
