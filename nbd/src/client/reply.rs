//! Replies of a server, which is hostile: simple and structured ones, in any order, chunks in any order.
//!
//! It knows nothing about operations. Invariants: data is copied only into the read that its cookie names, inside of
//! its range, and after all of the chunk has arrived; a read ends well only if each of its bytes has arrived once; no
//! message longer than its request allows is waited for.

use disk::FileError;
use memory::size::{in_memory, on_disk};

use super::broken::Broken;
use super::incoming::{Incoming, u16_at, u32_at, u64_at};
use super::negotiation::Export;
use super::piece::{Described, Kind, Owner, Piece, Pieces};
use super::planted::Planted;
use super::sample::Sample;
use crate::wire;

/// Headers of a simple reply and of a chunk.
const SIMPLE: usize = size_of::<wire::SimpleReply>();
const CHUNK: usize = size_of::<wire::ChunkHeader>();
/// Maximum length of a chunk with extents: as much as servers send.
const STATUS_MAX: u64 = 4 + (1 << 20);
/// Maximum length of a chunk with an error: number, length of the message, message, offset.
const ERROR_MAX: u64 = 4 + 2 + 4096 + 8;

/// What a step through the received bytes has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Not yet a whole message.
    Incomplete,
    /// A part of a reply.
    More,
    /// This request is answered.
    Ended(usize),
}

/// Consumes the next message, if it has arrived.
pub(super) fn step(
    incoming: &mut Incoming,
    pieces: &mut Pieces,
    live: &Export,
    sample: &mut Sample,
) -> Result<Step, Broken> {
    let Some(magic) = incoming.peek(4).and_then(|bytes| u32_at(bytes, 0)) else { return Ok(Step::Incomplete) };
    match magic {
        wire::SIMPLE_REPLY_MAGIC => simple(incoming, pieces, live, sample),
        wire::CHUNK_MAGIC if live.structured => chunk(incoming, pieces, sample),
        wire::CHUNK_MAGIC => Err(Broken::Reply("a structured reply, which was not negotiated")),
        other => Err(Broken::Magic(other)),
    }
}

fn found(pieces: &mut Pieces, cookie: u64) -> Result<(usize, &mut Piece), Broken> {
    let index = pieces.find(cookie).ok_or(Broken::UnknownCookie(cookie))?;
    pieces.list.get_mut(index).map(|piece| (index, piece)).ok_or(Broken::UnknownCookie(cookie))
}

fn simple(incoming: &mut Incoming, pieces: &mut Pieces, live: &Export, sample: &mut Sample) -> Result<Step, Broken> {
    let Some(header) = incoming.peek(SIMPLE) else { return Ok(Step::Incomplete) };
    let (error, cookie) = (u32_at(header, 4).unwrap_or_default(), u64_at(header, 8).unwrap_or_default());
    let (index, piece) = found(pieces, cookie)?;
    if matches!(piece.kind, Kind::Read | Kind::Status) && live.structured {
        return Err(Broken::Reply("a simple reply to a request whose reply must be structured"));
    }
    let data = if piece.kind == Kind::Read && error == 0 { in_memory(piece.len) } else { 0 };
    let Some(reply) = incoming.take(SIMPLE + data) else { return Ok(Step::Incomplete) };
    if let Some(bytes) = reply.get(SIMPLE..).filter(|bytes| !bytes.is_empty()) {
        piece.memory.copy_from(bytes);
        see(sample, piece, piece.at, bytes);
    }
    record(piece, error)?;
    Ok(Step::Ended(index))
}

fn chunk(incoming: &mut Incoming, pieces: &mut Pieces, sample: &mut Sample) -> Result<Step, Broken> {
    let Some(header) = incoming.peek(CHUNK) else { return Ok(Step::Incomplete) };
    let flags = u16_at(header, 4).unwrap_or_default();
    let kind = u16_at(header, 6).unwrap_or_default();
    let cookie = u64_at(header, 8).unwrap_or_default();
    let len = u32_at(header, 16).unwrap_or_default();
    let accepts_short = pieces.planted == Some(Planted::ShortRead);
    let (index, piece) = found(pieces, cookie)?;
    check_len(piece, kind, u64::from(len))?;
    let Some(message) = incoming.take(CHUNK + in_memory(u64::from(len))) else { return Ok(Step::Incomplete) };
    let payload = message.get(CHUNK..).unwrap_or_default();
    let last = flags & wire::CHUNK_DONE != 0;
    match kind {
        wire::CHUNK_NONE if last => {}
        wire::CHUNK_NONE => return Err(Broken::Reply("an empty chunk that is not the last one")),
        wire::CHUNK_OFFSET_DATA => data(piece, payload, sample)?,
        wire::CHUNK_OFFSET_HOLE => hole(piece, payload)?,
        wire::CHUNK_BLOCK_STATUS => status(piece, payload)?,
        _ => error(piece, payload)?,
    }
    match last {
        true => finish(piece, accepts_short).map(|()| Step::Ended(index)),
        false => Ok(Step::More),
    }
}

/// Checks type and length of a chunk before its payload is waited for.
fn check_len(piece: &Piece, kind: u16, len: u64) -> Result<(), Broken> {
    let right = match kind {
        wire::CHUNK_NONE => len == 0,
        wire::CHUNK_OFFSET_DATA => piece.kind == Kind::Read && len > 8 && len - 8 <= piece.len,
        wire::CHUNK_OFFSET_HOLE => piece.kind == Kind::Read && len == 12,
        wire::CHUNK_BLOCK_STATUS => {
            piece.kind == Kind::Status && (12..=STATUS_MAX).contains(&len) && (len - 4) % 8 == 0
        }
        error if error & wire::CHUNK_IS_ERROR != 0 => (6..=ERROR_MAX).contains(&len),
        _ => return Err(Broken::Reply("a chunk of a type that this client has not negotiated")),
    };
    right.then_some(()).ok_or(Broken::Reply("a chunk whose type or length does not fit its request"))
}

/// Marks a range of a read as arrived; returns where it lies in the read's memory.
fn arrives(piece: &mut Piece, at: u64, len: u64) -> Result<usize, Broken> {
    let end = at.checked_add(len).filter(|&end| len > 0 && at >= piece.at && end <= piece.at + piece.len);
    let end = end.ok_or(Broken::Reply("a chunk outside of its read"))?;
    let from = in_memory(at - piece.at);
    match &mut piece.sent {
        Some(sent) => sent.arrived.add(at, end).map(|()| from).map_err(Broken::Reply),
        None => Err(Broken::Reply("a chunk of no request")),
    }
}

/// Data of an operation is what the disk is recognized by later.
fn see(sample: &mut Sample, piece: &Piece, at: u64, bytes: &[u8]) {
    if matches!(piece.owner, Owner::Op(_)) {
        sample.seen(at, bytes);
    }
}

fn data(piece: &mut Piece, payload: &[u8], sample: &mut Sample) -> Result<(), Broken> {
    let (Some(at), Some(bytes)) = (u64_at(payload, 0), payload.get(8..)) else {
        return Err(Broken::Reply("a chunk of data without an offset"));
    };
    let from = arrives(piece, at, on_disk(bytes.len()))?;
    piece.memory.slice(from, bytes.len()).copy_from(bytes);
    see(sample, piece, at, bytes);
    Ok(())
}

fn hole(piece: &mut Piece, payload: &[u8]) -> Result<(), Broken> {
    let (Some(at), Some(len)) = (u64_at(payload, 0), u32_at(payload, 8)) else {
        return Err(Broken::Reply("a hole without a range"));
    };
    let len = u64::from(len);
    let from = arrives(piece, at, len)?;
    piece.memory.slice(from, in_memory(len)).fill_zero();
    Ok(())
}

/// Only one context is negotiated.
fn status(piece: &mut Piece, payload: &[u8]) -> Result<(), Broken> {
    let (asked, Some(sent)) = (piece.len, &mut piece.sent) else {
        return Err(Broken::Reply("extents of no request"));
    };
    if !sent.described.is_empty() {
        return Err(Broken::Reply("two descriptions of one range"));
    }
    let mut left = asked;
    for extent in payload.get(4..).unwrap_or_default().chunks_exact(8) {
        let len = u32_at(extent, 0).map_or(0, u64::from).min(left);
        if len == 0 {
            return Err(Broken::Reply("an extent that is empty, or behind the range"));
        }
        left -= len;
        let flags = u32_at(extent, 4).unwrap_or_default();
        sent.described.push(Described { len, zero: flags & wire::STATE_ZERO != 0, flags });
    }
    Ok(())
}

fn error(piece: &mut Piece, payload: &[u8]) -> Result<(), Broken> {
    let number = u32_at(payload, 0).unwrap_or_default();
    let said = u16_at(payload, 4).map_or(0, usize::from);
    if number == 0 || payload.len() < 6 + said {
        return Err(Broken::Reply("an error without a number, or shorter than its message"));
    }
    record(piece, number)
}

/// Records an error of a request; 0 means success.
fn record(piece: &mut Piece, number: u32) -> Result<(), Broken> {
    let error = match number {
        0 => return Ok(()),
        108 => return Err(Broken::ShuttingDown),
        28 => FileError::NoSpace,
        95 if piece.kind == Kind::Zero => FileError::Unsupported,
        // "Error values": every other number is to be taken as EINVAL.
        1 | 5 | 12 | 22 | 75 | 95 => FileError::Failed(i32::try_from(number).unwrap_or(5)),
        _ => FileError::Failed(22),
    };
    if let Some(sent) = &mut piece.sent {
        sent.error.get_or_insert(error);
    }
    Ok(())
}

/// The last chunk has arrived: all requested data must be there.
fn finish(piece: &Piece, accepts_short: bool) -> Result<(), Broken> {
    let Some(sent) = &piece.sent else { return Err(Broken::Reply("an end of no request")) };
    let whole = match piece.kind {
        _ if sent.error.is_some() || accepts_short => true,
        Kind::Read => sent.arrived.are(piece.at, piece.at + piece.len),
        Kind::Status => !sent.described.is_empty(),
        Kind::Write | Kind::Zero | Kind::Flush => true,
    };
    whole.then_some(()).ok_or(Broken::Short { at: piece.at, len: piece.len })
}
