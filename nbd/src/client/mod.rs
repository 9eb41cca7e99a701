//! The client's side of NBD, across lost connections: operations in, bytes out; bytes in, outcomes out.
//!
//! It has no socket and no clock. Its owner connects ([`Client::connected`]), moves bytes, reports the end of each
//! connection ([`Client::disconnected`]), and may at any time fail what waits ([`Client::fail_waiting`]).
//!
//! Invariants (decision 0060):
//! - Each operation completes once. What a lost connection has not answered is sent again on the next one.
//! - What was answered and is not covered by an answered flush is sent again too, before the next flush and before
//!   anything that overlaps it: a server that restarts has lost it, and NBD cannot prove that it did not. It is
//!   bounded: at half of the bound the client flushes by itself.
//! - Of two overlapping requests, one of which writes, the later one waits for the earlier one's answer. So nothing
//!   that is sent again can undo a newer write, and no answered and flushed write is ever written again.
//! - After a failed flush nothing is written, and no flush succeeds; so no two are in flight together.
//! - The server is hostile: whatever it violates ends the connection with a [`Broken`].

mod broken;
#[cfg(test)]
mod explore;
mod incoming;
mod kept;
mod negotiation;
mod piece;
mod planted;
mod ranges;
mod reply;
#[cfg(test)]
mod test;
mod to_send;

use std::collections::BTreeMap;
use std::mem;

use disk::{Action, FileDone, FileError, FileOp};
use memory::Segments;
use memory::size::on_disk;

pub use broken::Broken;
pub use negotiation::Export;
pub use piece::Described;

use incoming::Incoming;
use kept::Kept;
use negotiation::Negotiation;
use piece::{Kind, Owner, Piece, Pieces, Sent, cut};
use planted::Planted;
use reply::Step;
use to_send::ToSend;

/// Maximum number of requests in flight.
pub const IN_FLIGHT_MAX: usize = 64;
/// Maximum number of requests of operations, in flight and waiting, at which an operation is accepted. Kept writes that
/// are sent again do not count: no operation completes with them, so nothing would push again.
const WAITING_MAX: usize = 256;
/// Larger transfers are split: this size, times the number in flight, is the memory for their payload.
const PIECE: u64 = 1 << 20;
/// Larger zeroes are split: they have no payload, but a server must end each of them.
const ZERO_PIECE: u64 = 1 << 30;
/// Maximum size of the payload of kept writes. At half of it the client flushes.
const KEPT_MAX: u64 = 32 << 20;
// A write that waits for room must not wait forever: below half of the bound there is room for one.
const _: () = assert!(PIECE <= KEPT_MAX / 2);

/// EIO, EINVAL and EROFS.
const FAILED: FileError = FileError::Failed(5);
const INVALID: FileError = FileError::Failed(22);
const READ_ONLY: FileError = FileError::Failed(30);

#[derive(Debug)]
enum Link {
    Down,
    Negotiating(Negotiation),
    Up(Export),
}

/// An operation whose requests are not all answered.
#[derive(Debug)]
struct Pending {
    op: FileOp,
    parts: usize,
    result: Result<(), FileError>,
}

/// A client of one export.
#[derive(Debug)]
pub struct Client {
    name: String,
    /// The metadata context of [`Client::describe`].
    context: String,
    write: bool,
    /// As on the first connection.
    export: Option<Export>,
    link: Link,
    incoming: Incoming,
    out: ToSend,
    pieces: Pieces,
    ops: BTreeMap<u64, Pending>,
    /// The next key of an operation, and the next cookie. Cookies are never used again.
    next_key: u64,
    next_cookie: u64,
    kept: Kept,
    kept_max: u64,
    flush_failed: bool,
    /// A request was answered on this connection.
    answered: bool,
    /// Why writing has ended, for people.
    trouble: Option<String>,
    done: Vec<FileDone>,
    /// The last question about allocation, and its answer.
    question: u64,
    described: Option<Vec<Described>>,
}

/// The name of an export is longer than the protocol allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of the export, or of the metadata context, has more than 4096 bytes")]
pub struct NameTooLong;

impl Client {
    /// A client of the export `name`, which is written to if `write`. It has no connection yet.
    pub fn new(name: &str, write: bool) -> Result<Client, NameTooLong> {
        if name.len() > crate::wire::STRING_MAX {
            return Err(NameTooLong);
        }
        Ok(Client {
            name: name.to_owned(),
            context: negotiation::ALLOCATION.to_owned(),
            write,
            export: None,
            link: Link::Down,
            incoming: Incoming::default(),
            out: ToSend::default(),
            pieces: Pieces::default(),
            ops: BTreeMap::new(),
            next_key: 0,
            next_cookie: 1,
            kept: Kept::default(),
            kept_max: KEPT_MAX,
            flush_failed: false,
            answered: false,
            trouble: None,
            done: Vec::new(),
            question: 0,
            described: None,
        })
    }

    /// The same, with another metadata context than `base:allocation`: [`Client::describe`] then has its flags.
    pub fn of_context(name: &str, context: &str) -> Result<Client, NameTooLong> {
        if context.len() > crate::wire::STRING_MAX {
            return Err(NameTooLong);
        }
        Ok(Client { context: context.to_owned(), ..Client::new(name, false)? })
    }

    /// The export, once a connection has been negotiated.
    pub fn export(&self) -> Option<&Export> {
        self.export.as_ref()
    }

    /// Returns true if requests can be sent now.
    pub fn is_up(&self) -> bool {
        matches!(self.link, Link::Up(_))
    }

    /// Returns true if a request was answered on this connection.
    pub fn has_answered(&self) -> bool {
        self.answered
    }

    /// Returns true if the server works as far as one can know: it has answered, or has nothing to answer.
    pub fn works(&self) -> bool {
        self.is_up() && (self.answered || self.pieces.list.is_empty())
    }

    /// Returns true if no operation is pending.
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.done.is_empty()
    }

    /// There is a new connection.
    pub fn connected(&mut self) {
        self.take_back();
        self.link = Link::Negotiating(Negotiation::new(&self.name, &self.context));
    }

    /// The connection has ended. Operations stay pending.
    pub fn disconnected(&mut self) {
        self.take_back();
    }

    fn take_back(&mut self) {
        self.link = Link::Down;
        self.answered = false;
        self.incoming.clear();
        self.out.clear();
        self.pieces.take_back();
        if self.pieces.planted == Some(Planted::FlushAcrossReconnect) {
            self.kept.clear();
        }
        for piece in self.kept.repeat_all().into_iter().rev() {
            self.pieces.list.push_front(piece);
        }
        if self.flush_failed {
            self.fail_writers();
        }
    }

    /// Takes bytes that were received. After an error the owner must close the connection, and report that.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        self.incoming.push(bytes);
        loop {
            match &mut self.link {
                Link::Down => return Ok(()),
                Link::Negotiating(negotiation) => {
                    let found = negotiation.receive(&mut self.incoming, self.out.bytes())?;
                    let Some(export) = found else { return Ok(()) };
                    self.negotiated(export)?;
                }
                Link::Up(live) => {
                    match reply::step(&mut self.incoming, &mut self.pieces, live)? {
                        Step::Incomplete => break,
                        Step::More => {}
                        Step::Ended(index) => self.ended(index),
                    };
                }
            }
        }
        self.pump();
        Ok(())
    }

    fn negotiated(&mut self, live: Export) -> Result<(), Broken> {
        match &self.export {
            Some(first) if self.pieces.planted != Some(Planted::SizeChange) => first.check_same(&live)?,
            _ => self.check_usable(&live)?,
        }
        self.export.get_or_insert(live);
        self.link = Link::Up(live);
        if !live.has_allocation() {
            self.pieces.list.retain(|piece| piece.kind != Kind::Status);
            self.described.get_or_insert_default();
        }
        Ok(())
    }

    fn check_usable(&self, live: &Export) -> Result<(), Broken> {
        let unusable = |why: &str| Err(Broken::Unusable(why.to_owned()));
        match self.write {
            true if live.read_only => unusable("it is read-only; open it for reading, or start its server for writing"),
            true if !live.can_flush => unusable("its server has no flush, so that no write would ever be durable"),
            _ => Ok(()),
        }
    }

    /// Bytes to send. Those that were sent must be reported.
    pub fn to_send(&mut self) -> &[u8] {
        self.pump();
        self.out.unsent()
    }

    /// `len` bytes were sent.
    pub fn sent(&mut self, len: usize) {
        self.out.sent(len);
    }

    /// Accepts an operation, or hands it back: there are too many, or no connection has been negotiated yet.
    pub fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        let Some(export) = self.export else { return Err(op) };
        if self.pieces.of_operations() >= WAITING_MAX {
            return Err(op);
        }
        let key = self.next_key;
        match self.split(&op, &export, key) {
            Ok(pieces) if !pieces.is_empty() => {
                self.next_key += 1;
                self.ops.insert(key, Pending { op, parts: pieces.len(), result: Ok(()) });
                self.pieces.list.extend(pieces);
                self.pump();
            }
            Ok(_) => self.done.push(FileDone { op, result: Ok(()) }),
            Err(error) => self.done.push(FileDone { op, result: Err(error) }),
        }
        Ok(())
    }

    /// Why nothing more is written, for people; once.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    /// Moves completed operations into `done`.
    pub fn take_done(&mut self, done: &mut Vec<FileDone>) {
        done.append(&mut self.done);
    }

    /// Queries which parts of a range read as zeroes. The answer, which covers the range or a part of it from its
    /// beginning, is in [`Client::take_described`]; it is empty where the server cannot tell.
    pub fn describe(&mut self, at: u64, len: u64) {
        // The answer to an earlier question may still come; it is dropped.
        self.question += 1;
        self.pieces.list.retain(|piece| piece.kind != Kind::Status || piece.sent.is_some());
        self.described = None;
        // It may have been negotiated on this connection and not on the first one, or the reverse.
        let live = if let Link::Up(live) = &self.link { Some(*live) } else { self.export };
        let export = live.filter(|export| export.has_allocation());
        let Some((inside, unit)) = export.map(|export| (export.size.saturating_sub(at), u64::from(export.block_min)))
        else {
            self.described = Some(Vec::new());
            return;
        };
        let len = len.min(inside).min(ZERO_PIECE);
        match len > 0 && at % unit == 0 && len % unit == 0 {
            true => self.pieces.list.push_back(Piece::new(Owner::Allocation(self.question), Kind::Status, at, len)),
            false => self.described = Some(Vec::new()),
        }
    }

    /// The answer to [`Client::describe`], once.
    pub fn take_described(&mut self) -> Option<Vec<Described>> {
        self.described.take()
    }

    /// Fails all operations if there is no connection. A failed write may have reached any part of its range.
    pub fn fail_waiting(&mut self) {
        if self.is_up() {
            return;
        }
        self.pieces.list.retain(|piece| !matches!(piece.owner, Owner::Op(_) | Owner::Allocation(_)));
        self.described = Some(Vec::new());
        for Pending { op, .. } in mem::take(&mut self.ops).into_values() {
            // A flush that failed must not be followed by one that succeeds.
            self.flush_failed |= matches!(op.action, Action::SyncData);
            self.done.push(FileDone { op, result: Err(FAILED) });
        }
    }

    /// The requests of an operation.
    fn split(&self, op: &FileOp, export: &Export, key: u64) -> Result<Vec<Piece>, FileError> {
        let unit = u64::from(export.block_min);
        let most = PIECE.min(u64::from(export.block_max) / unit.max(512) * unit.max(512));
        let owner = Owner::Op(key);
        let check_write = |at: u64, len: u64, error| match () {
            () if !self.write => Err(READ_ONLY),
            () if self.flush_failed => Err(FAILED),
            () if at.checked_add(len).is_none_or(|end| end > export.size) => Err(error),
            () => Ok(()),
        };
        match &op.action {
            Action::Read { at, into } => {
                let inside = export.size.saturating_sub(at.0).min(on_disk(into.len()));
                let rest = into.slice(memory::size::in_memory(inside), into.len() - memory::size::in_memory(inside));
                rest.fill_zero();
                cut(owner, Kind::Read, (at.0, inside), into, (most, unit))
            }
            Action::Write { at, from } => {
                let len = on_disk(from.len());
                check_write(at.0, len, FileError::NoSpace)?;
                cut(owner, Kind::Write, (at.0, len), from, (most, unit))
            }
            Action::Deallocate { at, len } => {
                check_write(at.0, *len, INVALID)?;
                let fits = export.can_zero && at.0 % unit == 0 && len % unit == 0;
                match fits {
                    true => cut(owner, Kind::Zero, (at.0, *len), &Segments::empty(), (ZERO_PIECE, unit)),
                    false => Err(FileError::Unsupported),
                }
            }
            Action::SyncData if self.flush_failed => Err(FAILED),
            Action::SyncData if !self.write => Ok(Vec::new()),
            Action::SyncData => Ok(vec![Piece::new(owner, Kind::Flush, 0, 0)]),
        }
    }

    /// Sends what may be sent.
    fn pump(&mut self) {
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

    fn trusts_second_flush(&self) -> bool {
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
        let covers = self.kept.next();
        if let Some(piece) = self.pieces.list.get_mut(index) {
            if piece.kind == Kind::Write && piece.bytes.is_none() {
                piece.bytes = Some(piece.memory.to_vec().into());
            }
            piece.sent = Some(Sent { cookie, covers, ..Sent::default() });
            self.out.request(piece, cookie);
        }
    }

    /// A request was answered.
    fn ended(&mut self, index: usize) {
        let Some(mut piece) = self.pieces.list.remove(index) else { return };
        self.answered = true;
        let sent = piece.sent.take().unwrap_or_default();
        let over = self.flush_failed && piece.kind == Kind::Flush && !self.trusts_second_flush();
        let result = sent.error.or(over.then_some(FAILED)).map_or(Ok(()), Err);
        match (piece.owner, result) {
            (Owner::Allocation(number), _) if number == self.question => self.described = Some(sent.described),
            (Owner::Allocation(_), _) => {}
            (Owner::Replay(number), Ok(())) => self.kept.repeated(number),
            // What was answered before cannot be kept: no flush may succeed.
            (Owner::Replay(_), Err(error)) => self.break_flushes("a write that it had answered before", error),
            (Owner::Room, Ok(())) => self.flushed(sent.covers),
            (Owner::Room, Err(error)) => self.break_flushes("a flush", error),
            (Owner::Op(key), result) => {
                match (piece.kind, result) {
                    (Kind::Write | Kind::Zero, Ok(())) => self.kept.add(piece),
                    (Kind::Flush, Ok(())) => self.flushed(sent.covers),
                    (Kind::Flush, Err(error)) => self.break_flushes("a flush", error),
                    _ => {}
                }
                self.part_ended(key, result);
            }
        }
    }

    fn flushed(&mut self, covers: u64) {
        let all = self.pieces.planted == Some(Planted::FlushCoversLater);
        self.kept.flushed(if all { u64::MAX } else { covers });
    }

    fn part_ended(&mut self, key: u64, result: Result<(), FileError>) {
        let Some(pending) = self.ops.get_mut(&key) else { return };
        pending.parts -= 1;
        pending.result = pending.result.and(result);
        if pending.parts == 0 {
            if let Some(Pending { op, result, .. }) = self.ops.remove(&key) {
                self.done.push(FileDone { op, result });
            }
        }
    }

    /// A flush has failed: nothing is written from now on.
    fn break_flushes(&mut self, refused: &str, error: FileError) {
        if !mem::replace(&mut self.flush_failed, true) {
            self.trouble = Some(format!("the server has failed {refused}: {error}; nothing more is written to it"));
        }
        self.kept.clear();
        self.fail_writers();
    }

    /// Fails all writes and flushes that are not in flight.
    fn fail_writers(&mut self) {
        let all = mem::take(&mut self.pieces.list);
        for piece in all {
            match (piece.owner, piece.sent.is_none() && (piece.kind.changes() || piece.kind == Kind::Flush)) {
                (_, false) => self.pieces.list.push_back(piece),
                (Owner::Op(key), true) => self.part_ended(key, Err(FAILED)),
                (_, true) => {}
            }
        }
    }
}
