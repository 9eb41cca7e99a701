//! Encodes replies, except the data of a read, which follows them.
//!
//! "Structured replies": once negotiated, READ and BLOCK_STATUS must be answered by chunks. Success of other commands
//! remains a simple reply, which is shorter; an error is a chunk, which can include a message. With extended headers,
//! everything is a chunk ("Extended reply chunk message").

use disk::size::in_memory;
use disk::{Extent, ExtentKind, Span, Status};
use zerocopy::IntoBytes;

use super::command::ErrorReply;
use super::context::{Bitmaps, Context};
use super::export::Negotiated;
use super::origin::Origin;
use super::outgoing::Head;
use super::wire::{self, ChunkHeader, Descriptor, Errno, ExtendedChunkHeader, ExtendedDescriptor, SimpleReply};

/// The maximum number of extents in a reply, of all its contexts together, which is then 64 KiB, or twice that if it is
/// extended. The client requests the rest separately.
const DESCRIPTORS_MAX: usize = 8192;
/// The shortest run: the disk describes whole blocks.
const RUN_MIN: u64 = 512;

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
pub(super) fn done(negotiated: Negotiated, reads: bool, origin: Origin) -> Head {
    let needs_chunk = negotiated.extended || (negotiated.structured && reads);
    if needs_chunk { chunk(negotiated, wire::CHUNK_NONE, origin, &[], 0) } else { simple(origin.cookie, 0) }
}

/// The reply for an error.
pub(super) fn error(negotiated: Negotiated, origin: Origin, error_reply: ErrorReply) -> Head {
    let errno = error_reply.errno.number();
    if !negotiated.structured {
        return simple(origin.cookie, errno);
    }
    let why = error_reply.why.as_bytes();
    let mut payload = errno.to_be_bytes().to_vec();
    let Ok(len) = u16::try_from(why.len()) else { unreachable!("a text of our own has less than 64 KiB") };
    payload.extend_from_slice(&len.to_be_bytes());
    payload.extend_from_slice(why);
    chunk(negotiated, wire::CHUNK_ERROR, origin, &payload, 0)
}

/// The reply for a successful read; `span.len` bytes of data must follow.
pub(super) fn data(negotiated: Negotiated, origin: Origin, span: Span) -> Head {
    if negotiated.structured {
        let Ok(len) = u32::try_from(span.len) else { unreachable!("a read has at most REQUEST_MAX bytes") };
        chunk(negotiated, wire::CHUNK_OFFSET_DATA, origin, &span.at.0.to_be_bytes(), len)
    } else {
        simple(origin.cookie, 0)
    }
}

/// What the extents of a range are described by.
pub(super) struct Found<'a> {
    /// How the range is allocated.
    pub(super) extents: &'a [Extent],
    /// What is dirty.
    pub(super) bitmaps: &'a dyn Bitmaps,
}

/// The reply with the extents of `span`: a chunk for each negotiated context.
pub(super) fn extents(negotiated: Negotiated, origin: Origin, span: Span, found: &Found<'_>, one: bool) -> Head {
    let kind = if negotiated.extended { wire::CHUNK_BLOCK_STATUS_EXT } else { wire::CHUNK_BLOCK_STATUS };
    let most = descriptors_max(negotiated, one);
    let mut contexts = negotiated.contexts.iter().peekable();
    let mut bytes = Head::new();
    while let Some(context) = contexts.next() {
        let flags = if contexts.peek().is_some() { 0 } else { wire::CHUNK_DONE };
        let runs = match context {
            Context::Allocation => runs(span, found.extents, most, allocation),
            Context::Depth => runs(span, found.extents, most, |extent| extent.depth),
            Context::Bitmap(index) => dirty_runs(span, found.bitmaps, index, most),
        };
        let id = context.id();
        let payload = if negotiated.extended { extended_context(id, &runs) } else { self::context(id, &runs) };
        bytes.extend_from_slice(&chunk_of(negotiated, flags, kind, origin, &payload, 0));
    }
    bytes
}

/// The maximum size of the reply with the extents of `len` bytes.
pub(super) fn extents_max(negotiated: Negotiated, len: u64, one: bool) -> usize {
    let (head, descriptor) = if negotiated.extended {
        (size_of::<ExtendedChunkHeader>() + 8, size_of::<ExtendedDescriptor>())
    } else {
        (size_of::<ChunkHeader>() + 4, size_of::<Descriptor>())
    };
    // A range may begin and end within a block.
    let descriptors = descriptors_max(negotiated, one).min(in_memory(len / RUN_MIN + 2));
    negotiated.contexts.len() * (head + descriptors * descriptor)
}

/// The maximum number of extents of each context in a reply.
fn descriptors_max(negotiated: Negotiated, one: bool) -> usize {
    if one { 1 } else { DESCRIPTORS_MAX / negotiated.contexts.len().max(1) }
}

/// The state of an extent in `base:allocation`.
fn allocation(extent: &Extent) -> u32 {
    match extent.kind {
        ExtentKind::Data => 0,
        ExtentKind::Hole => wire::STATE_HOLE | wire::STATE_ZERO,
    }
}

/// The lengths and states of runs of bytes for one context. Adjacent extents of the same state are merged. If `extents`
/// are shorter than `span`, so are the runs.
fn runs(span: Span, extents: &[Extent], most: usize, state: fn(&Extent) -> u32) -> Vec<(u64, u32)> {
    let mut found = Vec::new();
    let mut left = span.len;
    let runs = extents.chunk_by(|a, b| state(a) == state(b));
    for (run, state) in runs.filter_map(|run| Some((run, state(run.first()?)))).take(most) {
        let len = run.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len)).min(left);
        if len == 0 {
            break;
        }
        left -= len;
        found.push((len, state));
    }
    found
}

/// The lengths and states of runs of a dirty bitmap (NBD_STATE_DIRTY). A reply must not be empty: what is not described
/// at all counts as dirty.
fn dirty_runs(span: Span, bitmaps: &dyn Bitmaps, index: usize, most: usize) -> Vec<(u64, u32)> {
    let mut left = span.len;
    let runs = bitmaps.runs(index, span, most).into_iter().take(most);
    let runs = runs.map_while(|(len, is_dirty)| {
        let len = len.min(left);
        left -= len;
        (len > 0).then_some((len, if is_dirty { wire::STATE_DIRTY } else { 0 }))
    });
    let found: Vec<_> = runs.collect();
    if found.is_empty() { vec![(span.len, wire::STATE_DIRTY)] } else { found }
}

/// The payload of NBD_REPLY_TYPE_BLOCK_STATUS.
fn context(id: u32, runs: &[(u64, u32)]) -> Vec<u8> {
    let mut payload = id.to_be_bytes().to_vec();
    for &(len, state) in runs {
        let Ok(len) = u32::try_from(len) else { unreachable!("the length of a request has 32 bits") };
        payload.extend_from_slice(Descriptor { len: len.into(), state: state.into() }.as_bytes());
    }
    payload
}

/// The payload of NBD_REPLY_TYPE_BLOCK_STATUS_EXT.
fn extended_context(id: u32, runs: &[(u64, u32)]) -> Vec<u8> {
    let Ok(count) = u32::try_from(runs.len()) else { unreachable!("at most DESCRIPTORS_MAX runs") };
    let mut payload = [id.to_be_bytes(), count.to_be_bytes()].concat();
    for &(len, state) in runs {
        payload.extend_from_slice(ExtendedDescriptor { len: len.into(), state: u64::from(state).into() }.as_bytes());
    }
    payload
}

fn simple(cookie: u64, error: u32) -> Head {
    let reply = SimpleReply { magic: wire::SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: cookie.into() };
    Head::from_slice(reply.as_bytes())
}

/// A chunk that is the whole reply; `follow` bytes will be sent after `payload`.
fn chunk(negotiated: Negotiated, kind: u16, origin: Origin, payload: &[u8], follow: u32) -> Head {
    chunk_of(negotiated, wire::CHUNK_DONE, kind, origin, payload, follow)
}

/// One chunk of a reply; the last has the DONE flag.
fn chunk_of(negotiated: Negotiated, flags: u16, kind: u16, origin: Origin, payload: &[u8], follow: u32) -> Head {
    let len = wire::length(payload) + follow;
    let mut bytes = Head::new();
    if negotiated.extended {
        let header = ExtendedChunkHeader {
            magic: wire::EXTENDED_CHUNK_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: origin.cookie.into(),
            at: origin.at.into(),
            len: u64::from(len).into(),
        };
        bytes.extend_from_slice(header.as_bytes());
    } else {
        let header = ChunkHeader {
            magic: wire::CHUNK_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: origin.cookie.into(),
            len: len.into(),
        };
        bytes.extend_from_slice(header.as_bytes());
    }
    bytes.extend_from_slice(payload);
    bytes
}

#[cfg(test)]
mod test {
    use disk::DiskOffset;

    use super::super::context::{AllDirty, BITMAPS_MAX, Contexts};
    use super::*;

    const STRUCTURED: Negotiated = Negotiated { structured: true, extended: false, contexts: Contexts::ALLOCATION };
    const ORIGIN: Origin = Origin { cookie: 1, at: 77 };
    const SPAN: Span = Span { at: DiskOffset(0), len: 4096 };

    /// The reply with these extents, and bitmaps of which nothing is known.
    fn extents(negotiated: Negotiated, origin: Origin, span: Span, extents: &[Extent], one: bool) -> Head {
        super::extents(negotiated, origin, span, &Found { extents, bitmaps: &AllDirty }, one)
    }

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
        assert_eq!(descriptors(&extents(STRUCTURED, ORIGIN, SPAN, &runs, false)), [(1024, 0), (3072, 3)]);
        assert_eq!(descriptors(&extents(STRUCTURED, ORIGIN, SPAN, &runs, true)), [(1024, 0)]);
    }

    #[test]
    fn each_context_has_a_chunk_with_its_own_extents() {
        let runs = [(512, 1), (512, 2), (3072, 2)];
        let runs = runs.map(|(len, depth)| Extent { len, kind: ExtentKind::Data, depth });
        let reply = extents(Negotiated { contexts: Contexts::BOTH, ..STRUCTURED }, ORIGIN, SPAN, &runs, false);
        let (first, second) = reply.split_at(20 + 4 + 8);
        assert_eq!((&first[4..8], &first[20..24]), (&[0, 0, 0, 5][..], &[0, 0, 0, 1][..]));
        assert_eq!(descriptors(first), [(4096, 0)]);
        assert_eq!((&second[4..8], &second[20..24]), (&[0, 1, 0, 5][..], &[0, 0, 0, 2][..]));
        assert_eq!(descriptors(second), [(512, 1), (3584, 2)]);
        let alone = extents(Negotiated { contexts: Contexts::DEPTH, ..STRUCTURED }, ORIGIN, SPAN, &runs, true);
        assert_eq!((&alone[4..8], descriptors(&alone)), (&[0, 1, 0, 5][..], vec![(512, 1)]));
    }

    #[test]
    fn the_reply_does_not_exceed_the_requested_range() {
        let runs = runs_of(&[(512, ExtentKind::Data), (1 << 40, ExtentKind::Hole)]);
        assert_eq!(descriptors(&extents(STRUCTURED, ORIGIN, SPAN, &runs, false)), [(512, 0), (3584, 3)]);
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
        let reply = error(STRUCTURED, ORIGIN, ErrorReply { errno: Errno::Io, why: "because" });
        assert_eq!(reply.len(), 20 + 4 + 2 + 7);
        assert!(reply.ends_with(b"because"));
        assert_eq!(error(Negotiated::default(), ORIGIN, ErrorReply { errno: Errno::Io, why: "because" }).len(), 16);
    }

    #[test]
    fn extended_replies_are_chunks_with_the_offset_of_their_request() {
        let extended = Negotiated { extended: true, ..STRUCTURED };
        let head = |kind: u8, len: u8| {
            let origin = [&1u64.to_be_bytes()[..], &77u64.to_be_bytes()].concat();
            [&[0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, kind][..], &origin, &[0; 7], &[len]].concat()
        };
        assert_eq!(done(extended, false, ORIGIN)[..], head(0, 0));
        assert_eq!(data(extended, ORIGIN, SPAN)[..28], head(1, 0)[..28]);
        let refused = error(extended, ORIGIN, ErrorReply { errno: Errno::Io, why: "because" });
        assert_eq!((refused.len(), refused[6]), (32 + 13, 0x80));
        let runs = runs_of(&[(1 << 40, ExtentKind::Hole), (512, ExtentKind::Data)]);
        let span = Span { len: 1 << 41, ..SPAN };
        let reply = extents(extended, ORIGIN, span, &runs, false);
        assert_eq!(reply[..32], head(6, 40));
        let numbers = [[1u32.to_be_bytes(), 2u32.to_be_bytes()].concat()];
        let pairs = [1u64 << 40, 3, 512, 0].map(u64::to_be_bytes).concat();
        assert_eq!(reply[32..], [&numbers.concat()[..], &pairs].concat());
    }

    /// A bitmap whose odd units of [`RUN_MIN`] bytes are dirty, and one that describes nothing.
    struct Odd;

    impl Bitmaps for Odd {
        fn runs(&self, index: usize, span: Span, most: usize) -> Vec<(u64, bool)> {
            let units = (0..in_memory(span.len / RUN_MIN)).take(if index == 1 { 0 } else { most });
            units.map(|unit| (RUN_MIN, unit % 2 == 1)).collect()
        }
    }

    #[test]
    fn a_dirty_bitmap_has_a_chunk_with_flags_and_is_never_empty() {
        let contexts = [Context::Bitmap(0), Context::Bitmap(1)].into_iter().collect();
        let found = Found { extents: &[], bitmaps: &Odd };
        let reply = super::extents(Negotiated { contexts, ..STRUCTURED }, ORIGIN, SPAN, &found, false);
        let (first, second) = reply.split_at(20 + 4 + 8 * 8);
        assert_eq!(first[20..24], [0, 0, 0, 3]);
        assert_eq!(descriptors(first)[..3], [(512, 0), (512, 1), (512, 0)]);
        assert_eq!(
            (&second[4..6], &second[20..24], descriptors(second)),
            (&[0, 1][..], &[0, 0, 0, 4][..], vec![(4096, 1)])
        );
        let one = super::extents(Negotiated { contexts, ..STRUCTURED }, ORIGIN, SPAN, &found, true);
        assert_eq!(descriptors(&one[..32]), [(512, 0)]);
    }

    #[test]
    fn the_size_of_a_reply_is_bounded_for_any_number_of_contexts() {
        let whole: Vec<Extent> =
            (0..20_000).map(|nth| Extent { len: 512, kind: ExtentKind::Data, depth: nth % 2 }).collect();
        let found = Found { extents: &whole, bitmaps: &Odd };
        for extended in [false, true] {
            for bitmaps in 0..=BITMAPS_MAX {
                let contexts = (0..bitmaps).map(Context::Bitmap).fold(Contexts::BOTH, Contexts::with);
                let negotiated = Negotiated { structured: true, extended, contexts };
                for (len, one) in [(20_000 * 512, false), (20_000 * 512, true), (1536, false), (1, false)] {
                    let span = Span { len, ..SPAN };
                    let size = super::extents(negotiated, ORIGIN, span, &found, one).len();
                    assert!(size <= extents_max(negotiated, len, one), "{size} bytes for {len}, {bitmaps} bitmaps");
                    assert!(size <= 132 << 10, "{size} bytes");
                }
            }
        }
    }
}
