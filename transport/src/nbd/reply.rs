//! The bytes of a reply, except the data of a read, which follows them.
//!
//! Pure. "Structured replies": once agreed on, READ and BLOCK_STATUS must be answered by chunks; success of
//! anything else stays a simple reply, which is shorter, and an error gets a chunk, which can say why.

use disk::{Extent, ExtentKind, Span, Status};
use zerocopy::IntoBytes;

use super::command::Refusal;
use super::export::Agreed;
use super::handshake::{ALLOCATION_ID, DEPTH_ID};
use super::wire::{self, ChunkHeader, Descriptor, Errno, SimpleReply};

/// 64 KiB of reply. The client asks again for what follows.
const DESCRIPTORS_MAX: usize = 8192;

/// The one table from outcome to wire; `None` is success.
pub(super) fn refusal(status: Status) -> Option<Refusal> {
    let (errno, why) = match status {
        Status::Done => return None,
        Status::Failed => (Errno::Io, "the storage failed"),
        Status::NoSpace => (Errno::NoSpace, "no space is left on the storage"),
        Status::Refused => (Errno::NotPermitted, "the disk accepts no changes now"),
        Status::Unsupported => (Errno::Invalid, "the disk does not support this"),
    };
    Some(Refusal { errno, why })
}

/// Success without data.
pub(super) fn done(agreed: Agreed, reads: bool, cookie: u64) -> Vec<u8> {
    if agreed.structured && reads { chunk(wire::CHUNK_NONE, cookie, &[], 0) } else { simple(cookie, 0) }
}

/// An error.
pub(super) fn error(agreed: Agreed, cookie: u64, refusal: Refusal) -> Vec<u8> {
    let errno = refusal.errno.number();
    if !agreed.structured {
        return simple(cookie, errno);
    }
    let why = refusal.why.as_bytes();
    let mut payload = errno.to_be_bytes().to_vec();
    // Our own sentences, far shorter than 64 KiB.
    payload.extend_from_slice(&u16::try_from(why.len()).unwrap_or(0).to_be_bytes());
    payload.extend_from_slice(why);
    chunk(wire::CHUNK_ERROR, cookie, &payload, 0)
}

/// Success of a read whose `span.len` bytes follow.
pub(super) fn data(agreed: Agreed, cookie: u64, span: Span) -> Vec<u8> {
    if agreed.structured {
        chunk(wire::CHUNK_OFFSET_DATA, cookie, &span.at.to_be_bytes(), span.len)
    } else {
        simple(cookie, 0)
    }
}

/// How `span` is allocated: a chunk for each context that was agreed on.
pub(super) fn extents(agreed: Agreed, cookie: u64, span: Span, extents: &[Extent], one: bool) -> Vec<u8> {
    let contexts = [
        agreed.allocation.then_some((ALLOCATION_ID, allocation as fn(&Extent) -> u32)),
        agreed.depth.then_some((DEPTH_ID, |extent| extent.depth)),
    ];
    let mut contexts = contexts.into_iter().flatten().peekable();
    let mut bytes = Vec::new();
    while let Some((id, state)) = contexts.next() {
        let flags = if contexts.peek().is_some() { 0 } else { wire::CHUNK_DONE };
        let payload = context(id, span, extents, one, state);
        bytes.extend(chunk_of(flags, wire::CHUNK_BLOCK_STATUS, cookie, &payload, 0));
    }
    bytes
}

/// Of `base:allocation`.
fn allocation(extent: &Extent) -> u32 {
    match extent.kind {
        ExtentKind::Data => 0,
        ExtentKind::Hole => wire::STATE_HOLE | wire::STATE_ZERO,
    }
}

/// What one context says. Neighbours of which it says the same become one; what the disk left out is simply not
/// answered.
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
        left = left.saturating_sub(len);
        // A span comes from a request, whose length has 32 bits.
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        payload.extend_from_slice(Descriptor { len: len.into(), state: state.into() }.as_bytes());
    }
    payload
}

fn simple(cookie: u64, error: u32) -> Vec<u8> {
    let reply = SimpleReply { magic: wire::SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() };
    reply.as_bytes().to_vec()
}

/// A chunk that is the whole reply; `follow` bytes come after `payload`.
fn chunk(kind: u16, cookie: u64, payload: &[u8], follow: u64) -> Vec<u8> {
    chunk_of(wire::CHUNK_DONE, kind, cookie, payload, follow)
}

/// One chunk of a reply; the last has the flag that says so.
fn chunk_of(flags: u16, kind: u16, cookie: u64, payload: &[u8], follow: u64) -> Vec<u8> {
    let len = u64::try_from(payload.len()).unwrap_or(u64::MAX).saturating_add(follow);
    let header = ChunkHeader {
        magic: wire::CHUNK_MAGIC.into(),
        flags: flags.into(),
        kind: kind.into(),
        cookie: cookie.into(),
        // At most REQUEST_MAX and a few bytes.
        len: u32::try_from(len).unwrap_or(u32::MAX).into(),
    };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

#[cfg(test)]
mod test {
    use super::*;

    const STRUCTURED: Agreed = Agreed { structured: true, allocation: true, depth: false };
    const SPAN: Span = Span { at: 0, len: 4096 };

    fn runs_of(runs: &[(u64, ExtentKind)]) -> Vec<Extent> {
        runs.iter().map(|&(len, kind)| Extent { len, kind, depth: 0 }).collect()
    }

    fn descriptors(reply: &[u8]) -> Vec<(u32, u32)> {
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        reply[24..].chunks(8).map(|pair| (number(&pair[..4]), number(&pair[4..]))).collect()
    }

    #[test]
    fn neighbours_of_one_kind_are_told_as_one() {
        let runs = runs_of(&[(512, ExtentKind::Data), (512, ExtentKind::Data), (3072, ExtentKind::Hole)]);
        assert_eq!(descriptors(&extents(STRUCTURED, 1, SPAN, &runs, false)), [(1024, 0), (3072, 3)]);
        assert_eq!(descriptors(&extents(STRUCTURED, 1, SPAN, &runs, true)), [(1024, 0)]);
    }

    #[test]
    fn each_context_has_a_chunk_with_runs_of_its_own() {
        let runs = [(512, 1), (512, 2), (3072, 2)];
        let runs = runs.map(|(len, depth)| Extent { len, kind: ExtentKind::Data, depth });
        let reply = extents(Agreed { depth: true, ..STRUCTURED }, 1, SPAN, &runs, false);
        let (first, second) = reply.split_at(20 + 4 + 8);
        assert_eq!((&first[4..8], &first[20..24]), (&[0, 0, 0, 5][..], &[0, 0, 0, 1][..]));
        assert_eq!(descriptors(first), [(4096, 0)]);
        assert_eq!((&second[4..8], &second[20..24]), (&[0, 1, 0, 5][..], &[0, 0, 0, 2][..]));
        assert_eq!(descriptors(second), [(512, 1), (3584, 2)]);
        let alone = extents(Agreed { allocation: false, depth: true, ..STRUCTURED }, 1, SPAN, &runs, true);
        assert_eq!((&alone[4..8], descriptors(&alone)), (&[0, 1, 0, 5][..], vec![(512, 1)]));
    }

    #[test]
    fn no_more_is_told_than_was_asked() {
        let runs = runs_of(&[(512, ExtentKind::Data), (1 << 40, ExtentKind::Hole)]);
        assert_eq!(descriptors(&extents(STRUCTURED, 1, SPAN, &runs, false)), [(512, 0), (3584, 3)]);
    }

    #[test]
    fn each_status_but_done_is_an_error() {
        let number = |status| refusal(status).map(|refusal| refusal.errno.number());
        assert_eq!(number(Status::Done), None);
        assert_eq!(number(Status::Failed), Some(5));
        assert_eq!(number(Status::NoSpace), Some(28));
        assert_eq!(number(Status::Refused), Some(1));
        assert_eq!(number(Status::Unsupported), Some(22));
    }

    #[test]
    fn a_structured_error_says_why() {
        let reply = error(STRUCTURED, 7, Refusal { errno: Errno::Io, why: "because" });
        assert_eq!(reply.len(), 20 + 4 + 2 + 7);
        assert!(reply.ends_with(b"because"));
        assert_eq!(error(Agreed::default(), 7, Refusal { errno: Errno::Io, why: "because" }).len(), 16);
    }
}
