//! A scatter-gather list that keeps alive what it points into.

use std::any::Any;
use std::sync::{Arc, LazyLock};

use smallvec::SmallVec;

use crate::size::on_disk;
use crate::{Buffer, GuestAddr, GuestMemory};

/// One address range of this process. Laid out as the kernel's `struct iovec`, so that a list of parts can
/// be handed to `readv` as it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    base: *mut u8,
    len: usize,
}

impl Part {
    /// The first byte. Valid as long as the [`Segments`] it was taken from lives.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes in the part.
    #[allow(clippy::len_without_is_empty, reason = "a part is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// Address ranges, in order, and the owner that keeps them mapped. By default none at all.
///
/// The bytes may be guest memory, which the guest can change at any time: they are only ever copied, never
/// referenced. A copy seen here is one snapshot, not a promise that a second look finds the same.
#[derive(Default)]
pub struct Segments {
    /// None where there are no parts.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    parts: SmallVec<[Part; 2]>,
    len: usize,
}

/// Parts of a list that is being made.
#[derive(Default)]
pub(crate) struct PartList {
    parts: SmallVec<[Part; 2]>,
    len: usize,
}

impl PartList {
    /// The parts, in order.
    pub(crate) fn into_parts(self) -> SmallVec<[Part; 2]> {
        self.parts
    }

    /// One part more, which is not empty. `None`: more bytes than can be counted.
    #[inline]
    pub(crate) fn push(&mut self, base: *mut u8, len: usize) -> Option<()> {
        self.len = self.len.checked_add(len)?;
        self.parts.push(Part { base, len });
        Some(())
    }
}

// SAFETY: the parts are plain addresses; what they address is kept mapped by `owner`, which is itself
// `Send + Sync`, and is accessed only by copies that tolerate concurrent change.
unsafe impl Send for Segments {}
// SAFETY: as above; no method hands out a reference into the parts.
unsafe impl Sync for Segments {}

impl Segments {
    /// A list over `parts`; empty parts are left out.
    ///
    /// # Safety
    /// Every part must lie in memory that is readable and writable for as long as `owner` lives.
    pub unsafe fn new(
        owner: Arc<dyn Any + Send + Sync>,
        parts: impl IntoIterator<Item = (*mut u8, usize)>,
    ) -> Segments {
        let parts: SmallVec<[Part; 2]> =
            parts.into_iter().filter(|&(_, len)| len > 0).map(|(base, len)| Part { base, len }).collect();
        let len = parts.iter().map(|part| part.len).sum();
        Segments { owner: Some(owner), parts, len }
    }

    /// A list over parts that were put together before.
    ///
    /// # Safety
    /// As for [`Segments::new`].
    #[inline]
    pub(crate) unsafe fn of_list(owner: Arc<dyn Any + Send + Sync>, list: PartList) -> Segments {
        let PartList { parts, len } = list;
        Segments { owner: Some(owner), parts, len }
    }

    /// The bytes of all of these, one behind the other.
    pub fn joined(pieces: Vec<Segments>) -> Segments {
        let parts =
            pieces.iter().flat_map(|piece| piece.parts.iter().map(|part| Part { base: part.base, len: part.len }));
        let parts: SmallVec<[Part; 2]> = parts.collect();
        let len = pieces.iter().map(|piece| piece.len).sum();
        let owners: Vec<_> = pieces.into_iter().filter_map(|piece| piece.owner).collect();
        Segments { owner: Some(Arc::new(owners)), parts, len }
    }

    /// No bytes at all: the memory of a flush or a discard.
    pub fn empty() -> Segments {
        Segments::default()
    }

    /// A new page-aligned buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Segments {
        Buffer::zeroed(len).segments(len)
    }

    /// A new page-aligned buffer that holds a copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Segments {
        let segments = Segments::zeroed(bytes.len());
        segments.copy_from(bytes);
        segments
    }

    /// `len` bytes of zero to write from, never to: all such lists share one small buffer, however large `len` is and
    /// however many of them there are.
    pub fn zeroes(len: usize) -> Segments {
        static ZEROES: LazyLock<Arc<Buffer>> = LazyLock::new(|| Buffer::zeroed(ZEROES_PART));
        let buffer = ZEROES.clone();
        let base = buffer.base();
        let mut parts = SmallVec::new();
        let mut left = len;
        while left > 0 {
            let part = left.min(ZEROES_PART);
            parts.push(Part { base, len: part });
            left -= part;
        }
        Segments { owner: Some(buffer), parts, len }
    }

    /// Bytes in all parts together.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is not a single byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this is all of a [`Buffer`] that nothing else refers to: no other list, and nothing that is still to be
    /// done with it. Not so for a list that was joined or cut, which keeps more alive than its own bytes.
    pub fn is_own_buffer(&mut self) -> bool {
        let owner = self.owner.as_mut().and_then(Arc::get_mut);
        owner.and_then(|owner| owner.downcast_ref::<Buffer>()).is_some_and(|buffer| buffer.capacity() == self.len)
    }

    /// The parts, none of them empty.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The guest address and length of each part; no address where it is not of one [`GuestMemory`].
    pub fn guest_ranges(&self) -> impl Iterator<Item = (Option<GuestAddr>, u64)> + '_ {
        let memory = self.owner.as_ref().and_then(|owner| (**owner).downcast_ref::<GuestMemory>());
        self.parts.iter().map(move |part| {
            let addr = memory.and_then(|memory| memory.addr_of(part.base));
            (addr, on_disk(part.len))
        })
    }

    /// Bytes `from..from + len` as a list of their own, which keeps the owner alive too.
    ///
    /// # Panics
    /// If the range does not lie inside the list.
    pub fn slice(&self, from: usize, len: usize) -> Segments {
        assert!(from.checked_add(len).is_some_and(|end| end <= self.len), "slice outside of segments");
        if from == 0 && len == self.len {
            return self.clone();
        }
        let mut parts = SmallVec::new();
        let mut skip = from;
        let mut left = len;
        for part in &self.parts {
            if left == 0 {
                break;
            }
            if skip >= part.len {
                skip -= part.len;
                continue;
            }
            let take = left.min(part.len - skip);
            // `wrapping_add` stays inside the part: skip < part.len.
            parts.push(Part { base: part.base.wrapping_add(skip), len: take });
            skip = 0;
            left -= take;
        }
        Segments { owner: self.owner.clone(), parts, len }
    }

    /// Whether every part begins at a multiple of `align` and has a length that is one.
    pub fn aligned_to(&self, align: usize) -> bool {
        self.parts.iter().all(|part| part.base.addr() % align == 0 && part.len % align == 0)
    }

    /// Sets every byte to zero.
    pub fn fill_zero(&self) {
        for part in &self.parts {
            // SAFETY: the part is writable while `self.owner` lives (contract of `new`).
            unsafe { part.base.write_bytes(0, part.len) };
        }
    }

    /// Copies `bytes` in.
    ///
    /// # Panics
    /// If `bytes` has another length than the list.
    pub fn copy_from(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "copy of another length");
        let mut rest = bytes;
        for part in &self.parts {
            let (now, later) = rest.split_at(part.len);
            // SAFETY: the part is writable while `self.owner` lives; `now` is a Rust slice and so not in it.
            unsafe { part.base.copy_from_nonoverlapping(now.as_ptr(), part.len) };
            rest = later;
        }
    }

    /// Copies the bytes out.
    ///
    /// # Panics
    /// If `bytes` has another length than the list.
    pub fn copy_to(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.len, "copy of another length");
        let mut rest = bytes;
        for part in &self.parts {
            let (now, later) = rest.split_at_mut(part.len);
            // SAFETY: the part is readable while `self.owner` lives; `now` is a Rust slice and so not in it.
            unsafe { part.base.copy_to_nonoverlapping(now.as_mut_ptr(), part.len) };
            rest = later;
        }
    }

    /// The bytes as a vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }

    /// Whether every byte is zero just now.
    pub fn is_zero(&self) -> bool {
        let mut chunk = [0u8; 4096];
        self.parts.iter().all(|part| {
            let mut at = 0;
            while at < part.len {
                let len = chunk.len().min(part.len - at);
                // SAFETY: `at + len` lies inside the part, readable while `self.owner` lives.
                unsafe { part.base.add(at).copy_to_nonoverlapping(chunk.as_mut_ptr(), len) };
                if chunk[..len].iter().any(|&byte| byte != 0) {
                    return false;
                }
                at += len;
            }
            true
        })
    }
}

/// Large enough that a block of 2 MiB is 32 parts, small enough to stay in cache.
const ZEROES_PART: usize = 64 << 10;

impl Clone for Segments {
    fn clone(&self) -> Segments {
        // Derived, it would copy the parts one by one.
        Segments { owner: self.owner.clone(), parts: SmallVec::from_slice(&self.parts), len: self.len }
    }
}

impl std::fmt::Debug for Segments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Segments({} bytes in {} parts)", self.len, self.parts.len())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn slice_crosses_parts() {
        let buffer = Buffer::zeroed(12);
        let base = buffer.base();
        // SAFETY: both parts lie in the buffer, which the list owns.
        let list = unsafe { Segments::new(buffer, [(base, 5), (base.wrapping_add(5), 7)]) };
        list.copy_from(b"hello, world");
        assert_eq!(list.slice(3, 5).to_vec(), b"lo, w");
        assert_eq!(list.slice(5, 7).parts().len(), 1);
        assert!(list.slice(12, 0).is_empty());
    }

    #[test]
    fn an_own_buffer_is_whole_and_not_shared() {
        let mut list = Segments::zeroed(8192);
        let mut slice = list.slice(4096, 4096);
        assert!(!list.is_own_buffer());
        assert!(!Segments::joined(vec![list.clone()]).is_own_buffer());
        drop(list);
        assert!(!slice.is_own_buffer());
        assert!(Segments::zeroed(8192).is_own_buffer());
        assert!(!Segments::joined(vec![Segments::zeroed(4096)]).is_own_buffer());
        assert!(!Segments::zeroes(4096).is_own_buffer());
        assert!(!Segments::empty().is_own_buffer());
    }

    #[test]
    fn joined_keeps_every_owner() {
        let list = Segments::joined(vec![Segments::copy_of(b"ab"), Segments::empty(), Segments::copy_of(b"cde")]);
        assert_eq!((list.len(), list.to_vec()), (5, b"abcde".to_vec()));
    }

    #[test]
    fn zeroes_shares_one_buffer() {
        let list = Segments::zeroes(3 * ZEROES_PART + 1);
        assert_eq!(list.len(), 3 * ZEROES_PART + 1);
        assert_eq!(list.parts().len(), 4);
        assert!(list.is_zero());
        assert_eq!(list.parts()[0].base(), Segments::zeroes(512).parts()[0].base());
    }

    #[test]
    #[should_panic(expected = "slice outside")]
    fn slice_past_the_end_panics() {
        Segments::zeroed(8).slice(4, 5);
    }
}
