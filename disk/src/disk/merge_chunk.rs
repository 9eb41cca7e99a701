//! One chunk of a merge: what the sources show of it is copied to the target, and then the sources forget it.
//!
//! Knows one chunk; `merge` knows the rest, and why this order is safe. Keeps: no request overlaps the chunk meanwhile,
//! and the sources forget nothing before all of it was written to the target.
//!
//! A chunk under way is one of the active requests, and nothing may overlap it: it waits, and is waited for, like a
//! discard.

use super::fill::Filling;
use super::map_load::map_span;
use super::merge::Merge;
use super::{Active, Disk, Missing, Obstacle, Op, Parked};
use crate::chain_map::{Location, Run};
use crate::format::{Discarded, Fill, Format, Mapping, Reserved, Wait};
use crate::{Action, Io, Layer, Operation, Request, Span, Status};

/// Bytes that one copy moves while the guest is idle: enough to keep the storage busy.
const COPY_MAX: u64 = 1 << 20;
/// Bytes that one copy moves while the guest is busy: few enough that its next request waits little longer for it.
const COPY_MAX_POLITE: u64 = 64 << 10;
/// Copies under way at once.
pub(super) const COPIES_MAX: u32 = 2;

/// The chunk that is being merged, and what is known of it.
#[derive(Debug)]
pub(super) struct MergeChunk {
    span: Span,
    /// Its number among the active requests; none while it waits for requests that overlap it.
    number: Option<u32>,
    stage: Stage,
    /// Where the bytes of the chunk live, as the first source shows them.
    runs: Vec<Run>,
    /// What the sources have allocated of it, ascending.
    allocated: Vec<Allocated>,
}

/// The stages of a chunk, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Looking,
    Copying,
    Forgetting,
}

/// Bytes that a source has, and not only the layers below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocated {
    span: Span,
    /// The source says that they are zero.
    zero: bool,
}

impl MergeChunk {
    /// Where byte `at` lives, and how many bytes of its run are left.
    fn lookup(&self, at: u64) -> Option<(Location, u64)> {
        let run = self.runs.get(self.runs.partition_point(|run| run.span.end() <= at))?;
        let within = at.checked_sub(run.span.at)?;
        Some((run.place.advanced(within), run.span.len - within))
    }

    /// The first bytes of `span` that a source has allocated.
    fn next_allocated(&self, span: Span) -> Option<Allocated> {
        let next = self.allocated.get(self.allocated.partition_point(|part| part.span.end() <= span.at))?;
        Some(Allocated { span: next.span.intersection(span)?, ..*next })
    }
}

impl<F: Format> Disk<F> {
    /// Merges a chunk, as soon as no request in flight overlaps it.
    pub(super) fn begin_merge_chunk<I: Io>(&mut self, span: Span, io: &mut I) {
        let chunk = MergeChunk { span, number: None, stage: Stage::Looking, runs: Vec::new(), allocated: Vec::new() };
        let merge = self.merge_mut();
        merge.chunk = Some(chunk);
        merge.guest_before = std::mem::take(&mut merge.guest_now);
        self.start_merge_chunk(io);
    }

    /// The chunk that waits for requests in flight, if one does.
    pub(super) fn waiting_merge_chunk(&self) -> Option<Span> {
        let chunk = self.merge.as_ref()?.chunk.as_ref()?;
        chunk.number.is_none().then_some(chunk.span)
    }

    /// Drops the chunk that waits, if one does.
    pub(super) fn withdraw_merge_chunk(&mut self) {
        if let Some(merge) = &mut self.merge {
            merge.chunk.take_if(|chunk| chunk.number.is_none());
        }
    }

    /// Starts the chunk that waits, if one does and nothing in flight overlaps it any more.
    pub(super) fn start_merge_chunk<I: Io>(&mut self, io: &mut I) {
        let Some(span) = self.waiting_merge_chunk() else { return };
        if self.active.iter().any(|active| active.request.span().overlaps(span)) {
            return;
        }
        // The map's entry is void when the chunk has ended. Until then, loads for the chunk count as loads of the map.
        self.map.forget(span.at);
        let request = Request::internal(Operation::Discard, span);
        let number = self.active.insert(Active { of_merge: true, ..Active::new(request, self.epoch) });
        self.exclusive += 1;
        self.merge_chunk_mut().number = Some(number);
        self.run(number, span, io);
        self.part_ended(number, Status::Done);
    }

    /// Whether a chunk is among the active requests.
    pub(super) fn has_merge_chunk(&self) -> bool {
        let chunk = self.merge.as_ref().and_then(|merge| merge.chunk.as_ref());
        chunk.is_some_and(|chunk| chunk.number.is_some())
    }

    fn merge_chunk(&self) -> &MergeChunk {
        let Some(chunk) = self.merge.as_ref().and_then(|merge| merge.chunk.as_ref()) else {
            unreachable!("no chunk is being merged")
        };
        chunk
    }

    fn merge_chunk_mut(&mut self) -> &mut MergeChunk {
        let Some(chunk) = &mut self.merge_mut().chunk else { unreachable!("no chunk is being merged") };
        chunk
    }

    /// Continues the chunk's stage from `rest` on.
    pub(super) fn run_merge_chunk<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let (stage, span) = (self.merge_chunk().stage, self.merge_chunk().span);
        match stage {
            Stage::Looking => match self.look(span) {
                Ok(()) => self.copy(number, span, io),
                Err(missing) => self.park_for_map(Parked::Request { number, rest: span }, missing, io),
            },
            Stage::Copying => self.copy(number, rest, io),
            Stage::Forgetting => self.forget(number, span, io),
        }
    }

    /// Enters the next stage, with nothing of the chunk under way: the span to run it on, or none where the chunk ends.
    pub(super) fn next_stage(&mut self, number: u32) -> Option<Span> {
        let failed = self.has_failed(number);
        let chunk = self.merge_chunk_mut();
        if failed || chunk.stage != Stage::Copying {
            return None;
        }
        chunk.stage = Stage::Forgetting;
        (!chunk.allocated.is_empty()).then_some(chunk.span)
    }

    /// Ends the chunk. Requests that overlap it may start then.
    pub(super) fn end_merge_chunk(&mut self, status: Status) {
        let merge = self.merge_mut();
        let Some(chunk) = merge.chunk.take() else { unreachable!("no chunk is being merged") };
        merge.visited(chunk.span, status);
        // The sources may have forgotten a part of it.
        self.map.forget(chunk.span.at);
    }

    /// Finds out where all bytes of the chunk live, and which of them the sources have allocated.
    fn look(&mut self, span: Span) -> Result<(), Missing> {
        let allocated = self.allocated_in_sources(span)?;
        let first_source = self.merge_mut().from;
        let runs = if allocated.is_empty() { Vec::new() } else { self.seen_from(first_source, span)? };
        let chunk = self.merge_chunk_mut();
        (chunk.stage, chunk.allocated, chunk.runs) = (Stage::Copying, allocated, runs);
        Ok(())
    }

    /// What the sources of the merge have allocated of `span`, which may reach behind the end of the disk.
    pub(super) fn allocated_in_sources(&mut self, span: Span) -> Result<Vec<Allocated>, Missing> {
        let &mut Merge { from, into, len, .. } = self.merge_mut();
        let span = span.intersection(Span { at: 0, len }).unwrap_or(span);
        let Some(sources) = self.layers.get_mut(from..into) else { unreachable!("the sources are layers") };
        let (mut allocated, mut missing) = (Vec::new(), Missing::new());
        collect_allocated(sources, span, &mut allocated, &mut missing);
        if missing.is_empty() { Ok(allocated) } else { Err(missing) }
    }

    /// Where the bytes of `span` live, as the layer at `depth` shows them.
    fn seen_from(&mut self, depth: usize, span: Span) -> Result<Vec<Run>, Missing> {
        let Some(layers) = self.layers.get_mut(depth..) else { unreachable!("the chain has no layer {depth}") };
        map_span(layers, span)
    }

    /// Where byte `at` of the chunk under way lives, for copying it.
    pub(super) fn resolve_copy(&self, at: u64) -> Option<(Location, u64)> {
        self.merge_chunk().lookup(at)
    }

    fn copy<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() && !self.has_failed(number) {
            let left = rest.tail_from(at);
            if self.is_postponed(number, left) {
                return;
            }
            let Some(Allocated { span, zero }) = self.merge_chunk().next_allocated(left) else { return };
            let end = if zero { self.zero_first(number, span, io) } else { self.copy_first(number, span, io) };
            match end {
                Ok(end) => at = end,
                Err(obstacle) => return self.wait_for(number, rest.tail_from(span.at), obstacle, io),
            }
        }
    }

    /// Copies the first bytes of `span`, and what is to be written around them, to the target. The end of that.
    fn copy_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let file = self.merge_target();
        let merge = self.merge_mut();
        let polite = merge.guest_before || merge.guest_now;
        let wanted = Span { at: span.at, len: span.len.min(if polite { COPY_MAX_POLITE } else { COPY_MAX }) };
        let reserved = self.ask(file, |format| format.reserve(wanted))?;
        let Reserved { len, fill, .. } = reserved;
        let Fill { before, after } = fill.unwrap_or(Fill { before: 0, after: 0 });
        self.merge_mut().copied += before + len + after;
        self.part_begun(number);
        self.begin_filling(Filling::of_copy(number, file, span.at, reserved), io);
        // The bytes behind that the fill has taken over need no second copy: they are the same.
        Ok(span.at + len + after)
    }

    /// Makes the first bytes of `span` zero in the target. The end of them.
    fn zero_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let file = self.merge_target();
        let len = match self.ask(file, |format| format.discard(span))? {
            Discarded::Freed { at, len, size } => {
                let op = Op::Release { number: Some(number), at };
                self.push_part(number, op, file, Action::Deallocate { at, len: size }, io);
                len
            }
            Discarded::Kept { at, len } => {
                let op = Op::Zero { number, ticket: None };
                self.push_part(number, op, file, Action::Deallocate { at, len }, io);
                len
            }
            Discarded::Hidden { len } => len,
            // Not allocated in the target, or only together with the rest of its cluster. What the target shows counts.
            Discarded::Nothing { len } => {
                let target = self.merge_mut().into;
                let shown = self.seen_from(target, Span { at: span.at, len }).map_err(Obstacle::Chunk)?;
                let Some(run) = shown.first() else { unreachable!("the walk covers the span without gaps") };
                if run.place != Location::Zero {
                    return self.copy_first(number, run.span, io);
                }
                run.span.len
            }
        };
        Ok(span.at + len)
    }

    /// Lets the sources forget the chunk, the deepest first.
    fn forget<I: Io>(&mut self, number: u32, chunk: Span, io: &mut I) {
        let &mut Merge { from, into, .. } = self.merge_mut();
        self.may_change();
        for depth in (from..into).rev() {
            let layer = self.layer_at_mut(depth);
            if let Err(wait) = forget_all(layer, chunk) {
                let obstacle = Obstacle::Layer(layer.file, wait);
                return self.wait_for(number, chunk, obstacle, io);
            }
        }
        match self.allocated_in_sources(chunk) {
            Ok(allocated) if allocated.is_empty() => {}
            // A source cannot forget: an image without a parent, for example.
            Ok(_) => self.fail(number, Status::Unsupported),
            Err(missing) => self.park_for_map(Parked::Request { number, rest: chunk }, missing, io),
        }
    }

    /// Whether something of the request has failed.
    pub(super) fn has_failed(&self, number: u32) -> bool {
        self.active.get(number).status != Status::Done
    }
}

fn forget_all<F: Format>(layer: &mut Layer<F>, chunk: Span) -> Result<(), Wait> {
    let mut at = chunk.at;
    while at < chunk.end() {
        let len = layer.format.forget(chunk.tail_from(at))?;
        at += len.max(512);
    }
    Ok(())
}

/// Collects what `layers` have allocated of `span`, from the first down.
fn collect_allocated<F: Format>(
    layers: &mut [Layer<F>],
    span: Span,
    allocated: &mut Vec<Allocated>,
    missing: &mut Missing,
) {
    let Some((layer, below)) = layers.split_first_mut() else { return };
    let mut at = span.at;
    while at < span.end() {
        let rest = span.tail_from(at);
        let (place, part) = layer.look_up(rest, missing);
        match place {
            Mapping::Parent { .. } => collect_allocated(below, part, allocated, missing),
            Mapping::Zero { .. } => append(allocated, Allocated { span: part, zero: true }),
            // A damaged part fails the copy, and so is not forgotten.
            Mapping::Data { .. } | Mapping::Compressed { .. } | Mapping::Shared { .. } | Mapping::Damaged { .. } => {
                append(allocated, Allocated { span: part, zero: false });
            }
        }
        at = part.end();
    }
}

fn append(allocated: &mut Vec<Allocated>, new: Allocated) {
    match allocated.last_mut() {
        Some(last) if last.zero == new.zero && last.span.end() == new.span.at => {
            last.span.len += new.span.len;
        }
        _ => allocated.push(new),
    }
}
