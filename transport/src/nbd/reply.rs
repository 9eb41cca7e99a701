//! The bytes of a reply, except the data of a read, which follows them.
//!
//! Pure. "Structured replies": once agreed on, READ and BLOCK_STATUS must be answered by chunks; success of
//! anything else stays a simple reply, which is shorter, and an error gets a chunk, which can say why.

use disk::{Extent, ExtentKind, Span, Status};
use zerocopy::IntoBytes;

use super::command::Refusal;
use super::export::Agreed;
use super::handshake::ALLOCATION_ID;
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

/// How `span` is allocated. Neighbours of one kind become one; what the disk left out is simply not answered.
pub(super) fn allocation(cookie: u64, span: Span, extents: &[Extent], one: bool) -> Vec<u8> {
    let limit = if one { 1 } else { DESCRIPTORS_MAX };
    let mut payload = ALLOCATION_ID.to_be_bytes().to_vec();
    let mut left = span.len;
    let runs = extents.chunk_by(|a, b| a.kind == b.kind);
    for (run, kind) in runs.filter_map(|run| Some((run, run.first()?.kind))).take(limit) {
        let len = run.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len)).min(left);
        if len == 0 {
            break;
        }
        left = left.saturating_sub(len);
        let state = match kind {
            ExtentKind::Data => 0,
            ExtentKind::Hole => wire::STATE_HOLE | wire::STATE_ZERO,
        };
        // A span comes from a request, whose length has 32 bits.
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        payload.extend_from_slice(Descriptor { len: len.into(), state: state.into() }.as_bytes());
    }
    chunk(wire::CHUNK_BLOCK_STATUS, cookie, &payload, 0)
}

fn simple(cookie: u64, error: u32) -> Vec<u8> {
    let reply = SimpleReply { magic: wire::SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() };
    reply.as_bytes().to_vec()
}

/// A chunk that is the whole reply; `follow` bytes come after `payload`.
fn chunk(kind: u16, cookie: u64, payload: &[u8], follow: u64) -> Vec<u8> {
    let len = u64::try_from(payload.len()).unwrap_or(u64::MAX).saturating_add(follow);
    let header = ChunkHeader {
        magic: wire::CHUNK_MAGIC.into(),
        flags: wire::CHUNK_DONE.into(),
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

    const STRUCTURED: Agreed = Agreed { structured: true, allocation: true };
    const SPAN: Span = Span { at: 0, len: 4096 };

    fn extents(runs: &[(u64, ExtentKind)]) -> Vec<Extent> {
        runs.iter().map(|&(len, kind)| Extent { len, kind }).collect()
    }

    fn descriptors(reply: &[u8]) -> Vec<(u32, u32)> {
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        reply[24..].chunks(8).map(|pair| (number(&pair[..4]), number(&pair[4..]))).collect()
    }

    #[test]
    fn neighbours_of_one_kind_are_told_as_one() {
        let runs = extents(&[(512, ExtentKind::Data), (512, ExtentKind::Data), (3072, ExtentKind::Hole)]);
        assert_eq!(descriptors(&allocation(1, SPAN, &runs, false)), [(1024, 0), (3072, 3)]);
        assert_eq!(descriptors(&allocation(1, SPAN, &runs, true)), [(1024, 0)]);
    }

    #[test]
    fn no_more_is_told_than_was_asked() {
        let runs = extents(&[(512, ExtentKind::Data), (1 << 40, ExtentKind::Hole)]);
        assert_eq!(descriptors(&allocation(1, SPAN, &runs, false)), [(512, 0), (3584, 3)]);
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
