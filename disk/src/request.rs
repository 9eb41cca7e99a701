//! Requests of a peer to a disk, and their answers.
//!
//! A [`Request`] that exists has been checked against the disk's geometry; nothing below checks it again. It is
//! answered exactly once: [`Request::retire`] takes it by value, and dropping an unanswered one panics.

use memory::Segments;

use crate::io::FileError;
use crate::span::{Geometry, Span};
use crate::unaligned::{self, Unaligned};

/// The operation of a request, as a peer sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the memory from the span.
    Read,
    /// Write the memory to the span. `durable`: answer only when it survives power loss (FUA).
    Write {
        /// Force unit access: implies a flush that covers this write.
        durable: bool,
    },
    /// The same for bytes that do not begin and end at block boundaries: the rest of their first and last block is read
    /// first. The span has whole blocks all the same; [`Request::asked`] has the requested bytes.
    Patch {
        /// As for a write.
        durable: bool,
    },
    /// Make every write answered before this request survive power loss. The span is empty.
    Flush,
    /// The span's content is no longer needed; its space may be freed. It then reads as zero or as before.
    Discard,
    /// The span reads as zero from now on.
    WriteZeroes {
        /// Space may be freed.
        free: bool,
        /// As for a write.
        durable: bool,
    },
    /// List how the span is allocated, in [`Request::extents`].
    Extents {
        /// And in which layer, which takes the metadata of every layer above that.
        depths: bool,
    },
}

impl Operation {
    /// Whether the operation changes the disk.
    pub fn is_write(self) -> bool {
        match self {
            Operation::Write { .. } | Operation::Patch { .. } => true,
            Operation::Discard | Operation::WriteZeroes { .. } => true,
            Operation::Read | Operation::Flush | Operation::Extents { .. } => false,
        }
    }
}

/// The kind of a run of bytes, as far as the formats know without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored bytes.
    Data,
    /// Reads as zero; takes no space of its own.
    Hole,
}

/// A run of bytes of one kind, in the answer to [`Operation::Extents`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of bytes.
    pub len: u64,
    /// The kind of the bytes.
    pub kind: ExtentKind,
    /// Which layer holds them: 1 for the disk's own, 2 for its parent, and so on; 0 if none does, or if depths were not
    /// requested.
    pub depth: u32,
}

/// The outcome of a request: one byte, mapped to each protocol's codes by its transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done as requested.
    Done,
    /// The storage failed; a write's own range is uncertain, nothing else is.
    Failed,
    /// No space is left to write into.
    NoSpace,
    /// The disk does not accept this now: it is read-only, or a sync has failed.
    Refused,
    /// Neither the format nor the storage can do this, or the request lies outside of the geometry.
    Unsupported,
}

impl Status {
    /// A file error as the status of the request that it failed.
    pub(crate) fn of(result: Result<(), FileError>) -> Status {
        match result {
            Ok(()) => Status::Done,
            Err(FileError::NoSpace) => Status::NoSpace,
            Err(FileError::Unsupported | FileError::Failed(_)) => Status::Failed,
        }
    }
}

/// A transport's own name for a request, handed back with the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// One checked request, on its way through the disk.
#[derive(Debug)]
pub struct Request {
    operation: Operation,
    span: Span,
    memory: Segments,
    token: Token,
    /// Rarely used fields, kept apart: requests are moved often, and a larger one costs more.
    extras: Option<Box<Extras>>,
    /// When it was taken in, in nanoseconds of the clock of the loop that serves the disk, which sets and reads it; so
    /// are the next two.
    pub taken: u64,
    /// How many nanoseconds before that it could have been seen.
    pub waited: u32,
    /// Its number among the requests in flight, for statistics.
    pub slot: u16,
    /// Set by the disk where a layer's format has no room for it, so that no space of the storage would help.
    pub at_limit: bool,
    /// Of zeroes: where the storage cannot make any without writing them, that is to be said ([`Status::Unsupported`]).
    pub fast: bool,
    open: bool,
}

/// Rarely used fields of a request.
#[derive(Debug, Default)]
struct Extras {
    /// The answer to [`Operation::Extents`].
    extents: Vec<Extent>,
    /// Of one that was widened to whole blocks.
    unaligned: Option<Unaligned>,
}

impl Request {
    /// Checks a request against `geometry`. `memory` has the span's length for reads and writes, else none.
    /// An error is the status to answer the peer with.
    #[inline]
    pub fn new(
        operation: Operation,
        span: Span,
        memory: Segments,
        token: Token,
        geometry: &Geometry,
    ) -> Result<Request, Status> {
        let block = u64::from(geometry.block);
        let aligned = span.at % block == 0 && span.len % block == 0;
        let inside = span.at.checked_add(span.len).is_some_and(|end| end.0 <= geometry.len);
        let memory_fits = match operation {
            Operation::Read | Operation::Write { .. } | Operation::Patch { .. } => {
                u64::try_from(memory.len()) == Ok(span.len)
            }
            Operation::Flush => memory.is_empty() && span.len == 0,
            Operation::Discard | Operation::WriteZeroes { .. } | Operation::Extents { .. } => memory.is_empty(),
        };
        if geometry.read_only && operation.is_write() {
            return Err(Status::Refused);
        }
        if !aligned || !inside || !memory_fits {
            return Err(Status::Unsupported);
        }
        let (extras, taken, waited, slot, at_limit, fast) = (None, 0, 0, u16::MAX, false, false);
        Ok(Request { operation, span, memory, token, extras, taken, waited, slot, at_limit, fast, open: true })
    }

    /// The same for peers that may ask for single bytes. A read finds those, a write changes those and nothing else; a
    /// discard frees the whole blocks among them.
    pub fn of_bytes(
        operation: Operation,
        asked: Span,
        memory: Segments,
        token: Token,
        geometry: &Geometry,
    ) -> Result<Request, Status> {
        let block = u64::from(geometry.block);
        let inside = asked.at.checked_add(asked.len).is_some_and(|end| end.0 <= geometry.len);
        if !inside || asked.at % block == 0 && asked.len % block == 0 {
            return Request::new(operation, asked, memory, token, geometry);
        }
        let fits = u64::try_from(memory.len()) == Ok(asked.len);
        let outside = unaligned::outside(asked, block).ok_or(Status::Unsupported)?;
        let (operation, span, memory, unaligned) = match operation {
            Operation::Discard => {
                let whole = unaligned::inside(asked, block).ok_or(Status::Unsupported)?;
                (operation, whole, memory, None)
            }
            Operation::Read if fits => {
                let (unaligned, memory) = Unaligned::read(asked, outside, memory);
                (operation, outside, memory, Some(unaligned))
            }
            Operation::Write { durable } if fits => {
                let (unaligned, memory) = Unaligned::write(asked, outside, memory, block);
                (Operation::Patch { durable }, outside, memory, Some(unaligned))
            }
            Operation::WriteZeroes { .. } => {
                (operation, outside, memory, Some(Unaligned::zeroes(asked, outside, block)))
            }
            Operation::Extents { .. } => (operation, outside, memory, Some(Unaligned::question(asked))),
            _ => return Err(Status::Unsupported),
        };
        let mut request = Request::new(operation, span, memory, token, geometry)?;
        request.extras =
            unaligned.map(|unaligned| Box::new(Extras { extents: Vec::new(), unaligned: Some(unaligned) }));
        Ok(request)
    }

    /// A request of the disk to itself: no peer waits for an answer.
    pub(crate) fn internal(operation: Operation, span: Span) -> Request {
        let (memory, token) = (Segments::empty(), Token(0));
        let (extras, taken, waited, slot, at_limit, fast) = (None, 0, 0, u16::MAX, false, false);
        Request { operation, span, memory, token, extras, taken, waited, slot, at_limit, fast, open: false }
    }

    /// The requested operation.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The bytes of the disk it is about.
    pub fn span(&self) -> Span {
        self.span
    }

    /// The requested bytes: all of the span, or fewer where it was widened to whole blocks.
    pub fn asked(&self) -> Span {
        self.widened().map_or(self.span, |unaligned| unaligned.asked)
    }

    /// The memory of the requested bytes, of a read or a write.
    pub fn asked_memory(&self) -> Segments {
        match self.widened() {
            Some(unaligned) if !self.memory.is_empty() => unaligned::cut(&self.memory, self.span, unaligned.asked),
            _ => self.memory.clone(),
        }
    }

    /// The blocks to be read before a write that does not cover whole blocks; `None` for other requests.
    pub(crate) fn unaligned(&self) -> Option<&Unaligned> {
        self.widened().filter(|unaligned| self.operation.is_write() && unaligned.has_edges())
    }

    fn widened(&self) -> Option<&Unaligned> {
        self.extras.as_ref().and_then(|extras| extras.unaligned.as_ref())
    }

    /// The answer to [`Operation::Extents`], in order, covering the span from its start.
    pub fn extents(&self) -> &[Extent] {
        self.extras.as_ref().map_or(&[], |extras| &extras.extents)
    }

    /// The same, to be filled by the disk.
    pub fn extents_mut(&mut self) -> &mut Vec<Extent> {
        &mut self.extras.get_or_insert_default().extents
    }

    /// Takes the answer out of the request.
    pub fn take_extents(&mut self) -> Vec<Extent> {
        self.extras.as_mut().map(|extras| std::mem::take(&mut extras.extents)).unwrap_or_default()
    }

    /// Where the bytes come from or go to.
    pub fn memory(&self) -> &Segments {
        &self.memory
    }

    /// Lends the memory to the operation that is all of the request; [`Request::give_back`] follows.
    pub(crate) fn lend(&mut self) -> Segments {
        std::mem::take(&mut self.memory)
    }

    /// The operation has ended.
    pub(crate) fn give_back(&mut self, memory: Segments) {
        self.memory = memory;
    }

    /// The transport's name for it.
    pub fn token(&self) -> Token {
        self.token
    }

    /// The same request by another name, for who puts several transports together.
    #[must_use]
    pub fn renamed(mut self, token: Token) -> Request {
        self.token = token;
        self
    }

    /// Ends the request. Called by a transport that has answered its peer, or no longer can.
    pub fn retire(mut self) -> Token {
        self.open = false;
        self.token
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // A request that vanishes is a guest that waits forever: a mistake of ours, to be found in tests.
        assert!(!self.open || std::thread::panicking(), "request {:?} dropped without an answer", self.token);
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::DiskOffset;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };

    fn ask(operation: Operation, at: u64, len: u64) -> Result<Token, Status> {
        let memory = if matches!(operation, Operation::Read) {
            Segments::zeroed(usize::try_from(len).unwrap())
        } else {
            Segments::empty()
        };
        Request::new(operation, Span { at: DiskOffset(at), len }, memory, Token(1), &GEOMETRY).map(Request::retire)
    }

    #[test]
    fn a_request_lies_inside_the_disk() {
        assert_eq!(ask(Operation::Read, (1 << 20) - 512, 512), Ok(Token(1)));
        assert_eq!(ask(Operation::Read, (1 << 20) - 512, 1024), Err(Status::Unsupported));
        assert_eq!(ask(Operation::Discard, u64::MAX - 511, 512), Err(Status::Unsupported));
        assert_eq!(ask(Operation::Read, 100, 512), Err(Status::Unsupported));
    }

    #[test]
    fn a_read_only_disk_refuses_writes() {
        let geometry = Geometry { read_only: true, ..GEOMETRY };
        let refused = Request::new(
            Operation::Discard,
            Span { at: DiskOffset(0), len: 512 },
            Segments::empty(),
            Token(1),
            &geometry,
        );
        assert_eq!(refused.map(Request::retire), Err(Status::Refused));
    }

    #[test]
    #[should_panic(expected = "dropped without an answer")]
    fn dropping_an_unanswered_request_panics() {
        drop(Request::new(
            Operation::Flush,
            Span { at: DiskOffset(0), len: 0 },
            Segments::empty(),
            Token(7),
            &GEOMETRY,
        ));
    }
}
