//! Merging layers into the one below them, while the guest goes on.
//!
//! Knows which chunks are merged, where the guest's writes go meanwhile, and how a merge begins and ends; `merge_chunk`
//! knows how one chunk is done. Knows nothing of clocks and rates: the caller of [`Disk::step_merge`] sets the pace.
//! Keeps: at every moment the chain reads as the guest left it, and so does every chain that a power loss leaves
//! (decision 0006).
//!
//! # What is durable when
//!
//! Let T be the target, S1 to Sn the sources from the deepest up, g a chunk, C what the sources and T show in g when
//! the sources are seen without the layers above them.
//!
//! 1. Nothing in flight overlaps g, and new requests wait. C is written to T and committed. *Power loss:* T holds any
//!    part of C, but a source holds the same above it; elsewhere T has what it had (a fill writes the same bytes
//!    again). The chain reads C, less what was never flushed.
//! 2. In memory, S1 to Sn forget g, all at once: readers of g still wait. *Power loss:* as before.
//! 3. g is merged. The guest's writes to g go to T if the leaf is among the sources. *Power loss:* S1 to Sn still hold
//!    g and hide these writes, none of which was flushed.
//! 4. A round seals T, S1, ..., Sn at one moment. The seal of a source that has forgotten g comes with a seal of T that
//!    has C, and every write to g that was answered before.
//! 5. T is durable. *Power loss:* the sources hide it in g and hold the same, less what was not flushed.
//! 6. S1, then S2, up to Sn are durable. *Power loss after Sk:* what S1 to Sk showed in g is in T, and Sk+1 to Sn hide
//!    as much of it as they did. Were an upper source first, it would expose a lower one that it hides.
//! 7. The space of what was forgotten is deallocated and reused.
//!
//! # Where the guest's writes go
//!
//! With the leaf among the sources a chunk is undecided, the leaf's, or merged. Its first write or its merge decides,
//! once; it becomes merged only while nothing in flight overlaps it.
//!
//! - *A write to the leaf is in flight when the chunk's merge begins:* the merge waits for it, and copies it.
//! - *A write comes while the chunk is being merged:* it waits, is routed afterwards, and goes to T. It cannot overtake
//!   the copy.
//! - *Two writes to one chunk* go to the same layer, so that its format sees both where they share a cluster.
//! - *A write from before the merge is in an undecided chunk,* with its commit in the leaf still to come: the chunk is
//!   the leaf's. So are the later chunks of that write.
//! - *A write to an undecided chunk of which no source has anything allocated:* there is nothing to copy, and nothing
//!   hides the write. The chunk is merged, the write goes to T, and its fill is read as a reader would: from T and
//!   below.
//! - *A merge that fails or is cancelled* decides no more chunks. The merged ones stay T's until nothing at all is in
//!   flight: a write to the leaf would copy a cluster from T to which another write is under way. Then the whole disk
//!   is the leaf's again, and a new merge starts with nothing decided.
//! - *A write for which the target has no space:* the merge has failed. The write is not answered. It starts over when
//!   nothing at all is in flight, and new requests wait for that. The whole disk is the leaf's then, which may have the
//!   space, as it would have had without the merge.
//! - *A fill of a write to the leaf*, with the leaf not among the sources, stays inside the chunk of its write, so the
//!   chunk's merge waits for it as for the write.

use super::merge_chunk::MergeChunk;
use super::{Disk, Missing, Obstacle};
use crate::chain_map::Location;
use crate::chain_map::{CHUNK, ChainMap};
use crate::format::{Committed, Format};
use crate::size::in_memory;
use crate::{FileId, ImageError, ImageErrorKind, Io, Layer, Span, Status};

/// Chunks without anything to merge that one step passes over: a disk of 2 TiB has a million chunks.
const EMPTY_MAX: usize = 256;
/// Bytes that are routed at once: the largest block of a VHD, so that a discard of a whole block is seen as such.
const ALIKE_MAX: u64 = 16 << 20;

/// How far a merge has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeState {
    /// There is more to do.
    Running,
    /// The sources hold nothing any more: [`Disk::end_merge`] comes next.
    Copied,
    /// It has stopped; the chain is valid, and [`Disk::begin_merge`] continues it. The target has no space, the storage
    /// or the disk has failed, or a source cannot forget.
    Failed(Status),
}

/// A merge under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeProgress {
    /// The first layer that is merged.
    pub from: usize,
    /// The layer it is merged into.
    pub into: usize,
    /// Bytes of the disk that are done.
    pub done: u64,
    /// Bytes of the disk in all.
    pub len: u64,
    /// Bytes written to the target.
    pub copied: u64,
    /// Whether a chunk is being merged or waits for requests, or the target grows.
    pub busy: bool,
    /// Its state.
    pub state: MergeState,
}

/// A merge, until it has ended or been cancelled.
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
    /// Whether the guest was busy before the current chunk, and since.
    pub guest_before: bool,
    pub guest_now: bool,
    /// It was cancelled.
    cancelled: bool,
    /// A round was asked for with which the target grows.
    growth_asked: bool,
    /// The first byte that is not done.
    next: u64,
    /// Where the guest's writes go, with the leaf among the sources.
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

    /// Whether chunks are still being decided.
    fn goes_on(&self) -> bool {
        !self.cancelled && !matches!(self.state, MergeState::Failed(_))
    }

    /// Goes on to the next chunk that is not merged.
    fn advance(&mut self) {
        while self.next < self.len && self.is_merged(self.next) {
            self.next += CHUNK;
        }
        if self.next >= self.len && self.state == MergeState::Running {
            self.state = MergeState::Copied;
        }
    }

    /// Records the end of a chunk.
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
    /// Begins to merge the layers `from..into`, the uppermost first, into the layer `into`. `from` is 0 if the leaf is
    /// among them. All are open for writing, none is smaller than the one below it, and all grow to the size of the
    /// first (the caller sets the length of a raw image's file). Continues a merge that has failed.
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
        // The deepest first: if it cannot grow, nothing has changed.
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
                    "layer {depth} has {} bytes, the one above it {}: merging would expose what that hides",
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

    /// Begins the next chunk, unless one is under way, the merge has ended or the disk is quiesced. Returns whether it
    /// did.
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
            self.work_all(io);
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

    /// Whether the target has not grown to its size yet: some formats grow with a round only.
    fn is_target_short(&self) -> bool {
        self.merge.as_ref().is_some_and(|merge| self.layer_at(merge.into).format.geometry().len < merge.len)
    }

    /// Asks for the round with which the target grows.
    fn grow_target<I: Io>(&mut self, io: &mut I) {
        let (syncing, broken) = (self.is_syncing(), self.broken);
        let Some(merge) = self.merge.as_mut().filter(|merge| merge.goes_on() && !syncing) else { return };
        if broken || std::mem::replace(&mut merge.growth_asked, true) {
            merge.state = MergeState::Failed(if broken { Status::Refused } else { Status::Failed });
            return;
        }
        self.sync(io);
    }

    /// The chunk that can begin now.
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

    /// Cancels the merge. The chain is valid, and what is merged stays so. A chunk under way ends. The target is not
    /// written to any more once the disk was quiet.
    pub fn cancel_merge(&mut self) {
        self.withdraw_merge_chunk();
        if let Some(merge) = &mut self.merge {
            merge.cancelled = true;
        }
        self.leave_merge();
    }

    /// Takes the sources, which hold nothing any more, out of the chain, and returns them. Only when all is copied, the
    /// disk is quiesced, nothing is in flight and everything is durable.
    pub fn end_merge(&mut self) -> Result<Vec<Layer<F>>, ImageError> {
        let Some((from, into)) = self.merge.as_ref().and_then(|merge| {
            (merge.goes_on() && merge.state == MergeState::Copied).then_some((merge.from, merge.into))
        }) else {
            return Err(ImageError::new(ImageErrorKind::Unsupported, "there is no merge that has copied everything"));
        };
        self.require_clean("the merged layers cannot be taken off the chain")?;
        self.merge = None;
        let sources: Vec<Layer<F>> = self.layers.drain(from..into).collect();
        // The map does not refer to them: it forgot each chunk with its merge, or the sources had nothing of it.
        sources.iter().for_each(|layer| self.compressed.closed(layer.file));
        self.layers_changed();
        Ok(sources)
    }

    /// With nothing in flight, gives the chunks of a merge that has stopped back to the leaf, and drops a cancelled
    /// merge.
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

    /// The file has no space for a request. If the merge is to blame, the request starts over without it.
    pub(super) fn retry_without_merge(&mut self, number: u32, file: FileId) {
        let by_merge = self.merge.as_ref().is_some_and(|merge| merge.routing.is_some() && merge.target == file);
        let active = self.active.get_mut(number);
        active.retry_without_merge |= by_merge && !active.of_merge;
    }

    /// Fails the merge for want of space. New requests wait until nothing is in flight.
    pub(super) fn begin_draining(&mut self) {
        self.withdraw_merge_chunk();
        self.draining = true;
        if let Some(merge) = self.merge.as_mut().filter(|merge| merge.goes_on()) {
            merge.state = MergeState::Failed(Status::NoSpace);
        }
    }

    /// The file that a write to the first bytes of `span` goes to, and how many of them go there.
    pub(super) fn route_write(&mut self, span: Span) -> Result<(FileId, Span), Obstacle> {
        let leaf = self.leaf_file();
        if self.routing().is_none() {
            return Ok((leaf, span));
        }
        let chunk = ChainMap::chunk_of(span.at);
        let merged = self.route(chunk).map_err(|missing| {
            // While the chunk is not in the map, loads for it count as loads of the map.
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

    /// Whether writes to the chunk go to the target. Decides it, if it is not decided yet.
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

    /// Publishes a mapping: readers see what was written to `file`.
    pub(super) fn publish_mapping(&mut self, file: FileId, placed: Committed) {
        let Committed { span, at } = placed;
        if file == self.leaf_file() {
            return self.map.overlay(span, Location::Data { file, at });
        }
        // Below the leaf only where nothing can hide it: in a merged chunk. A mapping may be larger than what was
        // written; elsewhere the map is loaded again.
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
