//! Which requests are sent, and when.
//!
//! It knows nothing about replies. Invariants: see [`super`]; the order of overlapping requests is that of the list
//! ([`super::piece`]).

use super::piece::{Kind, Owner, Piece, Sent};
use super::planted::Planted;
use super::{Client, IN_FLIGHT_MAX, Link};

impl Client {
    /// Sends what may be sent.
    pub(super) fn pump(&mut self) {
        let Link::Up(_) = self.link else { return };
        self.make_room();
        let mut in_flight = self.pieces.in_flight();
        let mut index = 0;
        while index < self.pieces.list.len() && in_flight < IN_FLIGHT_MAX && !self.out.is_full() {
            if self.may_send(index) {
                self.send(index);
                in_flight += 1;
            }
            index += 1;
        }
    }

    fn may_send(&self, index: usize) -> bool {
        let Some(piece) = self.pieces.list.get(index).filter(|piece| piece.sent.is_none()) else { return false };
        if piece.owner == Owner::Sample {
            return true;
        }
        if self.to_compare > 0 {
            return false;
        }
        let ready = match (piece.kind, piece.owner) {
            // It covers what was answered on this connection only. Two are never in flight: a server reports a failed
            // sync once, so that the other one could succeed over lost data.
            (Kind::Flush, _) => self.kept.are_here() && (!self.pieces.is_flushing() || self.trusts_second_flush()),
            (Kind::Write | Kind::Zero, Owner::Op(_)) => {
                let payload = if piece.kind == Kind::Write { piece.len } else { 0 };
                let kept = self.kept.bytes() + self.pieces.writing();
                !self.kept.is_full(IN_FLIGHT_MAX) && kept + payload <= self.kept_max
            }
            _ => true,
        };
        ready && self.pieces.is_free(index)
    }

    pub(super) fn trusts_second_flush(&self) -> bool {
        self.pieces.planted == Some(Planted::FlushesTogether)
    }

    /// Flushes if kept writes take half of their room.
    fn make_room(&mut self) {
        let wanted = self.kept.is_half_full() || self.kept.bytes() + self.pieces.writing() > self.kept_max / 2;
        let flushes = self.pieces.list.iter().any(|piece| piece.kind == Kind::Flush);
        if wanted && !flushes && !self.kept.is_empty() {
            self.pieces.list.push_back(Piece::new(Owner::Room, Kind::Flush, 0, 0));
        }
    }

    fn send(&mut self, index: usize) {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let (covers, covers_sample) = (self.kept.next(), self.sample.next());
        if let Some(piece) = self.pieces.list.get_mut(index) {
            if piece.kind == Kind::Write && piece.bytes.is_none() {
                piece.bytes = Some(piece.memory.to_vec().into());
            }
            if piece.kind.changes() {
                self.sample.forget(piece.at, piece.len);
            }
            piece.sent = Some(Sent { cookie, covers, covers_sample, ..Sent::default() });
            self.out.request(piece, cookie);
        }
    }
}
