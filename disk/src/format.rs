//! The layout of one image file: where bytes live, never how they get there.
//!
//! A format performs no I/O. It answers, or names the metadata that it needs ([`Wait::Load`]). Changes are made in
//! two phases, so that a reader never sees a place before its bytes are there; they become durable in rounds,
//! each of them a list of batches with a sync in front of the first and behind every one:
//!
//! 1. [`Format::seal`], at the very moment at which the sync of the *data* is submitted: what was committed until
//!    then is what that sync covers, and is all that the batches of this round may speak of.
//! 2. That sync; then each batch (its writes in any order) and a sync behind it.
//! 3. [`Format::settled`].

use crate::{FileOffset, FileRange, Geometry, ImageError, Records, Span, Stamp};

/// The access for which an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only: nothing is ever written, not even a repair.
    ReadOnly,
    /// Reading and writing.
    ReadWrite,
}

/// The content of the file behind its used part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// Zeros: a file system.
    Zeroes,
    /// Whatever was there before: a block device.
    Stale,
}

/// A new file: set its length, then make these writes and sync.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Creation {
    /// Length of the file in bytes; what is not written reads as zero.
    pub len: u64,
    /// The metadata.
    pub writes: Vec<MetaWrite>,
}

/// Where the first bytes of a span live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// In this file.
    Data {
        /// Offset in the file.
        at: FileOffset,
        /// Number of bytes.
        len: u64,
    },
    /// In this file, compressed: to be read and given to [`Format::decompress`].
    Compressed {
        /// Offset in the file of what is to be read; a multiple of 512.
        at: FileOffset,
        /// Number of bytes to read; a multiple of 512.
        size: u64,
        /// Where in what was read the compressed bytes begin.
        lead: u64,
        /// Where in what they decompress to the first byte stands.
        skip: u64,
        /// Number of bytes of the span.
        len: u64,
    },
    /// In this file, where others may refer to them too: read there like [`Mapping::Data`], never overwritten.
    Shared {
        /// Offset in the file.
        at: FileOffset,
        /// Number of bytes.
        len: u64,
    },
    /// Not to be had: the metadata that says where they live makes no sense.
    Damaged {
        /// Offset in the file of that metadata.
        at: FileOffset,
        /// The value of the entry.
        raw: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Not to be had: the file has been cut off in front of them.
    Missing {
        /// Offset in the file at which they should be.
        at: FileOffset,
        /// Bytes that the file has.
        has: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Nowhere: they read as zero, whatever a parent holds.
    Zero {
        /// Number of bytes.
        len: u64,
    },
    /// Not here: in the parent, or, where there is none, nowhere, and zero.
    Parent {
        /// Number of bytes.
        len: u64,
    },
}

impl Mapping {
    /// Number of bytes that the answer covers, from the start of the span.
    #[allow(clippy::len_without_is_empty, reason = "never zero")]
    pub fn len(self) -> u64 {
        match self {
            Mapping::Data { len, .. }
            | Mapping::Compressed { len, .. }
            | Mapping::Shared { len, .. }
            | Mapping::Damaged { len, .. }
            | Mapping::Missing { len, .. }
            | Mapping::Zero { len }
            | Mapping::Parent { len } => len,
        }
    }
}

/// A piece of metadata in the file, to be read and given to [`Format::load`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MetaBlock {
    /// Offset in the file; a multiple of 512.
    pub at: FileOffset,
    /// Number of bytes; a multiple of 512.
    pub len: u32,
}

/// A piece of metadata to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaWrite {
    /// Offset in the file; a multiple of 512.
    pub at: FileOffset,
    /// The bytes; a multiple of 512.
    pub bytes: Vec<u8>,
}

/// Why there is no answer yet, or none at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Read this, give it to [`Format::load`], ask again.
    Load(MetaBlock),
    /// Another write is giving the same cluster its place. Ask again when its ticket is committed or abandoned.
    Busy(Ticket),
    /// All that is free may still be referred to by what is durable: ask again when a round has ended.
    Round,
    /// The format has run out of places (or the storage, where its size is fixed).
    NoSpace,
    /// The metadata that says where the first bytes live is malformed. Bytes around them are not affected.
    Damaged(Corrupt),
}

/// Names a reservation until it is committed or abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// Space to write into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Offset in the file.
    pub at: FileOffset,
    /// Number of bytes, from the start of the span; never zero.
    pub len: u64,
    /// To commit or abandon when the write has ended; `None` where nothing changes with it.
    pub ticket: Option<Ticket>,
    /// The bytes around it that must be written with it, in one piece.
    pub fill: Option<Fill>,
}

/// Bytes around a reservation that its place takes over: once it is visible they are read from there, so they must be
/// written before, with what a reader finds at present. Behind the disk's end that is zero. None of them are `Data` of
/// this very file, and none lie in another 2 MiB of the disk than some byte of the reservation. Until it ends, every
/// other reservation that meets them is `Busy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Number of bytes in front, on the disk and in the file.
    pub before: u64,
    /// Number of bytes behind.
    pub after: u64,
}

/// A span that has got a place of its own by a commit. It may be larger than what was written: the rest reads
/// as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The span of the disk.
    pub span: Span,
    /// Offset in the file.
    pub at: FileOffset,
}

/// The outcome for the first bytes of a discarded span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discarded {
    /// They have lost their place and read as zero. The whole file range is to be deallocated, and [`Format::released`]
    /// called with the result.
    Freed {
        /// Offset in the file.
        at: FileOffset,
        /// Number of bytes of the span.
        len: u64,
        /// Number of bytes of the file range: the last block of a disk may reach behind the disk's end.
        size: u64,
    },
    /// They keep their place, whose content may be deallocated.
    Kept {
        /// Offset in the file.
        at: FileOffset,
        /// Number of bytes.
        len: u64,
    },
    /// They have no place in this file, before or after, and read as zero now whatever a parent holds.
    Hidden {
        /// Number of bytes.
        len: u64,
    },
    /// There is nothing to free.
    Nothing {
        /// Number of bytes.
        len: u64,
    },
}

/// Metadata just loaded makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt {
    /// Offset in the file.
    pub at: FileOffset,
}

/// The layout of one image file.
pub trait Format {
    /// Size and limits.
    fn geometry(&self) -> Geometry;

    /// Whether each byte of the disk stands at the same offset of the file, now and always.
    fn is_flat(&self) -> bool {
        false
    }

    /// Where the first bytes of `span` live. What is `Data` in an image that can be written to is overwritten in place,
    /// without a reservation.
    fn map(&mut self, span: Span) -> Result<Mapping, Wait>;

    /// Space for the first bytes of `span`. Readers see the old place until `commit`.
    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait>;

    /// The bytes are written: readers see them from now on, and the next round makes that durable. `None`
    /// where readers need no new mapping.
    fn commit(&mut self, ticket: Ticket) -> Option<Committed>;

    /// The write failed: the old place stays.
    fn abandon(&mut self, ticket: Ticket);

    /// Frees the first bytes of `span`, over which no operation is in flight. Nothing may be freed of a cluster that is
    /// being written next to them and will become visible with them: `Nothing`, or `Busy`.
    fn discard(&mut self, span: Span) -> Result<Discarded, Wait>;

    /// The file range of a [`Discarded::Freed`] was deallocated (`clean`: it reads as zero now) or could not be.
    fn released(&mut self, at: FileOffset, clean: bool);

    /// A file range in no use and of unknown content, left by a crash or a failed write: to be deallocated whenever
    /// there is time, and [`Format::released`] called with the result.
    fn reclaim(&mut self) -> Option<FileRange>;

    /// The first bytes of `span` live here no longer: readers find them in the parent, which holds the same. How many
    /// bytes. No write to them is in flight. Their place becomes leaked ([`Format::reclaim`]) once that is durable, not
    /// before: until then a power loss brings them back.
    fn forget(&mut self, span: Span) -> Result<u64, Wait>;

    /// Makes the disk larger; what is new reads as zero. Durable with the next round.
    fn grow(&mut self, len: u64) -> Result<(), ImageError>;

    /// Decompresses a cluster.
    fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt>;

    /// Metadata that was waited for. Of what was loaded, at least as much is kept as answers for 2 MiB of disk take.
    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt>;

    /// Forgets metadata that can be loaded again, but for what the file does not have yet or something under way needs.
    fn drop_caches(&mut self) {}

    /// Changes of the metadata since the records were last cleared, for the redo log, if they are collected
    /// ([`Records::collect`]). Never part of a change.
    fn records(&mut self) -> &mut Records;

    /// From now on changes are collected.
    fn collect_records(&mut self);

    /// Puts this stamp into the file, by this write. `None` if the file has no room for one, or a write under way may
    /// concern the same place.
    fn set_stamp(&mut self, stamp: Stamp) -> Option<MetaWrite>;

    /// The next round removes the stamp from the file, so that it is again what other programs know. Only while all
    /// else is durable.
    fn clear_stamp(&mut self);

    /// The amount of work for a round: metadata blocks changed since the last `seal`, which it would write, and places
    /// freed since, which could be used again after it.
    fn dirty(&self) -> usize;

    /// Begins a round: the batches that make durable what has been committed until now. Never called while a
    /// round is under way.
    fn seal(&mut self) -> Vec<Vec<MetaWrite>>;

    /// Ends a round: everything in it is durable, or (`false`) a write of it has failed and its content is to
    /// be written again by the next.
    fn settled(&mut self, durable: bool);
}
