//! Requests that wait because they overlap others.
//!
//! Knows what may overlap what, and nothing of how a request is done. Keeps: nothing overlaps a discard, a write of
//! zeroes, a write of parts of blocks (counted in whole blocks) or a merge's chunk; and no request overtakes another
//! that it must not overlap.

use super::Disk;
use crate::format::Format;
use crate::{Io, Operation, Request, Span, Token};

impl<F: Format> Disk<F> {
    /// Starts the waiting requests that need not wait any more.
    pub(super) fn recheck_waiting<I: Io>(&mut self, io: &mut I) {
        self.start_merge_chunk(io);
        for request in std::mem::take(&mut self.waiting) {
            if self.must_wait(&request) {
                self.waiting.push_back(request);
            } else {
                self.start(request, io);
            }
        }
    }

    /// Takes out those waiting requests of a quiesced disk that `wanted` names. Nothing of them was begun, and nothing
    /// will be.
    pub fn take_waiting(&mut self, wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        if !self.quiesced || !self.waiting.iter().any(|request| wanted(request.token())) {
            return Vec::new();
        }
        let (cached_bytes, waiting) =
            std::mem::take(&mut self.waiting).into_iter().partition(|request| wanted(request.token()));
        self.waiting = waiting;
        cached_bytes.into()
    }

    /// Whether the request overlaps, in flight or ahead of it in the queue, something that it must not.
    #[inline(always)]
    pub(super) fn must_wait(&self, request: &Request) -> bool {
        if self.quiesced || self.draining {
            return true;
        }
        let exclusive = is_exclusive(request.operation());
        let chunk = self.waiting_merge_chunk();
        if !exclusive && self.exclusive == 0 && self.waiting.is_empty() && chunk.is_none() {
            return false;
        }
        self.overlaps_what_it_must_not(request, exclusive, chunk)
    }

    fn overlaps_what_it_must_not(&self, request: &Request, exclusive: bool, chunk: Option<Span>) -> bool {
        if chunk.is_some_and(|chunk| chunk.overlaps(request.span())) {
            return true;
        }
        let ahead = self.active.iter().map(|active| &active.request).chain(&self.waiting);
        ahead
            .filter(|other| exclusive || is_exclusive(other.operation()))
            .any(|other| other.span().overlaps(request.span()))
    }
}

/// Whether nothing may overlap it while it is in flight.
pub(super) fn is_exclusive(operation: Operation) -> bool {
    matches!(operation, Operation::Patch { .. } | Operation::Discard | Operation::WriteZeroes { .. })
}
