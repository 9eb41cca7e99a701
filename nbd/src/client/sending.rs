//! Which requests are sent, and when.
//!
//! It knows nothing about replies. Invariants: see [`super`]; the order of overlapping requests is that of the list
//! ([`super::piece`]).

use super::piece::{Kind, Owner, Piece, Sent};
use super::planted::Planted;
use super::union::Union;
use super::{Client, IN_FLIGHT_MAX, Link};

/// What is known of the requests in front of one, and of all in flight: each request is looked at once.
#[derive(Debug, Default)]
struct Scan {
    in_flight: usize,
    is_flushing: bool,
    /// The bytes of writes in flight, each of which is kept when it has been answered.
    writing: u64,
    /// All kept writes were answered on this connection.
    kept_here: bool,
    /// The ranges that earlier requests use, and that they change.
    used: Union,
    changed: Union,
}

impl Scan {
    /// Whether no earlier request keeps this one back.
    fn is_free(&self, piece: &Piece) -> bool {
        let range = (piece.at, piece.at + piece.len);
        !(self.changed.overlaps(range) || piece.kind.changes() && self.used.overlaps(range))
    }

    fn pass(&mut self, piece: &Piece) {
        // No end overflows: ranges lie inside the export.
        let range = (piece.at, piece.at + piece.len);
        self.used.add(range);
        if piece.kind.changes() {
            self.changed.add(range);
        }
    }

    fn sent(&mut self, piece: &Piece) {
        self.in_flight += 1;
        self.is_flushing |= piece.kind == Kind::Flush;
        if piece.kind == Kind::Write && matches!(piece.owner, Owner::Op(_)) {
            self.writing += piece.len;
        }
    }
}

impl Client {
    /// Sends what may be sent.
    pub(super) fn pump(&mut self) {
        let Link::Up(_) = self.link else { return };
        self.make_room();
        let mut scan = Scan { kept_here: self.kept.are_here(), ..Scan::default() };
        self.pieces.list.iter().filter(|piece| piece.sent.is_some()).for_each(|piece| scan.sent(piece));
        let mut index = 0;
        while scan.in_flight < IN_FLIGHT_MAX && !self.out.is_full() {
            let Some(piece) = self.pieces.list.get(index) else { return };
            let sends = piece.sent.is_none() && self.may_send(piece, &scan);
            scan.pass(piece);
            if sends {
                scan.sent(piece);
                self.send(index);
            }
            index += 1;
        }
    }

    fn may_send(&self, piece: &Piece, scan: &Scan) -> bool {
        if piece.owner == Owner::Sample {
            return true;
        }
        if self.to_compare > 0 {
            return false;
        }
        let ready = match (piece.kind, piece.owner) {
            // It covers what was answered on this connection only. Two are never in flight: a server reports a failed
            // sync once, so that the other one could succeed over lost data.
            (Kind::Flush, _) => scan.kept_here && (!scan.is_flushing || self.trusts_second_flush()),
            (Kind::Write | Kind::Zero, Owner::Op(_)) => {
                let payload = if piece.kind == Kind::Write { piece.len } else { 0 };
                !self.kept.is_full(IN_FLIGHT_MAX) && self.kept.bytes() + scan.writing + payload <= self.kept_max
            }
            _ => true,
        };
        ready && (scan.is_free(piece) || self.pieces.planted == Some(Planted::OverlapsInFlight))
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
