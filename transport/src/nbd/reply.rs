//! Encodes replies, except the data of a read, which follows them.
//!
//! "Structured replies": once negotiated, READ and BLOCK_STATUS must be answered by chunks. Success of other commands
//! remains a simple reply, which is shorter; an error is a chunk, which can include a message.

use disk::{Extent, ExtentKind, Span, Status};
use zerocopy::IntoBytes;

use super::command::ErrorReply;
use super::export::Negotiated;
use super::handshake::{ALLOCATION_ID, DEPTH_ID};
use super::outgoing::Head;
use super::wire::{self, ChunkHeader, Descriptor, Errno, SimpleReply};

/// The maximum number of extents in a reply, which is then 64 KiB. The client requests the rest separately.
const DESCRIPTORS_MAX: usize = 8192;

/// The only mapping from status to protocol error; `None` is success.
pub(super) fn error_reply(status: Status) -> Option<ErrorReply> {
    let (errno, why) = match status {
        Status::Done => return None,
        Status::Failed => (Errno::Io, "I/O error on the storage"),
        Status::NoSpace => (Errno::NoSpace, "no space left on the storage"),
        Status::Refused => (Errno::NotPermitted, "the disk is read-only now"),
        Status::Unsupported => (Errno::Invalid, "the disk does not support this operation"),
    };
    Some(ErrorReply { errno, why })
}

/// The reply for success without data.
pub(super) fn done(negotiated: Negotiated, reads: bool, cookie: u64) -> Head {
    if negotiated.structured && reads { chunk(wire::CHUNK_NONE, cookie, &[], 0) } else { simple(cookie, 0) }
}

/// The reply for an error.
pub(super) fn error(negotiated: Negotiated, cookie: u64, error_reply: ErrorReply) -> Head {
    let errno = error_reply.errno.number();
    if !negotiated.structured {
        return simple(cookie, errno);
    }
    let why = error_reply.why.as_bytes();
    let mut payload = errno.to_be_bytes().to_vec();
    let Ok(len) = u16::try_from(why.len()) else { unreachable!("a text of our own has less than 64 KiB") };
    payload.extend_from_slice(&len.to_be_bytes());
    payload.extend_from_slice(why);
    chunk(wire::CHUNK_ERROR, cookie, &payload, 0)
}

/// The reply for a successful read; `span.len` bytes of data must follow.
pub(super) fn data(negotiated: Negotiated, cookie: u64, span: Span) -> Head {
    if negotiated.structured {
        let Ok(len) = u32::try_from(span.len) else { unreachable!("a read has at most REQUEST_MAX bytes") };
        chunk(wire::CHUNK_OFFSET_DATA, cookie, &span.at.0.to_be_bytes(), len)
    } else {
        simple(cookie, 0)
    }
}

/// The reply with the extents of `span`: a chunk for each negotiated context.
pub(super) fn extents(negotiated: Negotiated, cookie: u64, span: Span, extents: &[Extent], one: bool) -> Head {
    let contexts = [
        negotiated.allocation.then_some((ALLOCATION_ID, allocation as fn(&Extent) -> u32)),
        negotiated.depth.then_some((DEPTH_ID, |extent| extent.depth)),
    ];
    let mut contexts = contexts.into_iter().flatten().peekable();
    let mut bytes = Head::new();
    while let Some((id, state)) = contexts.next() {
        let flags = if contexts.peek().is_some() { 0 } else { wire::CHUNK_DONE };
        let payload = context(id, span, extents, one, state);
        bytes.extend_from_slice(&chunk_of(flags, wire::CHUNK_BLOCK_STATUS, cookie, &payload, 0));
    }
    bytes
}

/// The state of an extent in `base:allocation`.
fn allocation(extent: &Extent) -> u32 {
    match extent.kind {
        ExtentKind::Data => 0,
        ExtentKind::Hole => wire::STATE_HOLE | wire::STATE_ZERO,
    }
}

/// The payload for one context. Adjacent extents of the same state are merged. If `extents` are shorter than `span`, so
/// is the reply.
fn context(id: u32, span: Span, extents: &[Extent], one: bool, state: fn(&Extent) -> u32) -> Vec<u8> {
    let limit = if one { 1 } else { DESCRIPTORS_MAX };
    let mut payload = id.to_be_bytes().to_vec();
    let mut left = span.len;
    let runs = extents.chunk_by(|a, b| state(a) == state(b));
    for (run, state) in runs.filter_map(|run| Some((run, state(run.first()?)))).take(limit) {
        let len = run.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len)).min(left);
        if len == 0 {
            break;
        }
        left -= len;
        let Ok(len) = u32::try_from(len) else { unreachable!("the length of a request has 32 bits") };
        payload.extend_from_slice(Descriptor { len: len.into(), state: state.into() }.as_bytes());
    }
    payload
}

fn simple(cookie: u64, error: u32) -> Head {
    let reply = SimpleReply { magic: wire::SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() };
    Head::from_slice(reply.as_bytes())
}

/// A chunk that is the whole reply; `follow` bytes will be sent after `payload`.
fn chunk(kind: u16, cookie: u64, payload: &[u8], follow: u32) -> Head {
    chunk_of(wire::CHUNK_DONE, kind, cookie, payload, follow)
}

/// One chunk of a reply; the last has the DONE flag.
fn chunk_of(flags: u16, kind: u16, cookie: u64, payload: &[u8], follow: u32) -> Head {
    let header = ChunkHeader {
        magic: wire::CHUNK_MAGIC.into(),
        flags: flags.into(),
        kind: kind.into(),
        cookie: cookie.into(),
        len: (wire::length(payload) + follow).into(),
    };
    let mut bytes = Head::from_slice(header.as_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

#[cfg(test)]
mod test {
    use disk::DiskOffset;

    use super::*;

    const STRUCTURED: Negotiated = Negotiated { structured: true, allocation: true, depth: false };
    const SPAN: Span = Span { at: DiskOffset(0), len: 4096 };

    fn runs_of(runs: &[(u64, ExtentKind)]) -> Vec<Extent> {
        runs.iter().map(|&(len, kind)| Extent { len, kind, depth: 0 }).collect()
    }

    fn descriptors(reply: &[u8]) -> Vec<(u32, u32)> {
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        reply[24..].chunks(8).map(|pair| (number(&pair[..4]), number(&pair[4..]))).collect()
    }

    #[test]
    fn adjacent_extents_of_one_kind_are_merged() {
        let runs = runs_of(&[(512, ExtentKind::Data), (512, ExtentKind::Data), (3072, ExtentKind::Hole)]);
        assert_eq!(descriptors(&extents(STRUCTURED, 1, SPAN, &runs, false)), [(1024, 0), (3072, 3)]);
        assert_eq!(descriptors(&extents(STRUCTURED, 1, SPAN, &runs, true)), [(1024, 0)]);
    }

    #[test]
    fn each_context_has_a_chunk_with_its_own_extents() {
        let runs = [(512, 1), (512, 2), (3072, 2)];
        let runs = runs.map(|(len, depth)| Extent { len, kind: ExtentKind::Data, depth });
        let reply = extents(Negotiated { depth: true, ..STRUCTURED }, 1, SPAN, &runs, false);
        let (first, second) = reply.split_at(20 + 4 + 8);
        assert_eq!((&first[4..8], &first[20..24]), (&[0, 0, 0, 5][..], &[0, 0, 0, 1][..]));
        assert_eq!(descriptors(first), [(4096, 0)]);
        assert_eq!((&second[4..8], &second[20..24]), (&[0, 1, 0, 5][..], &[0, 0, 0, 2][..]));
        assert_eq!(descriptors(second), [(512, 1), (3584, 2)]);
        let alone = extents(Negotiated { allocation: false, depth: true, ..STRUCTURED }, 1, SPAN, &runs, true);
        assert_eq!((&alone[4..8], descriptors(&alone)), (&[0, 1, 0, 5][..], vec![(512, 1)]));
    }

    #[test]
    fn the_reply_does_not_exceed_the_requested_range() {
        let runs = runs_of(&[(512, ExtentKind::Data), (1 << 40, ExtentKind::Hole)]);
        assert_eq!(descriptors(&extents(STRUCTURED, 1, SPAN, &runs, false)), [(512, 0), (3584, 3)]);
    }

    #[test]
    fn every_status_except_done_is_an_error() {
        let number = |status| error_reply(status).map(|error_reply| error_reply.errno.number());
        assert_eq!(number(Status::Done), None);
        assert_eq!(number(Status::Failed), Some(5));
        assert_eq!(number(Status::NoSpace), Some(28));
        assert_eq!(number(Status::Refused), Some(1));
        assert_eq!(number(Status::Unsupported), Some(22));
    }

    #[test]
    fn a_structured_error_has_a_message() {
        let reply = error(STRUCTURED, 7, ErrorReply { errno: Errno::Io, why: "because" });
        assert_eq!(reply.len(), 20 + 4 + 2 + 7);
        assert!(reply.ends_with(b"because"));
        assert_eq!(error(Negotiated::default(), 7, ErrorReply { errno: Errno::Io, why: "because" }).len(), 16);
    }
}
