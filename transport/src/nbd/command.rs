//! Validates the header of a client's request.
//!
//! A pure function of the header, the export's geometry and the negotiated options. Invariant: a request in
//! [`Verdict::Serve`] is accepted by `Request::new`.

use disk::{DiskOffset, Geometry, Operation, Span};

use super::export::{Negotiated, REQUEST_MAX};
use super::wire::{self, Errno, RequestHeader};

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
pub(super) fn validate(header: &RequestHeader, negotiated: Negotiated, geometry: &Geometry) -> Verdict {
    let flags = header.flags.get();
    let durable = flags & wire::CMD_FLAG_FUA != 0;
    let fast = flags & wire::CMD_FLAG_FAST_ZERO != 0;
    let Some((operation, allowed)) = operation(header.kind.get(), flags, negotiated) else {
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
        Ok(span) => Verdict::Serve(DiskRequest {
            operation,
            span,
            flush_after: durable && operation == Operation::Discard,
            one_extent: flags & wire::CMD_FLAG_REQ_ONE != 0,
            fast,
            discard_result: header.kind == wire::CMD_CACHE,
        }),
    }
}

/// The disk's operation for a command, and the flags that it allows in addition to FUA.
fn operation(kind: u16, flags: u16, negotiated: Negotiated) -> Option<(Operation, u16)> {
    let durable = flags & wire::CMD_FLAG_FUA != 0;
    match kind {
        wire::CMD_READ if negotiated.structured => Some((Operation::Read, wire::CMD_FLAG_DF)),
        wire::CMD_READ => Some((Operation::Read, 0)),
        wire::CMD_WRITE => Some((Operation::Write { durable }, 0)),
        wire::CMD_FLUSH => Some((Operation::Flush, 0)),
        wire::CMD_TRIM => Some((Operation::Discard, 0)),
        wire::CMD_WRITE_ZEROES => {
            let free = flags & wire::CMD_FLAG_NO_HOLE == 0;
            Some((Operation::WriteZeroes { free, durable }, wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO))
        }
        // Only the location of data can be cached in advance, not the data itself.
        wire::CMD_CACHE => Some((Operation::Extents { depths: false }, 0)),
        wire::CMD_BLOCK_STATUS if negotiated.allocation || negotiated.depth => {
            Some((Operation::Extents { depths: negotiated.depth }, wire::CMD_FLAG_REQ_ONE))
        }
        _ => None,
    }
}

/// The range of the request, if it is within the disk. It may have partial blocks.
fn span(header: &RequestHeader, operation: Operation, geometry: &Geometry) -> Result<Span, ErrorReply> {
    let span = Span { at: DiskOffset(header.at.get()), len: u64::from(header.len.get()) };
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
    Ok(span)
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
    const ALL: Negotiated = Negotiated { structured: true, allocation: true, depth: true };

    fn validate_with(kind: u16, flags: u16, at: u64, len: u32) -> Verdict {
        validate_on(&GEOMETRY, ALL, kind, flags, at, len)
    }

    fn validate_on(geometry: &Geometry, negotiated: Negotiated, kind: u16, flags: u16, at: u64, len: u32) -> Verdict {
        let magic = wire::REQUEST_MAGIC.into();
        let (flags, kind, cookie, at, len) = (flags.into(), kind.into(), 1.into(), at.into(), len.into());
        validate(&RequestHeader { magic, flags, kind, cookie, at, len }, negotiated, geometry)
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
}
