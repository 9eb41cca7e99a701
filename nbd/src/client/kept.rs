//! Writes that the server has answered and that no answered flush covers: it may lose them when it restarts, so they
//! are sent again on every new connection, before anything that overlaps them and before the next flush.
//!
//! It is bounded by its caller. Invariant: in the order of the numbers, of overlapping writes the newer one is later.

use std::collections::VecDeque;
use std::sync::Arc;

use super::piece::{Kind, Owner, Piece};

/// Maximum number of kept writes: each costs about as much memory as a small write, with payload or without.
const COUNT_MAX: usize = 4096;

#[derive(Debug)]
struct KeptWrite {
    number: u64,
    at: u64,
    len: u64,
    /// `None` if it is zeroes.
    bytes: Option<Arc<[u8]>>,
    /// Answered on the current connection.
    here: bool,
}

/// The kept writes.
#[derive(Debug, Default)]
pub(super) struct Kept {
    writes: VecDeque<KeptWrite>,
    /// The number of the next one.
    next: u64,
    bytes: u64,
}

impl Kept {
    /// Keeps a write or zeroes that were answered.
    pub(super) fn add(&mut self, piece: Piece) {
        let Piece { at, len, bytes, .. } = piece;
        self.bytes += bytes.as_ref().map_or(0, |_| len);
        self.writes.push_back(KeptWrite { number: self.next, at, len, bytes, here: true });
        self.next += 1;
    }

    /// Whether a flush on the current connection covers all of them.
    pub(super) fn are_here(&self) -> bool {
        self.writes.iter().all(|write| write.here)
    }

    /// The number from which a flush that is sent now covers no more.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Drops what an answered flush covers.
    pub(super) fn flushed(&mut self, covers: u64) {
        while self.writes.front().is_some_and(|write| write.number < covers) {
            let Some(write) = self.writes.pop_front() else { return };
            self.bytes -= write.bytes.map_or(0, |_| write.len);
        }
    }

    /// A kept write was answered on this connection too.
    pub(super) fn repeated(&mut self, number: u64) {
        self.writes.iter_mut().filter(|write| write.number == number).for_each(|write| write.here = true);
    }

    /// The connection was lost; returns what is to be sent on the next one, oldest first.
    pub(super) fn repeat_all(&mut self) -> Vec<Piece> {
        self.writes.iter_mut().for_each(|write| write.here = false);
        let repeat = |write: &KeptWrite| {
            let kind = if write.bytes.is_some() { Kind::Write } else { Kind::Zero };
            Piece { bytes: write.bytes.clone(), ..Piece::new(Owner::Replay(write.number), kind, write.at, write.len) }
        };
        self.writes.iter().map(repeat).collect()
    }

    /// The bytes of all writes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.writes.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Whether there are as many as there can be, `more` of them in flight.
    pub(super) fn is_full(&self, more: usize) -> bool {
        self.writes.len() + more >= COUNT_MAX
    }

    /// Whether a flush should make room.
    pub(super) fn is_half_full(&self) -> bool {
        self.writes.len() >= COUNT_MAX / 2
    }

    pub(super) fn clear(&mut self) {
        self.writes.clear();
        self.bytes = 0;
    }
}
