//! Pages that a guest has granted: copied from and to, or mapped.
//!
//! Knows nothing of what is in them. Keeps: memory of ours that a copy goes to or comes from lives until the batch is cleared.

use std::io;
use std::sync::Arc;

use memory::{Buffer, Mapping, Segments, Shared};

use crate::{DomId, PAGE};

/// The number under which a guest has granted a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantRef(pub u32);

/// A part of one granted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The page.
    pub page: GrantRef,
    /// First byte in it.
    pub from: u16,
    /// Bytes; they do not reach beyond the page.
    pub len: u16,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Out of the guest's pages into memory of ours.
    FromGuest,
    /// Out of memory of ours into the guest's pages.
    ToGuest,
}

/// What became of one entry of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Every byte was copied.
    All,
    /// Some page could not be: with the hypervisor's status (xen.h, `GNTST_*`), or because it was not tried.
    Refused(i16),
}

/// Status of what was not tried.
const UNTRIED: i16 = i16::MIN;

/// One entry: pieces of a guest's pages, and as many bytes of memory.
pub(crate) struct Entry {
    pub direction: Direction,
    pub memory: Segments,
    /// How many of the batch's pieces are this entry's.
    pub pieces: usize,
    pub copied: Copied,
}

/// Copies to be made together: one call into the kernel for all requests of a pass.
#[derive(Default)]
pub struct CopyBatch {
    pub(crate) entries: Vec<Entry>,
    /// Those of all entries, in order.
    pub(crate) pieces: Vec<Piece>,
}

impl CopyBatch {
    /// Adds an entry, and says under which number its fate will be found. `None`: a piece reaches beyond its page, or the
    /// pieces are not as many bytes as the memory.
    pub fn push(&mut self, direction: Direction, memory: Segments, pieces: &[Piece]) -> Option<usize> {
        let inside = pieces.iter().all(|piece| usize::from(piece.from) + usize::from(piece.len) <= PAGE);
        let bytes: usize = pieces.iter().map(|piece| usize::from(piece.len)).sum();
        if !inside || bytes != memory.len() {
            return None;
        }
        self.pieces.extend_from_slice(pieces);
        self.entries.push(Entry { direction, memory, pieces: pieces.len(), copied: Copied::Refused(UNTRIED) });
        Some(self.entries.len() - 1)
    }

    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What became of an entry.
    pub fn copied(&self, entry: usize) -> Copied {
        self.entries.get(entry).map_or(Copied::Refused(UNTRIED), |entry| entry.copied)
    }

    /// Before it is tried: nothing was.
    pub(crate) fn forget_fates(&mut self) {
        for entry in &mut self.entries {
            entry.copied = Copied::Refused(UNTRIED);
        }
    }

    /// Begins anew, with the room that there is.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.pieces.clear();
    }
}

/// Pages of a guest, mapped in one piece of our address space in the order in which they were named.
pub struct Granted {
    mapping: Mapping,
    read_only: bool,
    /// Told when nothing points into the pages any more, after they are unmapped.
    #[allow(dead_code, reason = "held for its drop; fields are dropped in this order")]
    release: Box<dyn Send + Sync>,
}

impl Granted {
    pub(crate) fn new(mapping: Mapping, read_only: bool, release: Box<dyn Send + Sync>) -> Granted {
        Granted { mapping, read_only, release }
    }

    /// Bytes mapped.
    #[allow(clippy::len_without_is_empty, reason = "nothing is never mapped")]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// All of it, for a ring.
    ///
    /// # Panics
    /// If it was mapped to be read only.
    pub fn shared(self: &Arc<Self>) -> Shared {
        assert!(!self.read_only, "a ring that cannot be written");
        // SAFETY: the whole mapping, which lives as long as `self` and can be written.
        unsafe { Shared::new(self.clone(), self.mapping.base(), self.mapping.len()) }
    }

    /// Copies `len` bytes from `at` on to the buffer, from its byte `to` on. What the guest changes meanwhile is copied as it was
    /// before or after. `None`: they do not lie in the mapping, or not in the buffer.
    #[inline]
    pub fn copy_out(&self, at: usize, len: usize, buffer: &Buffer, to: usize) -> Option<()> {
        let (theirs, ours) = self.ends(at, len, buffer, to)?;
        // SAFETY: both ends lie where they should, and a buffer is no guest's page. Nobody looks at the buffer as Rust's
        // memory: its bytes are copied only.
        unsafe { ours.copy_from_nonoverlapping(theirs, len) };
        Some(())
    }

    /// Copies `len` bytes of the buffer, from its byte `from` on, to the pages, from `at` on. `None`: they do not lie in the
    /// mapping, or not in the buffer, or the pages can only be read.
    #[inline]
    pub fn copy_in(&self, at: usize, len: usize, buffer: &Buffer, from: usize) -> Option<()> {
        let (theirs, ours) = self.ends(at, len, buffer, from).filter(|_| !self.read_only)?;
        // SAFETY: as above, and the pages can be written.
        unsafe { theirs.copy_from_nonoverlapping(ours, len) };
        Some(())
    }

    fn ends(&self, at: usize, len: usize, buffer: &Buffer, other: usize) -> Option<(*mut u8, *mut u8)> {
        let inside = at.checked_add(len)? <= self.mapping.len() && other.checked_add(len)? <= buffer.capacity();
        inside.then(|| (self.mapping.base().wrapping_add(at), buffer.base().wrapping_add(other)))
    }

    /// The bytes of `ranges`, each a first byte and a length. `None` if one is not inside. Where pages are mapped to be read
    /// only these are bytes to write from, never to: the kernel refuses (EFAULT), and a copy of ours ends the process.
    pub fn segments(self: &Arc<Self>, ranges: impl IntoIterator<Item = (usize, usize)>) -> Option<Segments> {
        let mut parts = Vec::new();
        for (at, len) in ranges {
            if at.checked_add(len)? > self.mapping.len() {
                return None;
            }
            parts.push((self.mapping.base().wrapping_add(at), len));
        }
        // SAFETY: each part lies in the mapping, which lives as long as `self`; that it is not written to where it cannot be
        // is the caller's to keep, and a fault, not a corruption, if it is not.
        Some(unsafe { Segments::new(self.clone(), parts) })
    }
}

/// What is done with pages that guests have granted.
pub trait Grants {
    /// Makes all copies of the batch, pages of `domain`; what became of each is in the batch then. An error is one of the
    /// whole call: nothing can be said of any entry, and each says that it was refused.
    fn copy(&mut self, domain: DomId, batch: &mut CopyBatch) -> io::Result<()>;

    /// Maps pages of `domain`, to be read and, unless `read_only`, written. All or none.
    fn map(&mut self, domain: DomId, pages: &[GrantRef], read_only: bool) -> io::Result<Arc<Granted>>;
}
