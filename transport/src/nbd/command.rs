//! What one request of a client asks for, judged before anything is done about it.
//!
//! Pure. Knows the export's geometry and what was agreed on; nothing about data, sockets and replies. What is
//! [`Verdict::Serve`] passes `Request::new`.

use disk::{Geometry, Operation, Span};

use super::export::{Agreed, REQUEST_MAX};
use super::wire::{self, Errno, RequestHeader};

/// What to do about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Hand it to the disk.
    Serve(Ask),
    /// Nothing is asked for: zero bytes.
    Nothing,
    /// Answer with an error.
    Refuse(Refusal),
    /// The client leaves.
    Disconnect,
}

/// A request that the disk can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) operation: Operation,
    pub(super) span: Span,
    /// FUA on an operation that the disk has no durable form of: a flush has to follow before the answer.
    pub(super) then_flush: bool,
    /// NBD_CMD_FLAG_REQ_ONE: one run of bytes is enough of an answer.
    pub(super) one_extent: bool,
    /// NBD_CMD_FLAG_FAST_ZERO: zeroes that would have to be written are to be refused.
    pub(super) fast: bool,
    /// NBD_CMD_CACHE: what is found out is kept and not told.
    pub(super) silent: bool,
}

/// An error to answer with, and a word to people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) errno: Errno,
    pub(super) why: &'static str,
}

/// Judges `header`.
pub(super) fn judge(header: &RequestHeader, agreed: Agreed, geometry: &Geometry) -> Verdict {
    let flags = header.flags.get();
    let durable = flags & wire::CMD_FLAG_FUA != 0;
    let fast = flags & wire::CMD_FLAG_FAST_ZERO != 0;
    let Some((operation, allowed)) = operation(header.kind.get(), flags, agreed) else {
        if header.kind == wire::CMD_DISC {
            return Verdict::Disconnect;
        }
        return refuse(Errno::Invalid, "this command is not supported or was not negotiated");
    };
    // "Command flags": FUA is legal on every command, and means something on those that change the disk.
    if flags & !(allowed | wire::CMD_FLAG_FUA) != 0 {
        return refuse(Errno::Invalid, "a flag does not belong to this command");
    }
    if geometry.read_only && operation.is_write() {
        return refuse(Errno::NotPermitted, "the export is read-only");
    }
    match span(header, operation, geometry) {
        Err(refusal) => Verdict::Refuse(refusal),
        Ok(span) if span.len == 0 && operation != Operation::Flush => Verdict::Nothing,
        Ok(span) if fast && (flags & wire::CMD_FLAG_NO_HOLE != 0 || !is_aligned(span, geometry)) => {
            refuse(Errno::NotSupported, "zeroes that keep their space, or in parts of blocks, are written")
        }
        Ok(span) => Verdict::Serve(Ask {
            operation,
            span,
            then_flush: durable && operation == Operation::Discard,
            one_extent: flags & wire::CMD_FLAG_REQ_ONE != 0,
            fast,
            silent: header.kind == wire::CMD_CACHE,
        }),
    }
}

/// The disk's operation for a command, and the flags that it may have beside FUA.
fn operation(kind: u16, flags: u16, agreed: Agreed) -> Option<(Operation, u16)> {
    let durable = flags & wire::CMD_FLAG_FUA != 0;
    match kind {
        wire::CMD_READ if agreed.structured => Some((Operation::Read, wire::CMD_FLAG_DF)),
        wire::CMD_READ => Some((Operation::Read, 0)),
        wire::CMD_WRITE => Some((Operation::Write { durable }, 0)),
        wire::CMD_FLUSH => Some((Operation::Flush, 0)),
        wire::CMD_TRIM => Some((Operation::Discard, 0)),
        wire::CMD_WRITE_ZEROES => {
            let free = flags & wire::CMD_FLAG_NO_HOLE == 0;
            Some((Operation::WriteZeroes { free, durable }, wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO))
        }
        // Where bytes live is what there is to be known beforehand: data itself is kept nowhere.
        wire::CMD_CACHE => Some((Operation::Extents { depths: false }, 0)),
        wire::CMD_BLOCK_STATUS if agreed.allocation || agreed.depth => {
            Some((Operation::Extents { depths: agreed.depth }, wire::CMD_FLAG_REQ_ONE))
        }
        _ => None,
    }
}

/// The bytes of the disk that the request is about, if they exist. They need not be whole blocks.
fn span(header: &RequestHeader, operation: Operation, geometry: &Geometry) -> Result<Span, Refusal> {
    let span = Span { at: header.at.get(), len: u64::from(header.len.get()) };
    if operation == Operation::Flush {
        // NBD_CMD_FLUSH: offset and length are reserved and zero.
        let reserved = Span { at: 0, len: 0 };
        return if span == reserved { Ok(span) } else { invalid("a flush has neither offset nor length") };
    }
    if span.at.checked_add(span.len).is_none_or(|end| end > geometry.len) {
        // "Error values": ENOSPC is for writes beyond the end.
        let adds = matches!(operation, Operation::Write { .. } | Operation::WriteZeroes { .. });
        let errno = if adds { Errno::NoSpace } else { Errno::Invalid };
        return Err(Refusal { errno, why: "the request reaches past the end of the disk" });
    }
    if header.kind == wire::CMD_BLOCK_STATUS && span.len == 0 {
        // Its answer is never empty.
        return invalid("a question about no bytes");
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

fn invalid(why: &'static str) -> Result<Span, Refusal> {
    Err(Refusal { errno: Errno::Invalid, why })
}

fn refuse(errno: Errno, why: &'static str) -> Verdict {
    Verdict::Refuse(Refusal { errno, why })
}

#[cfg(test)]
mod test {
    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 30, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };
    const ALL: Agreed = Agreed { structured: true, allocation: true, depth: true };

    fn ask(kind: u16, flags: u16, at: u64, len: u32) -> Verdict {
        ask_of(&GEOMETRY, ALL, kind, flags, at, len)
    }

    fn ask_of(geometry: &Geometry, agreed: Agreed, kind: u16, flags: u16, at: u64, len: u32) -> Verdict {
        let magic = wire::REQUEST_MAGIC.into();
        let (flags, kind, cookie, at, len) = (flags.into(), kind.into(), 1.into(), at.into(), len.into());
        judge(&RequestHeader { magic, flags, kind, cookie, at, len }, agreed, geometry)
    }

    fn errno(verdict: Verdict) -> Option<Errno> {
        match verdict {
            Verdict::Refuse(refusal) => Some(refusal.errno),
            _ => None,
        }
    }

    fn served(verdict: Verdict) -> Option<Operation> {
        match verdict {
            Verdict::Serve(ask) => Some(ask.operation),
            _ => None,
        }
    }

    #[test]
    fn fua_makes_a_write_durable_and_a_trim_flush() {
        let write = ask(wire::CMD_WRITE, wire::CMD_FLAG_FUA, 0, 512);
        assert_eq!(served(write), Some(Operation::Write { durable: true }));
        let trim = ask(wire::CMD_TRIM, wire::CMD_FLAG_FUA, 0, 512);
        assert!(matches!(trim, Verdict::Serve(Ask { operation: Operation::Discard, then_flush: true, .. })));
        assert_eq!(served(ask(wire::CMD_READ, wire::CMD_FLAG_FUA, 0, 512)), Some(Operation::Read));
    }

    #[test]
    fn no_hole_keeps_the_space() {
        let verdict = ask(wire::CMD_WRITE_ZEROES, wire::CMD_FLAG_NO_HOLE, 0, 512);
        assert_eq!(served(verdict), Some(Operation::WriteZeroes { free: false, durable: false }));
    }

    #[test]
    fn past_the_end_is_no_space_for_writes_and_invalid_else() {
        let end = GEOMETRY.len;
        assert_eq!(errno(ask(wire::CMD_WRITE, 0, end, 512)), Some(Errno::NoSpace));
        assert_eq!(errno(ask(wire::CMD_WRITE_ZEROES, 0, u64::MAX - 1, 512)), Some(Errno::NoSpace));
        assert_eq!(errno(ask(wire::CMD_READ, 0, end - 512, 1024)), Some(Errno::Invalid));
        assert_eq!(errno(ask(wire::CMD_TRIM, 0, end, 512)), Some(Errno::Invalid));
        assert_eq!(errno(ask(wire::CMD_BLOCK_STATUS, 0, end, 512)), Some(Errno::Invalid));
    }

    #[test]
    fn single_bytes_may_be_asked_for() {
        for kind in [wire::CMD_READ, wire::CMD_WRITE, wire::CMD_TRIM, wire::CMD_WRITE_ZEROES, wire::CMD_BLOCK_STATUS] {
            let verdict = ask(kind, 0, 511, 2);
            assert!(matches!(verdict, Verdict::Serve(Ask { span: Span { at: 511, len: 2 }, .. })), "{kind}");
        }
        assert_eq!(errno(ask(wire::CMD_BLOCK_STATUS, 0, 511, 0)), Some(Errno::Invalid));
        assert_eq!(errno(ask(wire::CMD_READ, 0, GEOMETRY.len - 1, 2)), Some(Errno::Invalid));
        assert_eq!(errno(ask(wire::CMD_WRITE, 0, GEOMETRY.len - 1, 2)), Some(Errno::NoSpace));
    }

    #[test]
    fn zeroes_that_are_to_be_fast_are_whole_blocks_and_may_free_their_space() {
        let fast = wire::CMD_FLAG_FAST_ZERO;
        let verdict = ask(wire::CMD_WRITE_ZEROES, fast, 0, 512);
        assert!(matches!(verdict, Verdict::Serve(Ask { fast: true, .. })));
        let kept = ask(wire::CMD_WRITE_ZEROES, fast | wire::CMD_FLAG_NO_HOLE, 0, 512);
        assert_eq!(errno(kept), Some(Errno::NotSupported));
        for (at, len) in [(0, 511), (1, 511), (1, 512)] {
            assert_eq!(errno(ask(wire::CMD_WRITE_ZEROES, fast, at, len)), Some(Errno::NotSupported));
        }
        assert_eq!(errno(ask(wire::CMD_TRIM, fast, 0, 512)), Some(Errno::Invalid));
    }

    #[test]
    fn what_is_to_be_cached_is_looked_up_and_not_told() {
        let simple = Agreed::default();
        let verdict = ask_of(&GEOMETRY, simple, wire::CMD_CACHE, 0, 1, 700);
        assert!(matches!(verdict, Verdict::Serve(Ask { operation: Operation::Extents { .. }, silent: true, .. })));
        assert_eq!(errno(ask(wire::CMD_CACHE, 0, GEOMETRY.len, 1)), Some(Errno::Invalid));
    }

    #[test]
    fn zero_bytes_are_nothing_to_do_where_they_exist() {
        assert_eq!(ask(wire::CMD_READ, 0, GEOMETRY.len, 0), Verdict::Nothing);
        assert_eq!(ask(wire::CMD_WRITE, 0, 0, 0), Verdict::Nothing);
        assert_eq!(errno(ask(wire::CMD_TRIM, 0, GEOMETRY.len + 512, 0)), Some(Errno::Invalid));
    }

    #[test]
    fn what_was_not_negotiated_is_invalid() {
        let simple = Agreed::default();
        assert_eq!(errno(ask_of(&GEOMETRY, simple, wire::CMD_BLOCK_STATUS, 0, 0, 512)), Some(Errno::Invalid));
        assert_eq!(errno(ask_of(&GEOMETRY, simple, wire::CMD_READ, wire::CMD_FLAG_DF, 0, 512)), Some(Errno::Invalid));
        assert_eq!(errno(ask(wire::CMD_WRITE, wire::CMD_FLAG_NO_HOLE, 0, 512)), Some(Errno::Invalid));
        assert_eq!(errno(ask(77, 0, 0, 0)), Some(Errno::Invalid));
        assert_eq!(errno(ask(wire::CMD_READ, wire::CMD_FLAG_FAST_ZERO, 0, 512)), Some(Errno::Invalid));
    }

    #[test]
    fn a_read_only_export_permits_no_change_but_flushes() {
        let geometry = Geometry { read_only: true, ..GEOMETRY };
        for kind in [wire::CMD_WRITE, wire::CMD_TRIM, wire::CMD_WRITE_ZEROES] {
            assert_eq!(errno(ask_of(&geometry, ALL, kind, 0, 0, 512)), Some(Errno::NotPermitted));
        }
        assert_eq!(served(ask_of(&geometry, ALL, wire::CMD_FLUSH, 0, 0, 0)), Some(Operation::Flush));
    }
}
