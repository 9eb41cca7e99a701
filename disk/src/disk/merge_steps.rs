//! The steps of a merge: its begin and end, and what is done with one chunk.
//!
//! `merge` says why this order is safe. Keeps: no request overlaps a chunk that is being merged, and the sources forget
//! nothing before all of it was written to the target.
//!
//! A chunk under way is one of the active requests, and nothing may overlap it: it waits, and is waited for, like a
//! discard. What the sources show of it is copied to the target, and then the sources forget it.

use super::Disk;
use super::active::Active;
use super::chain::{Allocated, Obstacle};
use super::fill::Filling;
use super::layer::{Layer, Missing};
use super::merge::{Merge, MergeProgress, Stage};
use super::ops::Op;
use super::queue::Parked;
use crate::chain_map::Location;
use crate::format::{Discarded, Fill, Format, Reserved};
use crate::{Action, DiskOffset, FileId, ImageError, ImageErrorKind, Io, Operation, Request, Span, Status};

/// Chunks without anything to merge that one step passes over: a disk of 2 TiB has a million chunks.
const EMPTY_MAX: usize = 256;

impl<F: Format> Disk<F> {
    /// Begins to merge the layers `from..into`, the uppermost first, into the layer `into`. `from` is 0 if the leaf is
    /// among them. All are open for writing, none is smaller than the one below it, and all grow to the size of the
    /// first (the caller sets the length of a raw image's file). Continues a merge that has failed.
    pub fn begin_merge(&mut self, from: usize, into: usize) -> Result<(), ImageError> {
        if let Some(merge) = &self.merge {
            let what = match (merge.goes_on(), merge.sources() == (from..into)) {
                (true, _) => "a merge is under way already",
                (false, false) => "another merge has not come to its end",
                (false, true) => return self.resume_merge(),
            };
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        self.check_merge(from, into)?;
        let len = self.chain.at(from).format.geometry().len;
        let (below, count) = (from + 1, into - from);
        self.check_hidden(into, len)?;
        self.chain.may_change();
        // The deepest first: if it cannot grow, nothing has changed.
        let mut grown = Vec::new();
        for layer in self.chain.layers_mut().iter_mut().skip(below).take(count).rev() {
            if layer.format.geometry().len < len {
                layer.format.grow(len)?;
                grown.push(layer.file);
            }
        }
        // The map must not say any more that nothing is behind their old ends: a write there may change no metadata.
        grown.into_iter().for_each(|file| self.layer_grown(file));
        let target = self.chain.at(into).file;
        if from == 0 {
            self.routing.begin_merge(into, target, len);
        }
        let mut merge = Merge::new((from, into), target, len);
        merge.advance(&self.routing);
        self.merge = Some(merge);
        Ok(())
    }

    fn resume_merge(&mut self) -> Result<(), ImageError> {
        self.check_merge_alive()?;
        let Some(merge) = &mut self.merge else { unreachable!("no merge is under way") };
        merge.resume(&mut self.routing);
        Ok(())
    }

    fn check_merge_alive(&self) -> Result<(), ImageError> {
        if self.chain.is_broken() {
            return Err(ImageError::new(ImageErrorKind::Storage, "a sync of the disk has failed: nothing is written"));
        }
        Ok(())
    }

    fn check_merge(&self, from: usize, into: usize) -> Result<(), ImageError> {
        self.check_merge_alive()?;
        if from >= into || into >= self.chain.layers().len() {
            let what = format!(
                "layers {from} to {into} of a chain of {} cannot be merged into the last",
                self.chain.layers().len()
            );
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        (from..=into).try_for_each(|depth| self.require_nothing_owed(depth))?;
        let layers = || self.chain.layers().iter().enumerate().take(into + 1).skip(from);
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
        let copied = self.merge.as_ref().map_or(0, Merge::copied);
        let mut begun = false;
        for _ in 0..EMPTY_MAX {
            let Some(chunk) = self.take_up_chunk() else { break };
            begun = true;
            self.overlap.claim(chunk);
            self.start_merge_chunk(io);
            self.work_all(io);
            if self.merge.as_ref().is_none_or(|merge| merge.copied() != copied) {
                break;
            }
        }
        begun
    }

    /// The next chunk, if it can begin now.
    fn take_up_chunk(&mut self) -> Option<Span> {
        let merge = self.merge.as_mut().filter(|_| !self.overlap.is_quiesced())?;
        merge.take_up(self.chain.is_broken(), &mut self.routing)
    }

    /// Whether the target has not grown to its size yet: some formats grow with a round only.
    fn is_target_short(&self) -> bool {
        self.merge.as_ref().is_some_and(|merge| self.chain.at(merge.target_depth()).len() < merge.len())
    }

    /// Requests the round in which the target grows.
    fn grow_target<I: Io>(&mut self, io: &mut I) {
        let (syncing, broken) = (self.is_syncing(), self.chain.is_broken());
        let Some(merge) = self.merge.as_mut().filter(|merge| merge.goes_on() && !syncing) else { return };
        if broken || merge.ask_growth() {
            return merge.fail(if broken { Status::Refused } else { Status::Failed }, &mut self.routing);
        }
        self.sync(io);
    }

    /// How far the merge has come, if there is one.
    pub fn merge(&self) -> Option<MergeProgress> {
        self.merge.as_ref()?.progress(self.is_syncing() && self.is_target_short())
    }

    /// Cancels the merge. The chain is valid, and what is merged stays so. A chunk under way ends. The target is not
    /// written to any more once the disk was quiet.
    pub fn cancel_merge(&mut self) {
        self.withdraw_merge_chunk();
        if let Some(merge) = &mut self.merge {
            merge.cancel(&mut self.routing);
        }
        self.leave_merge();
    }

    /// Takes the sources, which hold nothing any more, out of the chain, and returns them. Only when all is copied, the
    /// disk is quiesced, nothing is in flight and everything is durable.
    pub fn end_merge(&mut self) -> Result<Vec<Layer<F>>, ImageError> {
        let Some(merge) = self.merge.as_ref().filter(|merge| merge.is_copied()) else {
            return Err(ImageError::new(ImageErrorKind::Unsupported, "there is no merge that has copied everything"));
        };
        let sources = merge.sources();
        self.require_clean("the merged layers cannot be taken off the chain")?;
        self.merge = None;
        self.routing.end_merge();
        let sources: Vec<Layer<F>> = self.chain.layers_mut().drain(sources).collect();
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
        self.overlap.drained();
        if self.merge.as_ref().is_some_and(|merge| !merge.goes_on()) {
            self.routing.end_merge();
        }
        self.merge.take_if(|merge| merge.is_cancelled());
    }

    /// The file has no space for a request. If the merge is to blame, the request starts over without it.
    pub(super) fn retry_without_merge(&mut self, number: u32, file: FileId) {
        let by_merge = self.routing.target() == Some(file);
        let active = self.active.get_mut(number);
        active.retry_without_merge |= by_merge && !active.of_merge;
    }

    /// Fails the merge for want of space. New requests wait until nothing is in flight.
    pub(super) fn begin_draining(&mut self) {
        self.withdraw_merge_chunk();
        self.overlap.drain();
        if let Some(merge) = self.merge.as_mut().filter(|merge| merge.goes_on()) {
            merge.fail(Status::NoSpace, &mut self.routing);
        }
    }

    /// Drops the chunk that waits, if one does.
    pub(super) fn withdraw_merge_chunk(&mut self) {
        self.overlap.withdraw_claim();
        if let Some(merge) = &mut self.merge {
            merge.withdraw_chunk();
        }
    }

    /// Starts the chunk that waits, if one does and nothing in flight overlaps it any more.
    pub(super) fn start_merge_chunk<I: Io>(&mut self, io: &mut I) {
        let Some(span) = self.overlap.take_claim(&self.active) else { return };
        // The map's entry is void when the chunk has ended. Until then, loads for the chunk count as loads of the map.
        self.map.forget(span.at);
        self.merge_mut().chunk_begun();
        let request = Request::internal(Operation::Discard, span);
        let chunk = Active { of_merge: true, ..Active::new(request, self.routing.epoch()) };
        let number = self.active.insert(chunk);
        self.begin(number, io);
    }

    /// Ends the chunk. Requests that overlap it may start then.
    pub(super) fn end_merge_chunk(&mut self, status: Status) {
        let Some(merge) = &mut self.merge else { unreachable!("no merge is under way") };
        let chunk = merge.end_chunk(status, &mut self.routing);
        // The sources may have forgotten a part of it.
        self.map.forget(chunk.at);
    }

    /// The merge under way.
    pub(super) fn merge_mut(&mut self) -> &mut Merge {
        let Some(merge) = &mut self.merge else { unreachable!("no merge is under way") };
        merge
    }

    /// Continues the chunk's stage from `rest` on.
    pub(super) fn run_merge_chunk<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let (span, stage) = self.merge_mut().stage();
        match stage {
            Stage::Looking => match self.look(span) {
                Ok(()) => self.copy(number, span, io),
                Err(missing) => self.park_for_chunk(Parked::Request { number, rest: span }, missing, io),
            },
            Stage::Copying => self.copy(number, rest, io),
            Stage::Forgetting => self.forget(number, span, io),
        }
    }

    /// Finds out where all bytes of the chunk live, and which of them the sources have allocated.
    fn look(&mut self, span: Span) -> Result<(), Missing> {
        let sources = self.merge_mut().sources();
        let first = sources.start;
        let allocated = self.chain.allocated(sources, span)?;
        let runs = if allocated.is_empty() { Vec::new() } else { self.chain.map(first, span)? };
        self.merge_mut().looked(allocated, runs);
        Ok(())
    }

    fn copy<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() && !self.active.has_failed(number) {
            let left = rest.tail_from(at);
            if self.active.is_postponed(number, left) {
                return;
            }
            let Some(Allocated { span, zero }) = self.merge_mut().next_allocated(left) else { return };
            let end = if zero { self.zero_first(number, span, io) } else { self.copy_first(number, span, io) };
            match end {
                Ok(end) => at = end,
                Err(obstacle) => return self.wait_for(number, rest.tail_from(span.at), obstacle, io),
            }
        }
    }

    /// Copies the first bytes of `span`, and what is to be written around them, to the target. The end of that.
    fn copy_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<DiskOffset, Obstacle> {
        let (file, len_max) = (self.merge_mut().target(), self.merge_mut().copy_max());
        let wanted = Span { at: span.at, len: span.len.min(len_max) };
        let reserved = self.chain.ask(file, |format| format.reserve(wanted))?;
        let Reserved { len, fill, .. } = reserved;
        let Fill { before, after } = fill.unwrap_or(Fill { before: 0, after: 0 });
        self.merge_mut().copy_begun(before + len + after);
        self.active.part_begun(number);
        self.begin_filling(Filling::new(number, file, span.at, reserved, None), io);
        // The bytes behind that the fill has taken over need no second copy: they are the same.
        Ok(span.at + len + after)
    }

    /// Makes the first bytes of `span` zero in the target. The end of them.
    fn zero_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<DiskOffset, Obstacle> {
        let file = self.merge_mut().target();
        let len = match self.chain.ask(file, |format| format.discard(span))? {
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
                let target = self.merge_mut().target_depth();
                let shown = self.chain.map(target, Span { at: span.at, len }).map_err(Obstacle::Chunk)?;
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
        let sources = self.merge_mut().sources();
        self.chain.may_change();
        for depth in sources.clone().rev() {
            let layer = self.chain.at_mut(depth);
            if let Err(wait) = layer.forget(chunk) {
                let obstacle = Obstacle::Layer(layer.file, wait);
                return self.wait_for(number, chunk, obstacle, io);
            }
        }
        match self.chain.allocated(sources, chunk) {
            Ok(allocated) if allocated.is_empty() => {}
            // A source cannot forget: an image without a parent, for example.
            Ok(_) => self.active.fail(number, Status::Unsupported),
            Err(missing) => self.park_for_chunk(Parked::Request { number, rest: chunk }, missing, io),
        }
    }
}
