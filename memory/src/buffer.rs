//! A page-aligned buffer of our own, for metadata, bounces and the bytes of a socket.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::Segments;

/// The alignment of every [`Buffer`]: enough for O_DIRECT on any storage.
pub const PAGE: usize = 4096;

/// Zeroed, page-aligned bytes on the heap. Shared between a holder and the operation that uses it, hence
/// accessed by copies only, as guest memory is.
pub struct Buffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the bytes belong to the buffer alone and are only accessed by copies through `Segments`.
unsafe impl Send for Buffer {}
// SAFETY: as above; no method hands out a reference to the bytes.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of at least `len` zero bytes; its true size is a multiple of [`PAGE`].
    pub fn zeroed(len: usize) -> Arc<Buffer> {
        let size = len.max(1).next_multiple_of(PAGE);
        let layout = match Layout::from_size_align(size, PAGE) {
            Ok(layout) => layout,
            Err(_) => panic!("a buffer of {len} bytes is larger than the address space"),
        };
        // SAFETY: the layout has a size of at least one page.
        let base = unsafe { alloc_zeroed(layout) };
        match NonNull::new(base) {
            Some(base) => Arc::new(Buffer { base, layout }),
            None => handle_alloc_error(layout),
        }
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes that may be used: at least the requested length.
    pub fn capacity(&self) -> usize {
        self.layout.size()
    }

    /// The first `len` bytes as a list that keeps the buffer alive.
    ///
    /// # Panics
    /// If `len` is more than the capacity.
    pub fn segments(self: &Arc<Self>, len: usize) -> Segments {
        self.range(0, len)
    }

    /// `len` bytes from `at` on as a list that keeps the buffer alive.
    ///
    /// # Panics
    /// If they do not lie in the buffer.
    pub fn range(self: &Arc<Self>, at: usize, len: usize) -> Segments {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.capacity()), "more segments than buffer");
        // SAFETY: the range lies in the buffer, which the list owns.
        unsafe { Segments::new(self.clone(), [(self.base().wrapping_add(at), len)]) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout, freed once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
