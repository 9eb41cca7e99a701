//! Parses and validates the header of a client's request.
//!
//! Pure functions of the bytes, the export's geometry and the negotiated options. Invariant: a request in
//! [`Verdict::Serve`] is accepted by `Request::new`.

use disk::size::in_memory;
use disk::{DiskOffset, Geometry, Operation, Span};
use zerocopy::FromBytes;

use super::context::{Context, Contexts};
use super::error::ProtocolError;
use super::export::{Negotiated, REQUEST_MAX};
use super::origin::Origin;
use super::wire::{self, Errno, ExtendedRequestHeader, RequestHeader};

/// The header of a request, compact or extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) flags: u16,
    pub(super) kind: u16,
    pub(super) origin: Origin,
    /// The number of bytes of the disk that the request is for. Of a request with data, the number of bytes of that.
    pub(super) len: u64,
    /// The number of bytes that follow the header, at most [`REQUEST_MAX`].
    pub(super) data: u32,
}

impl Header {
    /// Parses the header at the front of `bytes`, and returns its length; `None` if it is incomplete.
    pub(super) fn parse(bytes: &[u8], negotiated: Negotiated) -> Result<Option<(Header, usize)>, ProtocolError> {
        let parsed = if negotiated.extended { Header::extended(bytes)? } else { Header::compact(bytes)? };
        match parsed {
            Some((header, has_data, size)) => {
                let data = if has_data { header.len } else { 0 };
                let fits = u32::try_from(data).ok().filter(|data| *data <= REQUEST_MAX);
                let data = fits.ok_or(ProtocolError::DataTooLong(data))?;
                Ok(Some((Header { data, ..header }, size)))
            }
            None => Ok(None),
        }
    }

    /// "Request message": only a write has data.
    fn compact(bytes: &[u8]) -> Result<Option<(Header, bool, usize)>, ProtocolError> {
        let Ok((header, _)) = RequestHeader::read_from_prefix(bytes) else { return Ok(None) };
        if header.magic != wire::REQUEST_MAGIC {
            return Err(ProtocolError::RequestMagic);
        }
        let origin = Origin { cookie: header.cookie.get(), at: header.at.get() };
        let (flags, kind, len) = (header.flags.get(), header.kind.get(), header.len.get().into());
        let parsed = Header { flags, kind, origin, len, data: 0 };
        Ok(Some((parsed, kind == wire::CMD_WRITE, size_of::<RequestHeader>())))
    }

    /// "Request message", extended: a flag says whether there is data, for any command. It is required of writes, but
    /// QEMU, as of 10.0, sends them without it; its own server takes a write to have data in any case, and so do we.
    fn extended(bytes: &[u8]) -> Result<Option<(Header, bool, usize)>, ProtocolError> {
        let Ok((header, _)) = ExtendedRequestHeader::read_from_prefix(bytes) else { return Ok(None) };
        if header.magic != wire::EXTENDED_REQUEST_MAGIC {
            return Err(ProtocolError::RequestMagic);
        }
        let origin = Origin { cookie: header.cookie.get(), at: header.at.get() };
        let (flags, kind, len) = (header.flags.get(), header.kind.get(), header.len.get());
        let parsed = Header { flags, kind, origin, len, data: 0 };
        let has_data = kind == wire::CMD_WRITE || flags & wire::CMD_FLAG_PAYLOAD_LEN != 0;
        Ok(Some((parsed, has_data, size_of::<ExtendedRequestHeader>())))
    }

    /// Returns the number of bytes of data of a BLOCK_STATUS that selects contexts. Other lengths are those of no
    /// selection that could be served.
    pub(super) fn selection(&self, negotiated: Negotiated) -> Option<usize> {
        let len = in_memory(self.data.into());
        let ids = len.checked_sub(SELECTION).filter(|ids| ids % ID == 0)? / ID;
        let selects = self.kind == wire::CMD_BLOCK_STATUS && negotiated.extended;
        (selects && (1..=negotiated.contexts.len()).contains(&ids)).then_some(len)
    }

    /// Returns the header of a BLOCK_STATUS as if it had no data, and the negotiated options with the contexts that are
    /// selected by `data`; `None` if a context is selected twice, or was not negotiated.
    pub(super) fn select(self, data: &[u8], negotiated: Negotiated) -> Option<(Header, Negotiated)> {
        let (len, ids) = data.split_first_chunk()?;
        let mut contexts = Contexts::default();
        for id in ids.chunks(ID) {
            let context = Context::of_id(u32::from_be_bytes(id.try_into().ok()?))?;
            if !negotiated.contexts.has(context) || contexts.has(context) {
                return None;
            }
            contexts = contexts.with(context);
        }
        let flags = self.flags & !wire::CMD_FLAG_PAYLOAD_LEN;
        Some((Header { flags, len: u64::from_be_bytes(*len), data: 0, ..self }, Negotiated { contexts, ..negotiated }))
    }
}

/// The maximum number of bytes that are described at once. The client requests the rest separately: the metadata of a
/// larger range may take the disk seconds, in which it serves no other client.
const EXTENTS_MAX: u64 = 1 << 32;
/// The maximum number of bytes that the disk zeroes or frees at once, for the same reason.
const PART_MAX: u64 = 1 << 32;

/// The length of a selection of contexts ("NBD_CMD_BLOCK_STATUS") in front of their ids.
const SELECTION: usize = size_of::<u64>();
/// The length of an id in it.
const ID: usize = size_of::<u32>();

/// The result of validating a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Pass it to the disk.
    Serve(DiskRequest),
    /// Nothing to do: zero bytes.
    Nothing,
    /// Reply with an error.
    Error(ErrorReply),
    /// The client disconnects.
    Disconnect,
}

/// A request that the disk can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskRequest {
    pub(super) operation: Operation,
    pub(super) span: Span,
    /// The number of bytes behind `span` that the request is for, too: they are passed to the disk afterwards.
    pub(super) rest: u64,
    /// FUA on an operation without a durable form in the disk: a flush must follow before the reply.
    pub(super) flush_after: bool,
    /// NBD_CMD_FLAG_REQ_ONE: the reply contains one extent only.
    pub(super) one_extent: bool,
    /// NBD_CMD_FLAG_FAST_ZERO: fail if zeroes would have to be written.
    pub(super) fast: bool,
    /// NBD_CMD_CACHE: the extents are looked up, not sent.
    pub(super) discard_result: bool,
}

/// The error code and message of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ErrorReply {
    pub(super) errno: Errno,
    pub(super) why: &'static str,
}

/// Returns what to do about a request with this header.
pub(super) fn validate(header: &Header, negotiated: Negotiated, geometry: &Geometry) -> Verdict {
    let flags = header.flags;
    let durable = flags & wire::CMD_FLAG_FUA != 0;
    let fast = flags & wire::CMD_FLAG_FAST_ZERO != 0;
    let Some((operation, allowed)) = operation(header.kind, flags, negotiated) else {
        if header.kind == wire::CMD_DISC {
            return Verdict::Disconnect;
        }
        return refuse(Errno::Invalid, "the command is not supported or was not negotiated");
    };
    // "Command flags": FUA is legal on every command, and has an effect on those that change the disk.
    if flags & !(allowed | wire::CMD_FLAG_FUA) != 0 {
        return refuse(Errno::Invalid, "the command does not support a flag that is set");
    }
    if geometry.read_only && operation.is_write() {
        return refuse(Errno::NotPermitted, "the export is read-only");
    }
    match span(header, operation, geometry) {
        Err(refusal) => Verdict::Error(refusal),
        Ok(span) if span.len == 0 && operation != Operation::Flush => Verdict::Nothing,
        Ok(span) if fast && (flags & wire::CMD_FLAG_NO_HOLE != 0 || !is_aligned(span, geometry)) => {
            refuse(Errno::NotSupported, "zeroes with NO_HOLE, or in partial blocks, must be written")
        }
        Ok(whole) => {
            let span = first_part(operation, whole);
            Verdict::Serve(DiskRequest {
                operation,
                span,
                rest: whole.len - span.len,
                flush_after: durable && operation == Operation::Discard,
                one_extent: flags & wire::CMD_FLAG_REQ_ONE != 0,
                fast,
                discard_result: header.kind == wire::CMD_CACHE,
            })
        }
    }
}

/// The disk's operation for a command, and the flags that it allows in addition to FUA.
fn operation(kind: u16, flags: u16, negotiated: Negotiated) -> Option<(Operation, u16)> {
    let durable = flags & wire::CMD_FLAG_FUA != 0;
    match kind {
        wire::CMD_READ if negotiated.structured => Some((Operation::Read, wire::CMD_FLAG_DF)),
        wire::CMD_READ => Some((Operation::Read, 0)),
        wire::CMD_WRITE if negotiated.extended => Some((Operation::Write { durable }, wire::CMD_FLAG_PAYLOAD_LEN)),
        wire::CMD_WRITE => Some((Operation::Write { durable }, 0)),
        wire::CMD_FLUSH => Some((Operation::Flush, 0)),
        wire::CMD_TRIM => Some((Operation::Discard, 0)),
        wire::CMD_WRITE_ZEROES => {
            let free = flags & wire::CMD_FLAG_NO_HOLE == 0;
            Some((Operation::WriteZeroes { free, durable }, wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO))
        }
        // Only the location of data can be cached in advance, not the data itself.
        wire::CMD_CACHE => Some((Operation::Extents { depths: false }, 0)),
        wire::CMD_BLOCK_STATUS if !negotiated.contexts.is_empty() => {
            let depths = negotiated.contexts.has(Context::Depth);
            Some((Operation::Extents { depths }, wire::CMD_FLAG_REQ_ONE))
        }
        _ => None,
    }
}

/// The range of the request, if it is within the disk. It may have partial blocks.
fn span(header: &Header, operation: Operation, geometry: &Geometry) -> Result<Span, ErrorReply> {
    let span = Span { at: DiskOffset(header.origin.at), len: header.len };
    if operation == Operation::Flush {
        // NBD_CMD_FLUSH: offset and length are reserved and zero.
        let reserved = Span { at: DiskOffset(0), len: 0 };
        return if span == reserved { Ok(span) } else { invalid("a flush must have neither offset nor length") };
    }
    if span.at.checked_add(span.len).is_none_or(|end| end.0 > geometry.len) {
        // "Error values": ENOSPC is for writes past the end.
        let adds = matches!(operation, Operation::Write { .. } | Operation::WriteZeroes { .. });
        let errno = if adds { Errno::NoSpace } else { Errno::Invalid };
        return Err(ErrorReply { errno, why: "the request extends past the end of the disk" });
    }
    if header.kind == wire::CMD_BLOCK_STATUS && span.len == 0 {
        // A reply to it cannot be empty.
        return invalid("the length of a block status request must not be zero");
    }
    if operation == Operation::Read && span.len > u64::from(REQUEST_MAX) {
        return invalid("the request is longer than 32 MiB");
    }
    match operation {
        Operation::Extents { .. } => Ok(Span { len: span.len.min(EXTENTS_MAX), ..span }),
        _ => Ok(span),
    }
}

/// Returns the part of a range that the disk zeroes or frees at once: to the next multiple of [`PART_MAX`].
pub(super) fn first_part(operation: Operation, span: Span) -> Span {
    match operation {
        Operation::Discard | Operation::WriteZeroes { .. } => {
            Span { len: span.len.min(PART_MAX - span.at % PART_MAX), ..span }
        }
        _ => span,
    }
}

fn is_aligned(span: Span, geometry: &Geometry) -> bool {
    let block = u64::from(geometry.block);
    span.at % block == 0 && span.len % block == 0
}

fn invalid(why: &'static str) -> Result<Span, ErrorReply> {
    Err(ErrorReply { errno: Errno::Invalid, why })
}

fn refuse(errno: Errno, why: &'static str) -> Verdict {
    Verdict::Error(ErrorReply { errno, why })
}

#[cfg(test)]
mod test {
    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 30, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };
    const ALL: Negotiated = Negotiated { structured: true, extended: false, contexts: Contexts::BOTH };

    fn validate_with(kind: u16, flags: u16, at: u64, len: u32) -> Verdict {
        validate_on(&GEOMETRY, ALL, kind, flags, at, len)
    }

    fn validate_on(geometry: &Geometry, negotiated: Negotiated, kind: u16, flags: u16, at: u64, len: u32) -> Verdict {
        validate(
            &Header { flags, kind, origin: Origin { cookie: 1, at }, len: len.into(), data: 0 },
            negotiated,
            geometry,
        )
    }

    fn errno(verdict: Verdict) -> Option<Errno> {
        match verdict {
            Verdict::Error(refusal) => Some(refusal.errno),
            _ => None,
        }
    }

    fn served(verdict: Verdict) -> Option<Operation> {
        match verdict {
            Verdict::Serve(request) => Some(request.operation),
            _ => None,
        }
    }

    #[test]
    fn fua_makes_a_write_durable_and_adds_a_flush_to_a_trim() {
        let write = validate_with(wire::CMD_WRITE, wire::CMD_FLAG_FUA, 0, 512);
        assert_eq!(served(write), Some(Operation::Write { durable: true }));
        let trim = validate_with(wire::CMD_TRIM, wire::CMD_FLAG_FUA, 0, 512);
        assert!(matches!(trim, Verdict::Serve(DiskRequest { operation: Operation::Discard, flush_after: true, .. })));
        assert_eq!(served(validate_with(wire::CMD_READ, wire::CMD_FLAG_FUA, 0, 512)), Some(Operation::Read));
    }

    #[test]
    fn no_hole_keeps_the_space_allocated() {
        let verdict = validate_with(wire::CMD_WRITE_ZEROES, wire::CMD_FLAG_NO_HOLE, 0, 512);
        assert_eq!(served(verdict), Some(Operation::WriteZeroes { free: false, durable: false }));
    }

    #[test]
    fn past_the_end_is_no_space_for_writes_and_invalid_otherwise() {
        let end = GEOMETRY.len;
        assert_eq!(errno(validate_with(wire::CMD_WRITE, 0, end, 512)), Some(Errno::NoSpace));
        assert_eq!(errno(validate_with(wire::CMD_WRITE_ZEROES, 0, u64::MAX - 1, 512)), Some(Errno::NoSpace));
        assert_eq!(errno(validate_with(wire::CMD_READ, 0, end - 512, 1024)), Some(Errno::Invalid));
        assert_eq!(errno(validate_with(wire::CMD_TRIM, 0, end, 512)), Some(Errno::Invalid));
        assert_eq!(errno(validate_with(wire::CMD_BLOCK_STATUS, 0, end, 512)), Some(Errno::Invalid));
    }

    #[test]
    fn single_bytes_can_be_requested() {
        for kind in [wire::CMD_READ, wire::CMD_WRITE, wire::CMD_TRIM, wire::CMD_WRITE_ZEROES, wire::CMD_BLOCK_STATUS] {
            let verdict = validate_with(kind, 0, 511, 2);
            assert!(
                matches!(verdict, Verdict::Serve(DiskRequest { span: Span { at: DiskOffset(511), len: 2 }, .. })),
                "{kind}"
            );
        }
        assert_eq!(errno(validate_with(wire::CMD_BLOCK_STATUS, 0, 511, 0)), Some(Errno::Invalid));
        assert_eq!(errno(validate_with(wire::CMD_READ, 0, GEOMETRY.len - 1, 2)), Some(Errno::Invalid));
        assert_eq!(errno(validate_with(wire::CMD_WRITE, 0, GEOMETRY.len - 1, 2)), Some(Errno::NoSpace));
    }

    #[test]
    fn fast_zeroes_must_be_whole_blocks_without_no_hole() {
        let fast = wire::CMD_FLAG_FAST_ZERO;
        let verdict = validate_with(wire::CMD_WRITE_ZEROES, fast, 0, 512);
        assert!(matches!(verdict, Verdict::Serve(DiskRequest { fast: true, .. })));
        let kept = validate_with(wire::CMD_WRITE_ZEROES, fast | wire::CMD_FLAG_NO_HOLE, 0, 512);
        assert_eq!(errno(kept), Some(Errno::NotSupported));
        for (at, len) in [(0, 511), (1, 511), (1, 512)] {
            assert_eq!(errno(validate_with(wire::CMD_WRITE_ZEROES, fast, at, len)), Some(Errno::NotSupported));
        }
        assert_eq!(errno(validate_with(wire::CMD_TRIM, fast, 0, 512)), Some(Errno::Invalid));
    }

    #[test]
    fn a_cache_command_looks_up_extents_and_does_not_send_them() {
        let simple = Negotiated::default();
        let verdict = validate_on(&GEOMETRY, simple, wire::CMD_CACHE, 0, 1, 700);
        assert!(matches!(
            verdict,
            Verdict::Serve(DiskRequest { operation: Operation::Extents { .. }, discard_result: true, .. })
        ));
        assert_eq!(errno(validate_with(wire::CMD_CACHE, 0, GEOMETRY.len, 1)), Some(Errno::Invalid));
    }

    #[test]
    fn a_zero_length_request_within_the_disk_does_nothing() {
        assert_eq!(validate_with(wire::CMD_READ, 0, GEOMETRY.len, 0), Verdict::Nothing);
        assert_eq!(validate_with(wire::CMD_WRITE, 0, 0, 0), Verdict::Nothing);
        assert_eq!(errno(validate_with(wire::CMD_TRIM, 0, GEOMETRY.len + 512, 0)), Some(Errno::Invalid));
    }

    #[test]
    fn a_command_that_was_not_negotiated_is_invalid() {
        let simple = Negotiated::default();
        assert_eq!(errno(validate_on(&GEOMETRY, simple, wire::CMD_BLOCK_STATUS, 0, 0, 512)), Some(Errno::Invalid));
        assert_eq!(
            errno(validate_on(&GEOMETRY, simple, wire::CMD_READ, wire::CMD_FLAG_DF, 0, 512)),
            Some(Errno::Invalid)
        );
        assert_eq!(errno(validate_with(wire::CMD_WRITE, wire::CMD_FLAG_NO_HOLE, 0, 512)), Some(Errno::Invalid));
        assert_eq!(errno(validate_with(77, 0, 0, 0)), Some(Errno::Invalid));
        assert_eq!(errno(validate_with(wire::CMD_READ, wire::CMD_FLAG_FAST_ZERO, 0, 512)), Some(Errno::Invalid));
    }

    #[test]
    fn a_read_only_export_permits_flushes_but_no_changes() {
        let geometry = Geometry { read_only: true, ..GEOMETRY };
        for kind in [wire::CMD_WRITE, wire::CMD_TRIM, wire::CMD_WRITE_ZEROES] {
            assert_eq!(errno(validate_on(&geometry, ALL, kind, 0, 0, 512)), Some(Errno::NotPermitted));
        }
        assert_eq!(served(validate_on(&geometry, ALL, wire::CMD_FLUSH, 0, 0, 0)), Some(Operation::Flush));
    }

    const EXTENDED: Negotiated = Negotiated { extended: true, ..ALL };

    fn extended(kind: u16, flags: u16, at: u64, len: u64) -> Vec<u8> {
        let [flags, kind] = [flags, kind].map(u16::to_be_bytes);
        [&0x21e4_1c71_u32.to_be_bytes()[..], &flags, &kind, &[0; 8], &at.to_be_bytes(), &len.to_be_bytes()].concat()
    }

    #[test]
    fn an_extended_header_has_64_bits_of_length_and_data_by_a_flag() {
        let payload = wire::CMD_FLAG_PAYLOAD_LEN;
        let parse = |bytes: &[u8]| Header::parse(bytes, EXTENDED);
        let (trim, size) = parse(&extended(wire::CMD_TRIM, 0, 7, 1 << 40)).unwrap().unwrap();
        assert_eq!((trim.len, trim.data, trim.origin.at, size), (1 << 40, 0, 7, 32));
        let (unknown, _) = parse(&extended(77, payload, 0, 5)).unwrap().unwrap();
        assert_eq!(unknown.data, 5);
        let longest = u64::from(REQUEST_MAX);
        assert!(parse(&extended(wire::CMD_WRITE, payload, 0, longest)).is_ok());
        let too_long = parse(&extended(wire::CMD_WRITE, payload, 0, 1 << 32));
        assert_eq!(too_long, Err(ProtocolError::DataTooLong(1 << 32)));
        assert_eq!(parse(&extended(wire::CMD_TRIM, 0, 0, 0)[..31]), Ok(None));
        assert_eq!(parse(&[0; 32]), Err(ProtocolError::RequestMagic));
        // Each kind of header has its own magic number.
        assert_eq!(Header::parse(&extended(wire::CMD_TRIM, 0, 0, 0), ALL), Err(ProtocolError::RequestMagic));
    }

    #[test]
    fn the_payload_flag_is_valid_for_extended_writes_and_not_required() {
        let payload = wire::CMD_FLAG_PAYLOAD_LEN;
        let check = |negotiated, kind, flags| validate_on(&GEOMETRY, negotiated, kind, flags, 0, 512);
        assert!(served(check(EXTENDED, wire::CMD_WRITE, payload)).is_some());
        assert!(served(check(EXTENDED, wire::CMD_WRITE, 0)).is_some());
        let (write, _) = Header::parse(&extended(wire::CMD_WRITE, 0, 0, 512), EXTENDED).unwrap().unwrap();
        assert_eq!(write.data, 512);
        assert_eq!(errno(check(ALL, wire::CMD_WRITE, payload)), Some(Errno::Invalid));
        for kind in [wire::CMD_READ, wire::CMD_FLUSH, wire::CMD_TRIM, wire::CMD_CACHE, wire::CMD_BLOCK_STATUS] {
            assert_eq!(errno(check(EXTENDED, kind, payload)), Some(Errno::Invalid), "{kind}");
        }
    }

    #[test]
    fn a_block_status_selects_negotiated_contexts_once_each() {
        let payload = wire::CMD_FLAG_PAYLOAD_LEN;
        let select = |negotiated, ids: &[u32]| {
            let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_be_bytes()).collect();
            let data = [&(1u64 << 33).to_be_bytes()[..], &ids].concat();
            let len = data.len().try_into().unwrap();
            let (header, _) = Header::parse(&extended(wire::CMD_BLOCK_STATUS, payload, 0, len), negotiated).unwrap()?;
            header.selection(negotiated).filter(|needed| *needed == data.len())?;
            let (header, selected) = header.select(&data, negotiated)?;
            assert_eq!((header.flags, header.len), (0, 1 << 33));
            Some(selected.contexts)
        };
        let bitmap = Context::Bitmap(3);
        let all = Negotiated { contexts: Contexts::BOTH.with(bitmap), ..EXTENDED };
        let [allocation, depth] = [Context::Allocation, Context::Depth].map(Context::id);
        assert_eq!(select(EXTENDED, &[depth]), Some(Contexts::DEPTH));
        assert_eq!(select(EXTENDED, &[allocation]), Some(Contexts::ALLOCATION));
        assert_eq!(select(EXTENDED, &[depth, allocation]), Some(Contexts::BOTH));
        assert_eq!(select(all, &[bitmap.id(), allocation, depth]), Some(all.contexts));
        for wrong in [&[][..], &[depth, depth], &[77], &[0], &[allocation, depth, 77], &[bitmap.id(), bitmap.id()]] {
            assert_eq!(select(all, wrong), None, "{wrong:?}");
        }
        assert_eq!(select(EXTENDED, &[bitmap.id()]), None);
        assert_eq!(select(Negotiated { contexts: Contexts::ALLOCATION, ..EXTENDED }, &[depth]), None);
    }
}
