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
//! - On a new connection nothing is sent before a sample of blocks has been read and is as before ([`sample`]).
//! - After a failed flush nothing is written, and no flush succeeds; so no two are in flight together.
//! - The server is hostile: whatever it violates ends the connection with a [`Broken`].

mod broken;
#[cfg(test)]
mod explore;
mod incoming;
mod kept;
mod name;
mod negotiation;
mod piece;
mod planted;
mod ranges;
mod reply;
mod sample;
mod secure;
mod sending;
mod split;
#[cfg(test)]
mod test;
mod to_send;
mod union;

use std::collections::BTreeMap;
use std::mem;

use disk::{Action, FileDone, FileError, FileOp};
use memory::Segments;

use crate::tls::ClientTls;

pub use broken::Broken;
pub use name::NameTooLong;
pub use negotiation::Export;
pub use piece::Described;

use incoming::Incoming;
use kept::Kept;
use name::Canonical;
use negotiation::{Negotiation, Outcome};
use piece::{Kind, Owner, Piece, Pieces, Sent};
use planted::Planted;
use reply::Step;
use sample::Sample;
use secure::Secure;
use split::ZERO_PIECE;
use to_send::ToSend;

/// Maximum number of requests in flight.
pub const IN_FLIGHT_MAX: usize = 64;
/// Maximum number of requests of operations, in flight and waiting, at which an operation is accepted. Kept writes that
/// are sent again do not count: no operation completes with them, so nothing would push again.
const WAITING_MAX: usize = 256;
/// Maximum size of the payload of kept writes. At half of it the client flushes.
const KEPT_MAX: u64 = 32 << 20;
// A write that waits for room must not wait forever: below half of the bound there is room for one.
const _: () = assert!(split::PIECE <= KEPT_MAX / 2);

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
    /// As on the first connection that had one.
    canonical: Canonical,
    /// As on the first connection.
    export: Option<Export>,
    link: Link,
    incoming: Incoming,
    /// Unencrypted, also with TLS.
    out: ToSend,
    secure: Secure,
    pieces: Pieces,
    ops: BTreeMap<u64, Pending>,
    /// The next key of an operation, and the next cookie. Cookies are never used again.
    next_key: u64,
    next_cookie: u64,
    kept: Kept,
    kept_max: u64,
    sample: Sample,
    /// Blocks of the sample that were not compared yet on this connection.
    to_compare: usize,
    /// One of them has the contents as before.
    recognized: bool,
    flush_failed: bool,
    /// A request was answered on this connection.
    answered: bool,
    answers: u64,
    /// Why writing has ended, for people.
    trouble: Option<String>,
    done: Vec<FileDone>,
    /// The last question about allocation, and its answer.
    question: u64,
    described: Option<Vec<Described>>,
}

impl Client {
    /// A client of the export `name`, which is written to if `write`. It has no connection yet.
    pub fn new(name: &str, write: bool) -> Result<Client, NameTooLong> {
        name::must_fit(name)?;
        Ok(Client {
            name: name.to_owned(),
            context: negotiation::ALLOCATION.to_owned(),
            write,
            canonical: Canonical::default(),
            export: None,
            link: Link::Down,
            incoming: Incoming::default(),
            out: ToSend::default(),
            secure: Secure::default(),
            pieces: Pieces::default(),
            ops: BTreeMap::new(),
            next_key: 0,
            next_cookie: 1,
            kept: Kept::default(),
            kept_max: KEPT_MAX,
            sample: Sample::new(write),
            to_compare: 0,
            recognized: false,
            flush_failed: false,
            answered: false,
            answers: 0,
            trouble: None,
            done: Vec::new(),
            question: 0,
            described: None,
        })
    }

    /// The same, with another metadata context than `base:allocation`: [`Client::describe`] then has its flags.
    pub fn of_context(name: &str, context: &str) -> Result<Client, NameTooLong> {
        name::must_fit(context)?;
        Ok(Client { context: context.to_owned(), ..Client::new(name, false)? })
    }

    /// The same client, which requires TLS on each connection: what arrives before it is used for nothing else.
    pub fn with_tls(mut self, tls: ClientTls) -> Client {
        self.secure = Secure::new(tls);
        self
    }

    /// The export, once a connection has been negotiated.
    pub fn export(&self) -> Option<&Export> {
        self.export.as_ref()
    }

    /// Returns true if requests can be sent now.
    pub fn is_up(&self) -> bool {
        matches!(self.link, Link::Up(_)) && self.to_compare == 0
    }

    /// Returns true if the negotiation on the present connection has not ended.
    pub fn is_negotiating(&self) -> bool {
        matches!(self.link, Link::Negotiating(_))
    }

    /// What a connection that ends now, without a reason by the server, may be due to.
    pub fn suspicion(&self) -> Option<&'static str> {
        let securing = matches!(self.link, Link::Negotiating(_)) && self.secure.has_begun();
        securing.then_some("the server may require a certificate of this client: client-cert.pem and client-key.pem")
    }

    /// Returns true if a request was answered on this connection; the comparison of blocks does not count.
    pub fn has_answered(&self) -> bool {
        self.answered
    }

    /// Returns true if the server works as far as one can know: it has answered, or has nothing to answer.
    pub fn works(&self) -> bool {
        self.is_up() && (self.answered || self.pieces.list.is_empty())
    }

    /// The number of requests that were answered, on all connections.
    pub fn answers(&self) -> u64 {
        self.answers
    }

    /// Returns true if an answer is wanted, also to requests that no operation waits for.
    pub fn is_waiting(&self) -> bool {
        !self.pieces.list.is_empty() || !self.ops.is_empty()
    }

    /// The number of writes that were answered and are not covered by an answered flush.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Returns true if no operation is pending.
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.done.is_empty()
    }

    /// There is a new connection.
    pub fn connected(&mut self) {
        self.take_back();
        self.link = Link::Negotiating(Negotiation::new(&self.name, &self.context, self.secure.is_wanted()));
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
        self.secure.end();
        self.pieces.take_back();
        if self.pieces.planted == Some(Planted::FlushAcrossReconnect) {
            self.kept.clear();
        }
        self.sample.lost(self.pieces.planted == Some(Planted::SampleNotFlushed));
        self.to_compare = 0;
        for piece in self.kept.repeat_all().into_iter().rev() {
            self.pieces.list.push_front(piece);
        }
        if self.flush_failed {
            self.fail_writers();
        }
    }

    /// Takes bytes that were received. After an error the owner must close the connection, and report that.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let end = self.secure.receive(bytes, &mut self.incoming)?;
        // A reason that the server gives comes before the end.
        self.take_messages()?;
        end.map_or(Ok(()), Err)
    }

    fn take_messages(&mut self) -> Result<(), Broken> {
        loop {
            match &mut self.link {
                Link::Down => return Ok(()),
                Link::Negotiating(negotiation) => {
                    let found = negotiation.receive(&mut self.incoming, self.out.bytes())?;
                    match found {
                        None => return Ok(()),
                        Some(Outcome::StartTls) => self.start_tls()?,
                        Some(Outcome::Export(export, name)) => self.negotiated(export, name)?,
                    }
                }
                Link::Up(live) => {
                    match reply::step(&mut self.incoming, &mut self.pieces, live, &mut self.sample)? {
                        Step::Incomplete => break,
                        Step::More => {}
                        Step::Ended(index) => self.ended(index)?,
                    };
                }
            }
        }
        self.pump();
        Ok(())
    }

    /// The server is ready for TLS. Whatever it has sent before or behind that, without being waited for, is not from
    /// it as far as one can know.
    fn start_tls(&mut self) -> Result<(), Broken> {
        if !self.incoming.is_empty() || !self.out.unsent().is_empty() {
            return Err(Broken::Negotiation("it sends more than a reply to STARTTLS, or sends that too early"));
        }
        self.secure.begin()?;
        if let Link::Negotiating(negotiation) = &mut self.link {
            negotiation.secured(self.out.bytes());
        }
        Ok(())
    }

    fn negotiated(&mut self, live: Export, canonical: Canonical) -> Result<(), Broken> {
        self.canonical.check_same(&canonical)?;
        match &self.export {
            Some(first) if self.pieces.planted != Some(Planted::SizeChange) => first.check_same(&live)?,
            _ => self.check_usable(&live)?,
        }
        self.canonical.keep(canonical);
        self.export.get_or_insert(live);
        self.link = Link::Up(live);
        self.compare();
        if !live.has_allocation() {
            self.pieces.list.retain(|piece| piece.kind != Kind::Status);
            self.described.get_or_insert_default();
        }
        Ok(())
    }

    /// Puts the reads of the sample in front of all else.
    fn compare(&mut self) {
        if self.pieces.planted == Some(Planted::NotCompared) {
            return;
        }
        self.recognized = false;
        for (at, len) in self.sample.blocks() {
            let memory = Segments::zeroed(memory::size::in_memory(len));
            self.pieces.list.push_front(Piece { memory, ..Piece::new(Owner::Sample, Kind::Read, at, len) });
            self.to_compare += 1;
        }
    }

    /// A block of the sample was read.
    fn compared(&mut self, piece: &Piece, result: Result<(), FileError>) -> Result<(), Broken> {
        self.to_compare -= 1;
        // A block that cannot be read now proves nothing.
        if result.is_ok() {
            if !self.sample.is_same(piece.at, &piece.memory) {
                return Err(Broken::Changed(format!("the block at byte {} has other contents than before", piece.at)));
            }
            self.recognized = true;
        }
        match self.to_compare == 0 && !self.recognized {
            true => Err(Broken::Changed("none of the blocks by which it is recognized can be read".to_owned())),
            false => Ok(()),
        }
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
        self.secure.outgoing(&mut self.out)
    }

    /// `len` bytes were sent.
    pub fn sent(&mut self, len: usize) {
        self.secure.sent(len, &mut self.out);
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

    /// A request was answered.
    fn ended(&mut self, index: usize) -> Result<(), Broken> {
        let Some(mut piece) = self.pieces.list.remove(index) else { return Ok(()) };
        if piece.owner != Owner::Sample {
            self.answered = true;
            self.answers += 1;
        }
        let mut sent = piece.sent.take().unwrap_or_default();
        let over = self.flush_failed && piece.kind == Kind::Flush && !self.trusts_second_flush();
        let result = sent.error.or(over.then_some(FAILED)).map_or(Ok(()), Err);
        match (piece.owner, result) {
            (Owner::Sample, result) => return self.compared(&piece, result),
            (Owner::Allocation(number), _) if number == self.question => {
                let is_allocation = self.context == negotiation::ALLOCATION;
                sent.described.iter_mut().for_each(|extent| extent.zero &= is_allocation);
                self.described = Some(sent.described);
            }
            (Owner::Allocation(_), _) => {}
            (Owner::Replay(number), Ok(())) => self.kept.repeated(number),
            // What was answered before cannot be kept: no flush may succeed.
            (Owner::Replay(_), Err(error)) => self.break_flushes("a write that it had answered before", error),
            (Owner::Room, Ok(())) => self.flushed(&sent),
            (Owner::Room, Err(error)) => self.break_flushes("a flush", error),
            (Owner::Op(key), result) => {
                match (piece.kind, result) {
                    (Kind::Write | Kind::Zero, Ok(())) => {
                        let bytes = piece.bytes.iter().filter(|_| piece.kind == Kind::Write);
                        bytes.for_each(|bytes| self.sample.seen(piece.at, bytes));
                        self.kept.add(piece);
                    }
                    (Kind::Flush, Ok(())) => self.flushed(&sent),
                    (Kind::Flush, Err(error)) => self.break_flushes("a flush", error),
                    _ => {}
                }
                self.part_ended(key, result);
            }
        }
        Ok(())
    }

    fn flushed(&mut self, sent: &Sent) {
        let all = self.pieces.planted == Some(Planted::FlushCoversLater);
        self.kept.flushed(if all { u64::MAX } else { sent.covers });
        self.sample.flushed(sent.covers_sample);
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
        self.pieces.list.retain(|piece| piece.sent.is_some() || !matches!(piece.owner, Owner::Replay(_)));
        self.fail_writers();
    }

    /// Fails all writes and flushes that are not in flight, but for the writes that were answered before: nothing newer
    /// can be there, and reads must not show what is older.
    fn fail_writers(&mut self) {
        let all = mem::take(&mut self.pieces.list);
        for piece in all {
            match (piece.owner, piece.sent.is_none() && (piece.kind.changes() || piece.kind == Kind::Flush)) {
                (_, false) => self.pieces.list.push_back(piece),
                (Owner::Replay(_), true) => self.pieces.list.push_back(piece),
                (Owner::Op(key), true) => self.part_ended(key, Err(FAILED)),
                (_, true) => {}
            }
        }
    }
}
