//! A piece of memory that is shared with somebody who changes it meanwhile.
//!
//! Knows nothing of what is in it. Keeps: each access is checked against the piece, and reads or writes exactly once.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::Mapping;

/// A piece of memory that a guest and we use at once: a ring. Each access is checked against the piece and
/// reads or writes exactly once.
pub struct Shared {
    #[allow(dead_code, reason = "held for its mappings")]
    owner: Arc<dyn Any + Send + Sync>,
    base: *mut u8,
    len: usize,
}

// SAFETY: an address and what keeps it mapped; every access is an atomic or a volatile copy.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// The piece of `len` bytes from `base` on.
    ///
    /// # Safety
    /// They must be readable and writable for as long as `owner` lives.
    pub unsafe fn new(owner: Arc<dyn Any + Send + Sync>, base: *mut u8, len: usize) -> Shared {
        Shared { owner, base, len }
    }

    /// All of a mapping that can be written.
    pub fn of(mapping: Mapping) -> Shared {
        let (base, len) = (mapping.base(), mapping.len());
        // SAFETY: the whole mapping, which the value holds. That it is not written to where it cannot be is the caller's to
        // keep, and a fault, not a corruption, if it is not.
        unsafe { Shared::new(Arc::new(mapping), base, len) }
    }

    /// Bytes in the piece.
    #[allow(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    fn at(&self, at: usize, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        (end <= self.len).then(|| self.base.wrapping_add(at))
    }

    fn u16_at(&self, at: usize) -> Option<&AtomicU16> {
        let address = self.at(at, 2)?;
        // SAFETY: the two bytes lie in the piece, mapped while `owner` lives, and are aligned as checked
        // here; an atomic tolerates any concurrent access of the guest.
        (address.addr() % 2 == 0).then(|| unsafe { AtomicU16::from_ptr(address.cast()) })
    }

    fn u32_at(&self, at: usize) -> Option<&AtomicU32> {
        let address = self.at(at, 4)?;
        // SAFETY: the four bytes lie in the piece, mapped while `owner` lives, and are aligned as checked
        // here; an atomic tolerates any concurrent access of the guest.
        (address.addr() % 4 == 0).then(|| unsafe { AtomicU32::from_ptr(address.cast()) })
    }

    fn u64_at(&self, at: usize) -> Option<&AtomicU64> {
        let address = self.at(at, 8)?;
        // SAFETY: the eight bytes lie in the piece, mapped while `owner` lives, and are aligned as checked
        // here; an atomic tolerates any concurrent access.
        (address.addr() % 8 == 0).then(|| unsafe { AtomicU64::from_ptr(address.cast()) })
    }

    /// Stores a 64-bit number as this machine has it, for a reader on it that must not see half of one.
    pub fn store_u64_native(&self, at: usize, value: u64) -> Option<()> {
        self.u64_at(at).map(|place| place.store(value, Ordering::Relaxed))
    }

    /// Loads a little-endian 32-bit number; what the peer wrote before it stored the number is visible after.
    pub fn load_u32(&self, at: usize) -> Option<u32> {
        self.u32_at(at).map(|value| u32::from_le(value.load(Ordering::Acquire)))
    }

    /// Stores a little-endian 32-bit number; what was written before is visible to a peer that sees it.
    pub fn store_u32(&self, at: usize, value: u32) -> Option<()> {
        self.u32_at(at).map(|place| place.store(value.to_le(), Ordering::Release))
    }

    /// Loads a little-endian 16-bit number; what the peer wrote before it stored the number is visible after.
    pub fn load_u16(&self, at: usize) -> Option<u16> {
        self.u16_at(at).map(|value| u16::from_le(value.load(Ordering::Acquire)))
    }

    /// Stores a little-endian 16-bit number; what was written before is visible to a peer that sees it.
    pub fn store_u16(&self, at: usize, value: u16) -> Option<()> {
        self.u16_at(at).map(|place| place.store(value.to_le(), Ordering::Release))
    }

    /// Copies `N` bytes out, each read once.
    pub fn read<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let address = self.at(at, N)?;
        if N % 8 != 0 || address.addr() % 8 != 0 {
            // SAFETY: the bytes lie in the piece; `[u8; N]` has no alignment and no invalid value.
            return Some(unsafe { address.cast::<[u8; N]>().read_volatile() });
        }
        // A volatile read of bytes is compiled to one load a byte; a descriptor is two words.
        let mut bytes = [0; N];
        for (word, place) in bytes.chunks_exact_mut(8).enumerate() {
            // SAFETY: the word lies in the piece, since N is a multiple of eight, and is aligned.
            let value = unsafe { address.cast::<u64>().add(word).read_volatile() };
            place.copy_from_slice(&value.to_ne_bytes());
        }
        Some(bytes)
    }

    /// Copies `N` bytes in.
    pub fn write<const N: usize>(&self, at: usize, bytes: [u8; N]) -> Option<()> {
        let address = self.at(at, N)?;
        // SAFETY: the bytes lie in the piece; `[u8; N]` has no alignment.
        unsafe { address.cast::<[u8; N]>().write_volatile(bytes) };
        Some(())
    }

    /// Copies bytes out to where they are wanted, each read once.
    pub fn read_into(&self, at: usize, bytes: &mut [u8]) -> Option<()> {
        let from = self.at(at, bytes.len())?;
        // SAFETY: as many bytes lie in the piece, and the slice is ours alone.
        unsafe { copy_once(from, bytes.as_mut_ptr(), bytes.len()) };
        Some(())
    }

    /// Copies bytes in from where they are, each written once.
    pub fn write_from(&self, at: usize, bytes: &[u8]) -> Option<()> {
        let to = self.at(at, bytes.len())?;
        // SAFETY: as many bytes lie in the piece, which is no memory of Rust's.
        unsafe { copy_once(bytes.as_ptr(), to, bytes.len()) };
        Some(())
    }
}

/// Copies bytes between memory of ours and a piece, each accessed once and in words where both ends allow it: a ring's entry
/// is 14 of them. Not inlined: taken apart byte by byte at its caller's it is ten times as long.
///
/// # Safety
/// `len` bytes can be read at `from` and written at `to`, and do not overlap.
#[inline(never)]
unsafe fn copy_once(from: *const u8, to: *mut u8, len: usize) {
    let aligned = |to: usize| from.addr() % to == 0;
    let mut done = 0;
    if aligned(8) && to.addr() % 8 == 0 {
        while len - done >= 8 {
            // SAFETY: the word lies in both, as the caller says, and is aligned.
            unsafe { to.add(done).cast::<u64>().write_volatile(from.add(done).cast::<u64>().read_volatile()) };
            done += 8;
        }
    }
    if aligned(4) && to.addr() % 4 == 0 {
        while len - done >= 4 {
            // SAFETY: as above.
            unsafe { to.add(done).cast::<u32>().write_volatile(from.add(done).cast::<u32>().read_volatile()) };
            done += 4;
        }
    }
    while done < len {
        // SAFETY: as above; a byte is always aligned.
        unsafe { to.add(done).write_volatile(from.add(done).read_volatile()) };
        done += 1;
    }
}
