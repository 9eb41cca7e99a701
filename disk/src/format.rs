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

use crate::{Geometry, Span};

/// Where the first bytes of a span live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In this file.
    Data {
        /// Offset in the file.
        at: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Nowhere: they read as zero, whatever a parent holds.
    Zero {
        /// Number of bytes.
        len: u64,
    },
    /// In the parent.
    Parent {
        /// Number of bytes.
        len: u64,
    },
}

impl Place {
    /// Number of bytes that the answer covers, from the start of the span.
    #[allow(clippy::len_without_is_empty, reason = "never zero")]
    pub fn len(self) -> u64 {
        match self {
            Place::Data { len, .. } | Place::Zero { len } | Place::Parent { len } => len,
        }
    }
}

/// A piece of metadata in the file, to be read and given to [`Format::load`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MetaBlock {
    /// Offset in the file; a multiple of 512.
    pub at: u64,
    /// Number of bytes; a multiple of 512.
    pub len: u32,
}

/// A piece of metadata to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaWrite {
    /// Offset in the file; a multiple of 512.
    pub at: u64,
    /// The bytes; a multiple of 512.
    pub bytes: Vec<u8>,
}

/// Why there is no answer yet, or none at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Read this, give it to [`Format::load`], ask again.
    Load(MetaBlock),
    /// The format has run out of places (or the storage, where its size is fixed).
    NoSpace,
}

/// Names a reservation until it is committed or abandoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// Space to write into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Offset in the file.
    pub at: u64,
    /// Number of bytes, from the start of the span; never zero.
    pub len: u64,
    /// To commit or abandon when the write has ended; `None` where nothing changes with it.
    pub ticket: Option<Ticket>,
}

/// A span that has got a place of its own by a commit. It may be larger than what was written: the rest reads
/// as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The span of the disk.
    pub span: Span,
    /// Offset in the file.
    pub at: u64,
}

/// What became of the first bytes of a discarded span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discarded {
    /// They have lost their place and read as zero. The file range is to be deallocated, all of it, and its fate
    /// told to [`Format::released`].
    Freed {
        /// Offset in the file.
        at: u64,
        /// Number of bytes of the span.
        len: u64,
        /// Number of bytes of the file range: the last block of a disk may reach behind the disk's end.
        size: u64,
    },
    /// They keep their place, whose content may be deallocated.
    Kept {
        /// Offset in the file.
        at: u64,
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
    pub at: u64,
}

/// The layout of one image file.
pub trait Format {
    /// Size and limits.
    fn geometry(&self) -> Geometry;

    /// Where the first bytes of `span` live.
    fn map(&mut self, span: Span) -> Result<Place, Wait>;

    /// Space for the first bytes of `span`. Readers see the old place until `commit`.
    fn reserve(&mut self, span: Span) -> Result<Reserved, Wait>;

    /// The bytes are written: readers see them from now on, and the next round makes that durable. `None` for a
    /// ticket that does not exist.
    fn commit(&mut self, ticket: Ticket) -> Option<Placed>;

    /// The write failed: the old place stays.
    fn abandon(&mut self, ticket: Ticket);

    /// Gives up the first bytes of `span`, over which no operation is in flight.
    fn discard(&mut self, span: Span) -> Result<Discarded, Wait>;

    /// The file range of a [`Discarded::Freed`] was deallocated (`clean`: it reads as zero now) or could not be.
    fn released(&mut self, at: u64, clean: bool);

    /// A file range (offset, length) in no use and of unknown content, left by a crash or a failed write: to be
    /// deallocated and its fate told to [`Format::released`], whenever there is time.
    fn reclaim(&mut self) -> Option<(u64, u64)>;

    /// Metadata that was waited for.
    fn load(&mut self, block: MetaBlock, bytes: &[u8]) -> Result<(), Corrupt>;

    /// What a round would do: metadata blocks changed since the last `seal`, that it would write, and places given up
    /// since, that could be used again after it.
    fn dirty(&self) -> usize;

    /// Begins a round: the batches that make durable what has been committed until now. Never called while a
    /// round is under way.
    fn seal(&mut self) -> Vec<Vec<MetaWrite>>;

    /// Ends a round: everything in it is durable, or (`false`) a write of it has failed and its content is to
    /// be written again by the next.
    fn settled(&mut self, durable: bool);
}
