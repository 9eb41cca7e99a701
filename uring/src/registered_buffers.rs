//! Buffers registered with io_uring, so that transfers need not look up their pages each time.
//!
//! The table is created with the first buffer, with empty slots (Linux 5.13).
//!
//! Invariant: a buffer lives as long as it is registered. The kernel itself keeps the pages for transfers in flight.

use std::io;
use std::sync::Arc;

use io_uring::IoUring;
use memory::{Buffer, Part};

/// Size of the table.
pub(crate) const SLOTS: usize = 40;

/// An empty slot.
const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// The buffers registered with one ring.
#[derive(Default)]
pub(crate) struct RegisteredBuffers {
    /// Up to the last slot that was ever used.
    slots: Vec<Option<Arc<Buffer>>>,
    /// The table exists in the kernel.
    created: bool,
}

impl RegisteredBuffers {
    /// Registers a buffer.
    pub(crate) fn add(&mut self, ring: &IoUring, buffer: Arc<Buffer>) -> io::Result<()> {
        if !self.created {
            // SAFETY: the table is empty.
            unsafe { ring.submitter().register_buffers(&[EMPTY; SLOTS]) }?;
            self.created = true;
        }
        if self.slots.len() < SLOTS && self.slots.iter().all(Option::is_some) {
            self.slots.push(None);
        }
        let free = self.slots.iter_mut().zip(0..).find(|(slot, _)| slot.is_none());
        let (slot, number) = free.ok_or(io::ErrorKind::StorageFull)?;
        update(ring, number, libc::iovec { iov_base: buffer.base().cast(), iov_len: buffer.capacity() })?;
        *slot = Some(buffer);
        Ok(())
    }

    /// Unregisters a buffer.
    pub(crate) fn remove(&mut self, ring: &IoUring, buffer: &Arc<Buffer>) -> io::Result<()> {
        let known = |slot: &Option<Arc<Buffer>>| slot.as_ref().is_some_and(|known| Arc::ptr_eq(known, buffer));
        if let Some((slot, number)) = self.slots.iter_mut().zip(0..).find(|(slot, _)| known(slot)) {
            update(ring, number, EMPTY)?;
            *slot = None;
        }
        Ok(())
    }

    /// The registered buffers.
    pub(crate) fn all(&self) -> Vec<Arc<Buffer>> {
        self.slots.iter().flatten().cloned().collect()
    }

    /// The index of the buffer that contains a part.
    pub(crate) fn index_of(&self, part: &Part) -> Option<u16> {
        let slot = self.slots.iter().position(|slot| slot.as_ref().is_some_and(|buffer| contains(buffer, part)))?;
        u16::try_from(slot).ok()
    }
}

fn update(ring: &IoUring, number: u32, part: libc::iovec) -> io::Result<()> {
    // SAFETY: a buffer is kept until it is unregistered (`RegisteredBuffers::remove`), or the ring is gone (`Uring`
    // drops it first).
    unsafe { ring.submitter().register_buffers_update(number, &[part], None) }
}

fn contains(buffer: &Buffer, part: &Part) -> bool {
    let from = part.base().addr().wrapping_sub(buffer.base().addr());
    from < buffer.capacity() && part.len() <= buffer.capacity() - from
}
