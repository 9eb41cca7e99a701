//! Memory whose pages the kernel keeps at hand: transfers from and to it need not look them up each time.
//!
//! The table is made with the first buffer, of empty places (Linux 5.13).
//!
//! Invariant: a buffer lives as long as the ring knows it. The kernel itself keeps the pages for the transfers that it has.

use std::io;
use std::sync::Arc;

use io_uring::IoUring;
use memory::{Buffer, Part};

/// Places of the table.
pub(crate) const PLACES: usize = 40;

/// A place without a buffer.
const NOTHING: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// The buffers that one ring knows.
#[derive(Default)]
pub(crate) struct Registered {
    /// Up to the last that was ever used.
    places: Vec<Option<Arc<Buffer>>>,
    /// The kernel has the table.
    made: bool,
}

impl Registered {
    /// Tells the ring of a buffer.
    pub(crate) fn add(&mut self, ring: &IoUring, buffer: Arc<Buffer>) -> io::Result<()> {
        if !self.made {
            // SAFETY: nothing is in the table.
            unsafe { ring.submitter().register_buffers(&[NOTHING; PLACES]) }?;
            self.made = true;
        }
        if self.places.len() < PLACES && self.places.iter().all(Option::is_some) {
            self.places.push(None);
        }
        let vacant = self.places.iter_mut().zip(0..).find(|(place, _)| place.is_none());
        let (place, number) = vacant.ok_or(io::ErrorKind::StorageFull)?;
        put(ring, number, libc::iovec { iov_base: buffer.base().cast(), iov_len: buffer.capacity() })?;
        *place = Some(buffer);
        Ok(())
    }

    /// Has the ring forget a buffer.
    pub(crate) fn remove(&mut self, ring: &IoUring, buffer: &Arc<Buffer>) -> io::Result<()> {
        let known = |place: &Option<Arc<Buffer>>| place.as_ref().is_some_and(|known| Arc::ptr_eq(known, buffer));
        if let Some((place, number)) = self.places.iter_mut().zip(0..).find(|(place, _)| known(place)) {
            put(ring, number, NOTHING)?;
            *place = None;
        }
        Ok(())
    }

    /// The number of the buffer that a part lies in.
    pub(crate) fn place_of(&self, part: &Part) -> Option<u16> {
        let place = self.places.iter().position(|place| place.as_ref().is_some_and(|buffer| holds(buffer, part)))?;
        u16::try_from(place).ok()
    }
}

fn put(ring: &IoUring, number: u32, part: libc::iovec) -> io::Result<()> {
    // SAFETY: a buffer is kept until the ring has forgotten it (`Registered::remove`), or is gone (`Uring` drops it first).
    unsafe { ring.submitter().register_buffers_update(number, &[part], None) }
}

fn holds(buffer: &Buffer, part: &Part) -> bool {
    let from = part.base().addr().wrapping_sub(buffer.base().addr());
    from < buffer.capacity() && part.len() <= buffer.capacity().saturating_sub(from)
}
