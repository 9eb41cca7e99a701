//! One chunk of a merge: what the sources show of it is brought into the target, and the sources forget it.
//!
//! Knows one chunk; `merge` knows the rest, and why this order is safe. Keeps: no request overlaps the chunk meanwhile, and
//! nothing is forgotten before all of it has been written.
//!
//! A chunk stands among the requests as one of their own that nothing may overlap, and so waits and is waited for like
//! a discard.

use super::fill::Filling;
use super::map_load::map_span;
use super::{Active, Disk, Missing, Obstacle, Op, Parked};
use crate::chain_map::{Location, Run};
use crate::format::{Discarded, Fill, Format, Mapping, Reserved, Wait};
use crate::{Action, FileId, Io, Layer, Operation, Request, Span, Status};

/// Bytes that are copied at once while the guest asks for nothing: enough for the storage.
const COPY_MAX: u64 = 1 << 20;
/// And while it does: few enough that what it asks for next waits little longer than it would anyway.
const COPY_MAX_POLITE: u64 = 64 << 10;
/// Copies under way at once.
pub(super) const COPIES_MAX: u32 = 2;

/// What there is to do of a chunk.
#[derive(Debug)]
pub(super) struct MergeChunk {
    chunk: Span,
    /// Its number among the requests; none while it waits for those that overlap it.
    number: Option<u32>,
    stage: Stage,
    /// Where the bytes of the chunk live, as the first source shows them.
    runs: Vec<Run>,
    /// What the sources collect_allocated of it, ascending.
    allocated: Vec<Allocated>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Looking,
    Copying,
    Forgetting,
}

/// Bytes that are visible of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocated {
    span: Span,
    /// Known to be zero.
    zero: bool,
}

impl MergeChunk {
    /// Where byte `at` lives, and how many bytes of its run are left.
    fn lookup(&self, at: u64) -> Option<(Location, u64)> {
        let run = self.runs.get(self.runs.partition_point(|run| run.span.end() <= at))?;
        let within = at.checked_sub(run.span.at)?;
        Some((run.place.advanced(within), run.span.len.saturating_sub(within)))
    }

    /// The first bytes of `span` that a source holds.
    fn next_allocated(&self, span: Span) -> Option<Allocated> {
        let allocated =
            self.allocated.get(self.allocated.partition_point(|allocated| allocated.span.end() <= span.at))?;
        Some(Allocated { span: allocated.span.intersection(span)?, ..*allocated })
    }
}

impl<F: Format> Disk<F> {
    /// Begins with a chunk, as soon as no request in flight overlaps it.
    pub(super) fn begin_merge_chunk<I: Io>(&mut self, chunk: Span, io: &mut I) {
        let chunk = MergeChunk { chunk, number: None, stage: Stage::Looking, runs: Vec::new(), allocated: Vec::new() };
        if let Some(merge) = &mut self.merge {
            merge.chunk = Some(chunk);
            merge.guest_before = std::mem::take(&mut merge.guest_now);
        }
        self.start_merge_chunk(io);
    }

    /// The chunk of a chunk that waits for the requests in flight.
    pub(super) fn waiting_merge_chunk(&self) -> Option<Span> {
        let chunk = self.merge.as_ref()?.chunk.as_ref()?;
        chunk.number.is_none().then_some(chunk.chunk)
    }

    /// A chunk that has not begun does not begin.
    pub(super) fn withdraw_merge_chunk(&mut self) {
        if let Some(merge) = &mut self.merge {
            merge.chunk.take_if(|chunk| chunk.number.is_none());
        }
    }

    /// Starts the chunk that waits, if nothing in flight overlaps it any more.
    pub(super) fn start_merge_chunk<I: Io>(&mut self, io: &mut I) {
        let Some(chunk) = self.waiting_merge_chunk() else { return };
        if self.active.iter().any(|active| active.request.span().overlaps(chunk)) {
            return;
        }
        // What is known of it is void at the end; and as long as it is not known, loading for it counts as learning.
        self.map.forget(chunk.at);
        let request = Request::internal(Operation::Discard, chunk);
        let number = self.active.insert(Active { of_merge: true, ..Active::new(request, self.epoch) });
        self.exclusive = self.exclusive.saturating_add(1);
        if let Some(chunk) = self.merge_chunk_mut() {
            chunk.number = Some(number);
        }
        self.run(number, chunk, io);
        self.part_ended(number, Status::Done, io);
    }

    /// Whether a chunk stands among the requests.
    pub(super) fn has_merge_chunk(&self) -> bool {
        self.chunk().is_some_and(|chunk| chunk.number.is_some())
    }

    fn chunk(&self) -> Option<&MergeChunk> {
        self.merge.as_ref().and_then(|merge| merge.chunk.as_ref())
    }

    fn merge_chunk_mut(&mut self) -> Option<&mut MergeChunk> {
        self.merge.as_mut().and_then(|merge| merge.chunk.as_mut())
    }

    /// Goes on with the chunk from `rest` on.
    pub(super) fn run_merge_chunk<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let Some((stage, chunk)) = self.chunk().map(|chunk| (chunk.stage, chunk.chunk)) else { return };
        match stage {
            Stage::Looking => match self.look(chunk) {
                Ok(()) => self.copy(number, chunk, io),
                Err(missing) => self.park_for_map(Parked::Request { number, rest: chunk }, missing, io),
            },
            Stage::Copying => self.copy(number, rest, io),
            Stage::Forgetting => self.forget(number, chunk, io),
        }
    }

    /// Nothing of the chunk is under way any more: the next stage, or its end. Whether there is a next one.
    pub(super) fn next_stage(&mut self, failed: bool) -> Option<Span> {
        let chunk = self.merge_chunk_mut().filter(|chunk| !failed && chunk.stage == Stage::Copying)?;
        chunk.stage = Stage::Forgetting;
        (!chunk.allocated.is_empty()).then_some(chunk.chunk)
    }

    /// The chunk has ended; those who waited for it go on.
    pub(super) fn end_merge_chunk(&mut self, status: Status) {
        let Some(merge) = &mut self.merge else { return };
        let Some(chunk) = merge.chunk.take() else { return };
        merge.visited(chunk.chunk, status);
        // It may have been forgotten in part.
        self.map.forget(chunk.chunk.at);
    }

    /// Finds out where all bytes of the chunk live, and which of them the sources collect_allocated.
    fn look(&mut self, chunk: Span) -> Result<(), Missing> {
        let allocated = self.allocated_in_sources(chunk)?;
        let runs = if allocated.is_empty() { Vec::new() } else { self.shown_by(false, chunk)? };
        if let Some(chunk) = self.merge_chunk_mut() {
            (chunk.stage, chunk.allocated, chunk.runs) = (Stage::Copying, allocated, runs);
        }
        Ok(())
    }

    /// What the sources of the merge collect_allocated of `span`, which may reach behind the end of the disk.
    pub(super) fn allocated_in_sources(&mut self, span: Span) -> Result<Vec<Allocated>, Missing> {
        let Some(merge) = &self.merge else { return Ok(Vec::new()) };
        let span = span.intersection(Span { at: 0, len: merge.len }).unwrap_or(span);
        let (mut allocated, mut missing) = (Vec::new(), Missing::new());
        if let Some(sources) = self.layers.get_mut(merge.from..merge.into) {
            collect_allocated(sources, span, &mut allocated, &mut missing);
        }
        if missing.is_empty() { Ok(allocated) } else { Err(missing) }
    }

    /// Where the bytes of `span` live, as the target shows them or as the first source does.
    fn shown_by(&mut self, target: bool, span: Span) -> Result<Vec<Run>, Missing> {
        let Some(merge) = &self.merge else { return Ok(Vec::new()) };
        let first = if target { merge.into } else { merge.from };
        self.layers.get_mut(first..).map_or(Ok(Vec::new()), |layers| map_span(layers, span))
    }

    /// Where byte `at` of the chunk under way lives, for copying it.
    pub(super) fn resolve_copy(&self, at: u64) -> Option<(Location, u64)> {
        self.chunk().and_then(|chunk| chunk.lookup(at))
    }

    fn copy<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() && !self.has_failed(number) {
            let left = Span { at, len: rest.end().saturating_sub(at) };
            if self.is_postponed(number, left) {
                return;
            }
            let Some(allocated) = self.chunk().and_then(|chunk| chunk.next_allocated(left)) else { return };
            let end = if allocated.zero {
                self.zero_first(number, allocated.span, io)
            } else {
                self.copy_first(number, allocated.span, io)
            };
            match end {
                Ok(end) => at = end,
                Err(obstacle) => {
                    let from = allocated.span.at;
                    let rest = Span { at: from, len: rest.end().saturating_sub(from) };
                    return self.wait_for(number, rest, obstacle, io);
                }
            }
        }
    }

    /// Copies the first bytes of `span`, and what is to be written around them, to the target. The end of that.
    fn copy_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let file = self.target()?;
        let polite = self.merge.as_ref().is_some_and(|merge| merge.guest_before || merge.guest_now);
        let wanted = Span { at: span.at, len: span.len.min(if polite { COPY_MAX_POLITE } else { COPY_MAX }) };
        let reserved = self.ask(file, |format| format.reserve(wanted))?;
        let Reserved { len, fill, .. } = reserved;
        let Fill { before, after } = fill.unwrap_or(Fill { before: 0, after: 0 });
        if let Some(merge) = &mut self.merge {
            merge.copied = merge.copied.saturating_add(before).saturating_add(len).saturating_add(after);
        }
        self.part_begun(number);
        self.begin_filling(Filling::of_copy(number, file, span.at, reserved), io);
        // What was taken over from behind need not be copied once more: it is the same.
        Ok(span.at.saturating_add(len).saturating_add(after))
    }

    /// Makes the first bytes of `span` zero in the target. The end of them.
    fn zero_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let file = self.target()?;
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
            // Not in the target, or not to be had without the rest of its cluster. What is seen there counts.
            Discarded::Nothing { len } => {
                let shown = self.shown_by(true, Span { at: span.at, len }).map_err(Obstacle::Chunk)?;
                match shown.first() {
                    Some(run) if run.place == Location::Zero => run.span.len,
                    Some(run) => return self.copy_first(number, run.span, io),
                    None => len,
                }
            }
        };
        Ok(span.at.saturating_add(len))
    }

    /// Lets the sources forget the chunk, the deepest first.
    fn forget<I: Io>(&mut self, number: u32, chunk: Span, io: &mut I) {
        let Some((from, into)) = self.merge.as_ref().map(|merge| (merge.from, merge.into)) else { return };
        self.may_change();
        for depth in (from..into).rev() {
            let Some(layer) = self.layers.get_mut(depth) else { continue };
            if let Err(wait) = forget_all(layer, chunk) {
                let obstacle = Obstacle::Layer(layer.file, wait);
                return self.wait_for(number, chunk, obstacle, io);
            }
        }
        match self.allocated_in_sources(chunk) {
            Ok(allocated) if allocated.is_empty() => {}
            // An image without a parent, say.
            Ok(_) => self.fail(number, Status::Unsupported),
            Err(missing) => self.park_for_map(Parked::Request { number, rest: chunk }, missing, io),
        }
    }

    /// Whether something of the request has failed.
    pub(super) fn has_failed(&self, number: u32) -> bool {
        self.active.get(number).is_none_or(|active| active.status != Status::Done)
    }

    /// The target of the merge, of which a chunk is under way.
    fn target(&self) -> Result<FileId, Obstacle> {
        self.merge.as_ref().map(|merge| merge.target).ok_or(Obstacle::Layer(FileId(0), Wait::NoSpace))
    }
}

fn forget_all<F: Format>(layer: &mut Layer<F>, chunk: Span) -> Result<(), Wait> {
    let mut at = chunk.at;
    while at < chunk.end() {
        let len = layer.format.forget(Span { at, len: chunk.end().saturating_sub(at) })?;
        at = at.saturating_add(len.max(512));
    }
    Ok(())
}

/// Collects what `layers` collect_allocated of `span`, from the first down.
fn collect_allocated<F: Format>(
    layers: &mut [Layer<F>],
    span: Span,
    allocated: &mut Vec<Allocated>,
    missing: &mut Missing,
) {
    let Some((layer, below)) = layers.split_first_mut() else { return };
    let mut at = span.at;
    while at < span.end() {
        let rest = Span { at, len: span.end().saturating_sub(at) };
        let (place, part) = layer.look_up(rest, missing);
        match place {
            Mapping::Parent { .. } => collect_allocated(below, part, allocated, missing),
            Mapping::Zero { .. } => append(allocated, Allocated { span: part, zero: true }),
            // What cannot be had fails who copies it, and is not forgotten.
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
            last.span.len = last.span.len.saturating_add(new.span.len);
        }
        _ => allocated.push(new),
    }
}
