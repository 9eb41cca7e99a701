//! Pages that a guest has granted: copied from and to, or mapped.
//!
//! It knows nothing about their contents. Invariant: memory of ours that a copy uses lives until the batch is cleared.

use std::io;
use std::sync::Arc;

use memory::{Buffer, Mapping, Segments, Shared};

use crate::{DomId, PAGE};

/// The reference under which a guest has granted a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantRef(pub u32);

/// A range of bytes in one granted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRange {
    /// The page.
    pub page: GrantRef,
    /// The first byte.
    pub from: u16,
    /// Number of bytes; the range does not extend past the page.
    pub len: u16,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the guest's pages into our memory.
    FromGuest,
    /// From our memory into the guest's pages.
    ToGuest,
}

/// The result of one entry of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// Every byte was copied.
    All,
    /// A page could not be copied: with the hypervisor's status (xen.h, `GNTST_*`), or because it was not attempted.
    Refused(i16),
}

/// The status of an entry that was not attempted.
const NOT_ATTEMPTED: i16 = i16::MIN;

/// One entry: ranges of a guest's pages, and as many bytes of our memory.
pub(crate) struct Entry {
    pub direction: Direction,
    pub memory: Segments,
    /// How many of the batch's ranges belong to this entry.
    pub ranges: usize,
    pub copied: Copied,
}

/// Copies to be made together: one call into the kernel for all requests of a pass.
#[derive(Default)]
pub struct CopyBatch {
    pub(crate) entries: Vec<Entry>,
    /// The ranges of all entries, in order.
    pub(crate) ranges: Vec<PageRange>,
}

impl CopyBatch {
    /// Adds an entry and returns its index, under which its result will be found. `None` if a range extends past its
    /// page, or if the ranges and the memory differ in length.
    pub fn push(&mut self, direction: Direction, memory: Segments, ranges: &[PageRange]) -> Option<usize> {
        let inside = ranges.iter().all(|range| usize::from(range.from) + usize::from(range.len) <= PAGE);
        let bytes: usize = ranges.iter().map(|range| usize::from(range.len)).sum();
        if !inside || bytes != memory.len() {
            return None;
        }
        self.ranges.extend_from_slice(ranges);
        self.entries.push(Entry { direction, memory, ranges: ranges.len(), copied: Copied::Refused(NOT_ATTEMPTED) });
        Some(self.entries.len() - 1)
    }

    /// Whether there is nothing to copy.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The result of an entry.
    pub fn copied(&self, entry: usize) -> Copied {
        self.entries.get(entry).map_or(Copied::Refused(NOT_ATTEMPTED), |entry| entry.copied)
    }

    /// Resets all results before an attempt.
    pub(crate) fn reset_results(&mut self) {
        for entry in &mut self.entries {
            entry.copied = Copied::Refused(NOT_ATTEMPTED);
        }
    }

    /// Empties the batch, keeping its allocations.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.ranges.clear();
    }
}

/// Pages of a guest, mapped contiguously into our address space in the given order.
pub struct Granted {
    mapping: Mapping,
    read_only: bool,
    /// Dropped when nothing points into the pages any more, after they are unmapped.
    #[allow(dead_code, reason = "held for its drop; fields are dropped in this order")]
    release: Box<dyn Send + Sync>,
}

impl Granted {
    pub(crate) fn new(mapping: Mapping, read_only: bool, release: Box<dyn Send + Sync>) -> Granted {
        Granted { mapping, read_only, release }
    }

    /// Number of mapped bytes.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// All of it, for a ring.
    ///
    /// # Panics
    /// If it is mapped read-only.
    pub fn shared(self: &Arc<Self>) -> Shared {
        assert!(!self.read_only, "a ring must be mapped writable");
        // SAFETY: the whole mapping, which lives as long as `self` and can be written.
        unsafe { Shared::new(self.clone(), self.mapping.base(), self.mapping.len()) }
    }

    /// Copies `len` bytes, starting at `at`, to the buffer at byte `to`. A concurrent change by the guest is copied
    /// either in its old or its new state. `None` if the bytes are not within the mapping or the buffer.
    #[inline]
    pub fn copy_out(&self, at: usize, len: usize, buffer: &Buffer, to: usize) -> Option<()> {
        let (theirs, ours) = self.ends(at, len, buffer, to)?;
        // SAFETY: both ends are in bounds, and a buffer is not a guest's page. No Rust reference to the buffer exists:
        // its bytes are only copied.
        unsafe { ours.copy_from_nonoverlapping(theirs, len) };
        Some(())
    }

    /// Copies `len` bytes of the buffer, starting at byte `from`, to the pages at `at`. `None` if the bytes are not
    /// within the mapping or the buffer, or if the pages are read-only.
    #[inline]
    pub fn copy_in(&self, at: usize, len: usize, buffer: &Buffer, from: usize) -> Option<()> {
        let (theirs, ours) = self.ends(at, len, buffer, from).filter(|_| !self.read_only)?;
        // SAFETY: as above, and the pages are writable.
        unsafe { theirs.copy_from_nonoverlapping(ours, len) };
        Some(())
    }

    /// Copies bytes, starting at `at`, into `into`; each is read once. `None` if they are not within the mapping.
    #[inline]
    pub fn read(&self, at: usize, into: &mut [u8]) -> Option<()> {
        if at.checked_add(into.len())? > self.mapping.len() {
            return None;
        }
        // SAFETY: the source is in bounds and mapped readable; the destination is ours alone. What the guest changes
        // meanwhile is copied in its old or its new state, as above.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(self.mapping.base().wrapping_add(at), into.len()) };
        Some(())
    }

    fn ends(&self, at: usize, len: usize, buffer: &Buffer, other: usize) -> Option<(*mut u8, *mut u8)> {
        let inside = at.checked_add(len)? <= self.mapping.len() && other.checked_add(len)? <= buffer.capacity();
        inside.then(|| (self.mapping.base().wrapping_add(at), buffer.base().wrapping_add(other)))
    }

    /// The bytes of `ranges`, each a first byte and a length. `None` if one is out of bounds. Memory of pages mapped
    /// read-only must only be read: the kernel refuses to write to it (EFAULT), and a write of ours ends the process.
    pub fn segments(self: &Arc<Self>, ranges: impl IntoIterator<Item = (usize, usize)>) -> Option<Segments> {
        let mut parts = Vec::new();
        for (at, len) in ranges {
            if at.checked_add(len)? > self.mapping.len() {
                return None;
            }
            parts.push((self.mapping.base().wrapping_add(at), len));
        }
        // SAFETY: each part is within the mapping, which lives as long as `self`. That read-only memory is not written
        // to is up to the caller, and a violation is a fault, not corruption.
        Some(unsafe { Segments::new(self.clone(), parts) })
    }
}

/// Operations on pages that guests have granted.
pub trait Grants {
    /// Makes all copies of the batch with pages of `domain`, and records each result in the batch. An error concerns
    /// the whole call: the outcome of every entry is unknown, and each is recorded as refused.
    fn copy(&mut self, domain: DomId, batch: &mut CopyBatch) -> io::Result<()>;

    /// Maps pages of `domain` for reading and, unless `read_only`, writing. Either all or none.
    fn map(&mut self, domain: DomId, pages: &[GrantRef], read_only: bool) -> io::Result<Arc<Granted>>;
}
