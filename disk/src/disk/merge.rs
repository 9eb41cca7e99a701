//! Merging layers into the one below them, while the guest keeps using the disk.
//!
//! Knows how far a merge is and what its chunk under way holds; `merge_steps` does what is to be done, `routing` says
//! where the guest's writes go meanwhile. Knows nothing of clocks and rates: the caller of
//! [`Disk::step_merge`](super::Disk::step_merge) sets the pace. Keeps: at every moment the chain reads as the guest
//! left it, and so does every chain that a power loss leaves (decision 0006).
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

use std::ops::Range;

use super::chain::Allocated;
use super::routing::WriteRouting;
use crate::chain_map::{CHUNK, ChainMap, Location, Run};
use crate::{DiskOffset, FileId, Span, Status};

/// Bytes that one copy moves while the guest is idle: enough to keep the storage busy.
const COPY_MAX: u64 = 1 << 20;
/// Bytes that one copy moves while the guest is busy: few enough that its next request waits little longer for it.
const COPY_MAX_POLITE: u64 = 64 << 10;

/// How far a merge has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeState {
    /// There is more to do.
    Running,
    /// The sources hold nothing any more: [`Disk::end_merge`](super::Disk::end_merge) comes next.
    Copied,
    /// It has stopped; the chain is valid, and [`Disk::begin_merge`](super::Disk::begin_merge) continues it. The target
    /// has no space, the storage or the disk has failed, or a source cannot forget.
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
    from: usize,
    into: usize,
    target: FileId,
    len: u64,
    copied: u64,
    chunk: Option<MergeChunk>,
    state: MergeState,
    /// Whether the guest was busy before the current chunk, and since.
    guest_before: bool,
    guest_now: bool,
    /// It was cancelled.
    cancelled: bool,
    /// The round in which the target grows was requested.
    growth_asked: bool,
    /// The first byte that is not done.
    next: DiskOffset,
}

/// The chunk that is being merged, and what is known of it.
#[derive(Debug)]
struct MergeChunk {
    span: Span,
    /// It is among the active requests; else it waits for requests that overlap it.
    is_active: bool,
    stage: Stage,
    /// Where the bytes of the chunk live, as the first source shows them.
    runs: Vec<Run>,
    /// The parts of it that the sources have allocated, ascending.
    allocated: Vec<Allocated>,
}

/// The stages of a chunk, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Looking,
    Copying,
    Forgetting,
}

impl Merge {
    /// A merge of the layers `from..into` into the layer `into`, whose file is `target`, on a disk of `len` bytes.
    pub fn new((from, into): (usize, usize), target: FileId, len: u64) -> Merge {
        Merge {
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
            next: DiskOffset(0),
        }
    }

    /// The depths of the sources.
    pub fn sources(&self) -> Range<usize> {
        self.from..self.into
    }

    /// The depth of the target.
    pub fn target_depth(&self) -> usize {
        self.into
    }

    /// The file of the target.
    pub fn target(&self) -> FileId {
        self.target
    }

    /// Bytes of the disk.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// How far it is. `grows`: its target is about to grow. None where it was cancelled.
    pub fn progress(&self, grows: bool) -> Option<MergeProgress> {
        (!self.cancelled).then_some(MergeProgress {
            from: self.from,
            into: self.into,
            done: self.next.0.min(self.len),
            len: self.len,
            copied: self.copied,
            busy: self.chunk.is_some() || grows,
            state: self.state,
        })
    }

    /// Bytes written to the target.
    pub fn copied(&self) -> u64 {
        self.copied
    }

    /// Counts bytes whose copy to the target has begun.
    pub fn copy_begun(&mut self, len: u64) {
        self.copied += len;
    }

    /// Bytes that one copy may move now.
    pub fn copy_max(&self) -> u64 {
        if self.guest_before || self.guest_now { COPY_MAX_POLITE } else { COPY_MAX }
    }

    /// The guest has a request.
    pub fn guest_is_busy(&mut self) {
        self.guest_now = true;
    }

    /// Whether chunks are still being merged, or all of them are.
    pub fn goes_on(&self) -> bool {
        !self.cancelled && !matches!(self.state, MergeState::Failed(_))
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled
    }

    /// Whether all is copied.
    pub fn is_copied(&self) -> bool {
        self.goes_on() && self.state == MergeState::Copied
    }

    /// It stops, and no more chunks are decided.
    pub fn fail(&mut self, status: Status, routing: &mut WriteRouting) {
        self.state = MergeState::Failed(status);
        routing.stop_merge();
    }

    /// The same, for good.
    pub fn cancel(&mut self, routing: &mut WriteRouting) {
        self.cancelled = true;
        routing.stop_merge();
    }

    /// Continues a merge that has stopped; from the beginning, if the decisions about its chunks are not known any
    /// more.
    pub fn resume(&mut self, routing: &mut WriteRouting) {
        (self.state, self.cancelled, self.growth_asked) = (MergeState::Running, false, false);
        if self.from == 0 && !routing.resume_merge() {
            routing.begin_merge(self.into, self.target, self.len);
            self.next = DiskOffset(0);
        }
        self.advance(routing);
    }

    /// Marks the growth of the target as requested. Returns whether it was before.
    pub fn ask_growth(&mut self) -> bool {
        std::mem::replace(&mut self.growth_asked, true)
    }

    /// Advances to the next chunk that is not merged.
    pub fn advance(&mut self, routing: &WriteRouting) {
        while self.next.0 < self.len && routing.is_merged(self.next) {
            self.next += CHUNK;
        }
        if self.next.0 >= self.len && self.state == MergeState::Running {
            self.state = MergeState::Copied;
        }
    }

    /// Takes up the next chunk, unless one is under way or there is none, or the disk is broken.
    pub fn take_up(&mut self, is_broken: bool, routing: &mut WriteRouting) -> Option<Span> {
        if !self.goes_on() || self.chunk.is_some() {
            return None;
        }
        if is_broken && self.state == MergeState::Running {
            self.fail(Status::Refused, routing);
        }
        self.advance(routing);
        if self.state != MergeState::Running {
            return None;
        }
        let span = ChainMap::chunk_of(self.next).intersection(Span { at: DiskOffset(0), len: self.len })?;
        let (stage, runs, allocated) = (Stage::Looking, Vec::new(), Vec::new());
        self.chunk = Some(MergeChunk { span, is_active: false, stage, runs, allocated });
        self.guest_before = std::mem::take(&mut self.guest_now);
        Some(span)
    }

    /// The chunk is among the active requests now.
    pub fn chunk_begun(&mut self) {
        self.chunk_mut().is_active = true;
    }

    /// Drops the chunk, if it waits.
    pub fn withdraw_chunk(&mut self) {
        self.chunk.take_if(|chunk| !chunk.is_active);
    }

    /// Whether a chunk is among the active requests.
    pub fn has_active_chunk(&self) -> bool {
        self.chunk.as_ref().is_some_and(|chunk| chunk.is_active)
    }

    /// The bytes of the chunk under way, and its stage.
    pub fn stage(&self) -> (Span, Stage) {
        (self.chunk().span, self.chunk().stage)
    }

    /// Takes in the parts of the chunk to be copied, and their locations.
    pub fn looked(&mut self, allocated: Vec<Allocated>, runs: Vec<Run>) {
        let chunk = self.chunk_mut();
        (chunk.stage, chunk.allocated, chunk.runs) = (Stage::Copying, allocated, runs);
    }

    /// Enters the next stage, with nothing of the chunk under way: the span to run it on, or none where the chunk ends.
    pub fn next_stage(&mut self, failed: bool) -> Option<Span> {
        let chunk = self.chunk_mut();
        if failed || chunk.stage != Stage::Copying {
            return None;
        }
        chunk.stage = Stage::Forgetting;
        (!chunk.allocated.is_empty()).then_some(chunk.span)
    }

    /// Ends the chunk, and returns its bytes.
    pub fn end_chunk(&mut self, status: Status, routing: &mut WriteRouting) -> Span {
        let Some(MergeChunk { span, .. }) = self.chunk.take() else { unreachable!("no chunk is being merged") };
        if status == Status::Done {
            routing.chunk_merged(span.at);
            self.next = span.end();
            self.advance(routing);
        } else {
            self.fail(status, routing);
        }
        span
    }

    /// Where byte `at` of the chunk under way lives, for copying it, and how many bytes of its run are left.
    pub fn lookup(&self, at: DiskOffset) -> Option<(Location, u64)> {
        let runs = &self.chunk().runs;
        let run = runs.get(runs.partition_point(|run| run.span.end() <= at))?;
        let within = at.checked_sub(run.span.at)?;
        Some((run.place.advanced(within), run.span.len - within))
    }

    /// The first bytes of `span` that a source has allocated.
    pub fn next_allocated(&self, span: Span) -> Option<Allocated> {
        let allocated = &self.chunk().allocated;
        let next = allocated.get(allocated.partition_point(|part| part.span.end() <= span.at))?;
        Some(Allocated { span: next.span.intersection(span)?, ..*next })
    }

    fn chunk(&self) -> &MergeChunk {
        let Some(chunk) = &self.chunk else { unreachable!("no chunk is being merged") };
        chunk
    }

    fn chunk_mut(&mut self) -> &mut MergeChunk {
        let Some(chunk) = &mut self.chunk else { unreachable!("no chunk is being merged") };
        chunk
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const LEN: u64 = 3 * CHUNK + 512;

    fn merge() -> (Merge, WriteRouting) {
        let mut routing = WriteRouting::default();
        routing.begin_merge(1, FileId(1), LEN);
        (Merge::new((0, 1), FileId(1), LEN), routing)
    }

    /// The chunk of number `chunk` is merged.
    fn visit(merge: &mut Merge, routing: &mut WriteRouting, chunk: u64) {
        assert_eq!(merge.take_up(false, routing).map(|span| span.at), Some(DiskOffset(chunk * CHUNK)));
        assert_eq!(merge.take_up(false, routing), None, "one at a time");
        merge.looked(Vec::new(), Vec::new());
        assert_eq!(merge.next_stage(false), None, "there is nothing to forget");
        merge.end_chunk(Status::Done, routing);
    }

    #[test]
    fn chunks_are_merged_in_their_order_but_those_that_a_write_has_decided() {
        let (mut merge, mut routing) = merge();
        visit(&mut merge, &mut routing, 0);
        routing.chunk_merged(DiskOffset(CHUNK));
        visit(&mut merge, &mut routing, 2);
        visit(&mut merge, &mut routing, 3);
        assert!(merge.is_copied() && (0..4).all(|chunk| routing.is_merged(DiskOffset(chunk * CHUNK))));
    }

    #[test]
    fn a_merge_that_has_failed_goes_on_where_it_was_as_long_as_that_is_known() {
        let (mut merge, mut routing) = merge();
        visit(&mut merge, &mut routing, 0);
        for (known, next) in [(true, CHUNK), (false, 0)] {
            merge.take_up(false, &mut routing).unwrap();
            merge.end_chunk(Status::Failed, &mut routing);
            assert!(!merge.goes_on() && merge.take_up(false, &mut routing).is_none());
            if !known {
                routing.end_merge();
            }
            merge.resume(&mut routing);
            assert_eq!(merge.progress(false).unwrap().done, next);
        }
    }

    #[test]
    fn copies_are_small_while_the_guest_is_busy() {
        let (mut merge, mut routing) = merge();
        assert_eq!(merge.copy_max(), COPY_MAX);
        merge.guest_is_busy();
        assert_eq!(merge.copy_max(), COPY_MAX_POLITE);
        visit(&mut merge, &mut routing, 0);
        assert_eq!(merge.copy_max(), COPY_MAX_POLITE, "it was busy before this chunk");
        visit(&mut merge, &mut routing, 1);
        assert_eq!(merge.copy_max(), COPY_MAX);
    }
}
