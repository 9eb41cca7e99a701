//! One grain of a merge: what the sources show of it is brought into the target, and the sources forget it.
//!
//! Knows one grain; `merge` knows the rest, and why this order is safe. Keeps: no request overlaps the grain meanwhile, and
//! nothing is forgotten before all of it has been written.
//!
//! A piece stands among the requests as one of their own that nothing may overlap, and so waits and is waited for like
//! a discard.

use super::fill::Filling;
use super::learn::fold_span;
use super::{Active, Disk, Missing, Obstacle, Op, Parked};
use crate::fold::{Run, Where};
use crate::format::{Discarded, Fill, Format, Place, Reserved, Wait};
use crate::{Action, FileId, Io, Layer, Operation, Request, Span, Status};

/// Bytes that are copied at once while the guest asks for nothing: enough for the storage.
const COPY_MAX: u64 = 1 << 20;
/// And while it does: few enough that what it asks for next waits little longer than it would anyway.
const COPY_MAX_POLITE: u64 = 64 << 10;
/// Copies under way at once.
pub(super) const COPIES_MAX: u32 = 2;

/// What there is to do of a grain.
#[derive(Debug)]
pub(super) struct Piece {
    grain: Span,
    /// Its number among the requests; none while it waits for those that overlap it.
    number: Option<u32>,
    stage: Stage,
    /// Where the bytes of the grain live, as the first source shows them.
    runs: Vec<Run>,
    /// What the sources hold of it, ascending.
    held: Vec<Held>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Looking,
    Copying,
    Forgetting,
}

/// Bytes that are visible of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    span: Span,
    /// Known to be zero.
    zero: bool,
}

impl Piece {
    /// Where byte `at` lives, and how many bytes of its run are left.
    fn lookup(&self, at: u64) -> Option<(Where, u64)> {
        let run = self.runs.get(self.runs.partition_point(|run| run.span.end() <= at))?;
        let within = at.checked_sub(run.span.at)?;
        Some((run.place.advanced(within), run.span.len.saturating_sub(within)))
    }

    /// The first bytes of `span` that a source holds.
    fn next_held(&self, span: Span) -> Option<Held> {
        let held = self.held.get(self.held.partition_point(|held| held.span.end() <= span.at))?;
        Some(Held { span: held.span.intersection(span)?, ..*held })
    }
}

impl<F: Format> Disk<F> {
    /// Begins with a grain, as soon as no request in flight overlaps it.
    pub(super) fn begin_piece<I: Io>(&mut self, grain: Span, io: &mut I) {
        let piece = Piece { grain, number: None, stage: Stage::Looking, runs: Vec::new(), held: Vec::new() };
        if let Some(merge) = &mut self.merge {
            merge.piece = Some(piece);
            merge.guest_before = std::mem::take(&mut merge.guest_now);
        }
        self.start_piece(io);
    }

    /// The grain of a piece that waits for the requests in flight.
    pub(super) fn waiting_piece(&self) -> Option<Span> {
        let piece = self.merge.as_ref()?.piece.as_ref()?;
        piece.number.is_none().then_some(piece.grain)
    }

    /// A piece that has not begun does not begin.
    pub(super) fn withdraw_piece(&mut self) {
        if let Some(merge) = &mut self.merge {
            merge.piece.take_if(|piece| piece.number.is_none());
        }
    }

    /// Starts the piece that waits, if nothing in flight overlaps it any more.
    pub(super) fn start_piece<I: Io>(&mut self, io: &mut I) {
        let Some(grain) = self.waiting_piece() else { return };
        if self.active.iter().any(|active| active.request.span().overlaps(grain)) {
            return;
        }
        // What is known of it is void at the end; and as long as it is not known, loading for it counts as learning.
        self.fold.forget(grain.at);
        let request = Request::internal(Operation::Discard, grain);
        let number = self.active.insert(Active { of_merge: true, ..Active::new(request, self.epoch) });
        self.exclusive = self.exclusive.saturating_add(1);
        if let Some(piece) = self.piece_mut() {
            piece.number = Some(number);
        }
        self.run(number, grain, io);
        self.piece_ended(number, Status::Done, io);
    }

    /// Whether a piece stands among the requests.
    pub(super) fn has_piece(&self) -> bool {
        self.piece().is_some_and(|piece| piece.number.is_some())
    }

    fn piece(&self) -> Option<&Piece> {
        self.merge.as_ref().and_then(|merge| merge.piece.as_ref())
    }

    fn piece_mut(&mut self) -> Option<&mut Piece> {
        self.merge.as_mut().and_then(|merge| merge.piece.as_mut())
    }

    /// Goes on with the piece from `rest` on.
    pub(super) fn run_piece<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let Some((stage, grain)) = self.piece().map(|piece| (piece.stage, piece.grain)) else { return };
        match stage {
            Stage::Looking => match self.look(grain) {
                Ok(()) => self.copy(number, grain, io),
                Err(missing) => self.park_for_grain(Parked::Request { number, rest: grain }, missing, io),
            },
            Stage::Copying => self.copy(number, rest, io),
            Stage::Forgetting => self.forget(number, grain, io),
        }
    }

    /// Nothing of the piece is under way any more: the next stage, or its end. Whether there is a next one.
    pub(super) fn next_stage(&mut self, failed: bool) -> Option<Span> {
        let piece = self.piece_mut().filter(|piece| !failed && piece.stage == Stage::Copying)?;
        piece.stage = Stage::Forgetting;
        (!piece.held.is_empty()).then_some(piece.grain)
    }

    /// The piece has ended; those who waited for it go on.
    pub(super) fn end_piece(&mut self, status: Status) {
        let Some(merge) = &mut self.merge else { return };
        let Some(piece) = merge.piece.take() else { return };
        merge.visited(piece.grain, status);
        // It may have been forgotten in part.
        self.fold.forget(piece.grain.at);
    }

    /// Finds out where all bytes of the grain live, and which of them the sources hold.
    fn look(&mut self, grain: Span) -> Result<(), Missing> {
        let held = self.held_by_sources(grain)?;
        let runs = if held.is_empty() { Vec::new() } else { self.shown_by(false, grain)? };
        if let Some(piece) = self.piece_mut() {
            (piece.stage, piece.held, piece.runs) = (Stage::Copying, held, runs);
        }
        Ok(())
    }

    /// What the sources of the merge hold of `span`, which may reach behind the end of the disk.
    pub(super) fn held_by_sources(&mut self, span: Span) -> Result<Vec<Held>, Missing> {
        let Some(merge) = &self.merge else { return Ok(Vec::new()) };
        let span = span.intersection(Span { at: 0, len: merge.len }).unwrap_or(span);
        let (mut held, mut missing) = (Vec::new(), Missing::new());
        if let Some(sources) = self.layers.get_mut(merge.from..merge.into) {
            hold(sources, span, &mut held, &mut missing);
        }
        if missing.is_empty() { Ok(held) } else { Err(missing) }
    }

    /// Where the bytes of `span` live, as the target shows them or as the first source does.
    fn shown_by(&mut self, target: bool, span: Span) -> Result<Vec<Run>, Missing> {
        let Some(merge) = &self.merge else { return Ok(Vec::new()) };
        let first = if target { merge.into } else { merge.from };
        self.layers.get_mut(first..).map_or(Ok(Vec::new()), |layers| fold_span(layers, span))
    }

    /// Where byte `at` of the grain under way lives, for copying it.
    pub(super) fn resolve_copy(&self, at: u64) -> Option<(Where, u64)> {
        self.piece().and_then(|piece| piece.lookup(at))
    }

    fn copy<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() && !self.has_failed(number) {
            let left = Span { at, len: rest.end().saturating_sub(at) };
            if self.is_postponed(number, left) {
                return;
            }
            let Some(held) = self.piece().and_then(|piece| piece.next_held(left)) else { return };
            let end = if held.zero {
                self.clear_first(number, held.span, io)
            } else {
                self.copy_first(number, held.span, io)
            };
            match end {
                Ok(end) => at = end,
                Err(obstacle) => {
                    let from = held.span.at;
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
        self.piece_begun(number);
        self.begin_filling(Filling::of_copy(number, file, span.at, reserved), io);
        // What was taken over from behind need not be copied once more: it is the same.
        Ok(span.at.saturating_add(len).saturating_add(after))
    }

    /// Makes the first bytes of `span` zero in the target. The end of them.
    fn clear_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let file = self.target()?;
        let len = match self.ask(file, |format| format.discard(span))? {
            Discarded::Freed { at, len, size } => {
                let op = Op::Release { number: Some(number), at };
                self.push_piece(number, op, file, Action::Deallocate { at, len: size }, io);
                len
            }
            Discarded::Kept { at, len } => {
                let op = Op::Zero { number, ticket: None };
                self.push_piece(number, op, file, Action::Deallocate { at, len }, io);
                len
            }
            Discarded::Hidden { len } => len,
            // Not in the target, or not to be had without the rest of its cluster. What is seen there counts.
            Discarded::Nothing { len } => {
                let shown = self.shown_by(true, Span { at: span.at, len }).map_err(Obstacle::Grain)?;
                match shown.first() {
                    Some(run) if run.place == Where::Zero => run.span.len,
                    Some(run) => return self.copy_first(number, run.span, io),
                    None => len,
                }
            }
        };
        Ok(span.at.saturating_add(len))
    }

    /// Lets the sources forget the grain, the deepest first.
    fn forget<I: Io>(&mut self, number: u32, grain: Span, io: &mut I) {
        let Some((from, into)) = self.merge.as_ref().map(|merge| (merge.from, merge.into)) else { return };
        self.may_change();
        for depth in (from..into).rev() {
            let Some(layer) = self.layers.get_mut(depth) else { continue };
            if let Err(wait) = forget_all(layer, grain) {
                let obstacle = Obstacle::Layer(layer.file, wait);
                return self.wait_for(number, grain, obstacle, io);
            }
        }
        match self.held_by_sources(grain) {
            Ok(held) if held.is_empty() => {}
            // An image without a parent, say.
            Ok(_) => self.fail(number, Status::Unsupported),
            Err(missing) => self.park_for_grain(Parked::Request { number, rest: grain }, missing, io),
        }
    }

    /// Whether something of the request has failed.
    pub(super) fn has_failed(&self, number: u32) -> bool {
        self.active.get(number).is_none_or(|active| active.status != Status::Done)
    }

    /// The target of the merge, of which a piece is under way.
    fn target(&self) -> Result<FileId, Obstacle> {
        self.merge.as_ref().map(|merge| merge.target).ok_or(Obstacle::Layer(FileId(0), Wait::NoSpace))
    }
}

fn forget_all<F: Format>(layer: &mut Layer<F>, grain: Span) -> Result<(), Wait> {
    let mut at = grain.at;
    while at < grain.end() {
        let len = layer.format.forget(Span { at, len: grain.end().saturating_sub(at) })?;
        at = at.saturating_add(len.max(512));
    }
    Ok(())
}

/// Collects what `layers` hold of `span`, from the first down.
fn hold<F: Format>(layers: &mut [Layer<F>], span: Span, held: &mut Vec<Held>, missing: &mut Missing) {
    let Some((layer, below)) = layers.split_first_mut() else { return };
    let mut at = span.at;
    while at < span.end() {
        let rest = Span { at, len: span.end().saturating_sub(at) };
        let (place, part) = layer.look_up(rest, missing);
        match place {
            Place::Parent { .. } => hold(below, part, held, missing),
            Place::Zero { .. } => append(held, Held { span: part, zero: true }),
            // What cannot be had fails who copies it, and is not forgotten.
            Place::Data { .. } | Place::Packed { .. } | Place::Shared { .. } | Place::Damaged { .. } => {
                append(held, Held { span: part, zero: false });
            }
        }
        at = part.end();
    }
}

fn append(held: &mut Vec<Held>, new: Held) {
    match held.last_mut() {
        Some(last) if last.zero == new.zero && last.span.end() == new.span.at => {
            last.span.len = last.span.len.saturating_add(new.span.len);
        }
        _ => held.push(new),
    }
}
