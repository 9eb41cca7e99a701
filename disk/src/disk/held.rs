//! Requests that wait because they overlap others.
//!
//! Knows what may overlap what, and nothing of how a request is done. Keeps: nothing overlaps a discard, a write of
//! zeroes, one of parts of blocks (in whole blocks) or a merge's piece, and what waits is not overtaken by what it must
//! not overlap.

use super::Disk;
use crate::format::Format;
use crate::{Io, Operation, Request, Span, Token};

impl<F: Format> Disk<F> {
    /// Starts the held requests that need not wait any more, if some may not need to. Not part of `end`, since a
    /// request may end as soon as it is started.
    #[inline(always)]
    pub(super) fn start_held<I: Io>(&mut self, io: &mut I) {
        if self.ended {
            self.look_at_held(io);
        }
    }

    fn look_at_held<I: Io>(&mut self, io: &mut I) {
        while !self.held_back && std::mem::take(&mut self.ended) {
            self.start_piece(io);
            for request in std::mem::take(&mut self.held) {
                if self.must_wait(&request) {
                    self.held.push_back(request);
                } else {
                    self.start(request, io);
                }
            }
        }
    }

    /// Hands out those of the requests that are held back that are wanted: nothing of them was begun, and nothing will
    /// be.
    pub fn take_held(&mut self, wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        if !self.held_back || !self.held.iter().any(|request| wanted(request.token())) {
            return Vec::new();
        }
        let (taken, held) = std::mem::take(&mut self.held).into_iter().partition(|request| wanted(request.token()));
        self.held = held;
        taken.into()
    }

    /// Whether the request overlaps, in flight or ahead of it in the queue, something that it must not.
    #[inline(always)]
    pub(super) fn must_wait(&self, request: &Request) -> bool {
        if self.held_back || self.draining {
            return true;
        }
        let exclusive = is_exclusive(request.operation());
        let piece = self.waiting_piece();
        if !exclusive && self.exclusive == 0 && self.held.is_empty() && piece.is_none() {
            return false;
        }
        self.overlaps_what_it_must_not(request, exclusive, piece)
    }

    fn overlaps_what_it_must_not(&self, request: &Request, exclusive: bool, piece: Option<Span>) -> bool {
        if piece.is_some_and(|grain| grain.overlaps(request.span())) {
            return true;
        }
        let ahead = self.active.iter().map(|active| &active.request).chain(&self.held);
        ahead
            .filter(|other| exclusive || is_exclusive(other.operation()))
            .any(|other| other.span().overlaps(request.span()))
    }
}

/// Whether nothing may overlap it while it is in flight.
pub(super) fn is_exclusive(operation: Operation) -> bool {
    matches!(operation, Operation::Patch { .. } | Operation::Discard | Operation::WriteZeroes { .. })
}
