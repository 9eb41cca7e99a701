//! Memory shared with a peer that may change it at any time.
//!
//! It knows nothing about its contents. Invariant: each access is bounds-checked, and reads or writes exactly once.

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::Mapping;

/// A range of memory used by a guest and us at the same time: a ring. Each access is bounds-checked and reads or writes
/// exactly once. Clones refer to the same range.
#[derive(Clone)]
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
    /// The range of `len` bytes starting at `base`.
    ///
    /// # Safety
    /// They must be readable and writable for as long as `owner` lives.
    pub unsafe fn new(owner: Arc<dyn Any + Send + Sync>, base: *mut u8, len: usize) -> Shared {
        Shared { owner, base, len }
    }

    /// All of a writable mapping.
    pub fn of(mapping: Mapping) -> Shared {
        Shared::of_held(Arc::new(mapping))
    }

    /// The same of one that others hold too.
    pub fn of_held(mapping: Arc<Mapping>) -> Shared {
        let (base, len) = (mapping.base(), mapping.len());
        // SAFETY: the whole mapping, which the value holds. Not writing to a read-only one is up to the caller, and a
        // violation is a fault, not corruption.
        unsafe { Shared::new(mapping, base, len) }
    }

    /// `count` zero words of this process's own memory, shared by the clones of the value.
    pub fn of_words(count: usize) -> Shared {
        let words: Arc<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
        let base = words.as_ptr().cast_mut().cast();
        // SAFETY: all of the words, which may be written to through a shared reference, and which the value holds.
        unsafe { Shared::new(Arc::new(words), base, 8 * count) }
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "no caller needs it")]
    pub fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    fn at(&self, at: usize, len: usize) -> Option<*mut u8> {
        let end = at.checked_add(len)?;
        (end <= self.len).then(|| self.base.wrapping_add(at))
    }

    fn u16_at<R>(&self, at: usize, act: impl FnOnce(&AtomicU16) -> R) -> Option<R> {
        let address = self.at(at, 2)?;
        // SAFETY: the two bytes lie in the piece, mapped while `owner` lives, and are aligned as checked
        // here; an atomic tolerates any concurrent access of the guest.
        (address.addr() % 2 == 0).then(|| act(unsafe { AtomicU16::from_ptr(address.cast()) }))
    }

    fn u32_at<R>(&self, at: usize, act: impl FnOnce(&AtomicU32) -> R) -> Option<R> {
        let address = self.at(at, 4)?;
        // SAFETY: the four bytes lie in the piece, mapped while `owner` lives, and are aligned as checked
        // here; an atomic tolerates any concurrent access of the guest.
        (address.addr() % 4 == 0).then(|| act(unsafe { AtomicU32::from_ptr(address.cast()) }))
    }

    #[inline(always)]
    fn u64_at<R>(&self, at: usize, act: impl FnOnce(&AtomicU64) -> R) -> Option<R> {
        let address = self.at(at, 8)?;
        // SAFETY: the eight bytes lie in the piece, mapped while `owner` lives, and are aligned as checked
        // here; an atomic tolerates any concurrent access.
        (address.addr() % 8 == 0).then(|| act(unsafe { AtomicU64::from_ptr(address.cast()) }))
    }

    /// Stores a 64-bit number in native byte order, without tearing.
    #[inline(always)]
    pub fn store_u64_native(&self, at: usize, value: u64) -> Option<()> {
        self.u64_at(at, |place| place.store(value, Ordering::Relaxed))
    }

    /// Loads a 64-bit number in native byte order; writes before it was published are visible afterwards.
    pub fn load_u64_native(&self, at: usize) -> Option<u64> {
        self.u64_at(at, |place| place.load(Ordering::Acquire))
    }

    /// Stores a 64-bit number in native byte order; earlier writes are visible to readers that load it.
    pub fn publish_u64_native(&self, at: usize, value: u64) -> Option<()> {
        self.u64_at(at, |place| place.store(value, Ordering::Release))
    }

    /// Adds to a 64-bit number in native byte order of which this is the only writer: readers never see a torn one.
    #[inline(always)]
    pub fn add_u64_native(&self, at: usize, more: u64) -> Option<()> {
        self.u64_at(at, |place| place.store(place.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed))
    }

    /// Stores a 64-bit number in native byte order where another one is, and nothing where that is not; whether it did.
    pub fn exchange_u64_native(&self, at: usize, old: u64, new: u64) -> Option<bool> {
        let exchange = |place: &AtomicU64| place.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        self.u64_at(at, |place| exchange(place).is_ok())
    }

    /// Loads a little-endian 32-bit number; what the peer wrote before it stored the number is visible after.
    pub fn load_u32(&self, at: usize) -> Option<u32> {
        self.u32_at(at, |value| u32::from_le(value.load(Ordering::Acquire)))
    }

    /// Stores a little-endian 32-bit number; what was written before is visible to a peer that sees it.
    pub fn store_u32(&self, at: usize, value: u32) -> Option<()> {
        self.u32_at(at, |place| place.store(value.to_le(), Ordering::Release))
    }

    /// Loads a little-endian 16-bit number; what the peer wrote before it stored the number is visible after.
    pub fn load_u16(&self, at: usize) -> Option<u16> {
        self.u16_at(at, |value| u16::from_le(value.load(Ordering::Acquire)))
    }

    /// Stores a little-endian 16-bit number; what was written before is visible to a peer that sees it.
    pub fn store_u16(&self, at: usize, value: u16) -> Option<()> {
        self.u16_at(at, |place| place.store(value.to_le(), Ordering::Release))
    }

    /// Sets bits of a byte at once, so that no bit which another sets or clears meanwhile is lost. What was written
    /// before is visible to a peer that sees the bits.
    #[inline]
    pub fn or_u8(&self, at: usize, bits: u8) -> Option<()> {
        let address = self.at(at, 1)?;
        // SAFETY: the byte lies in the piece, mapped while `owner` lives; a byte is always aligned, and an atomic
        // tolerates any concurrent access of the peer.
        let place = unsafe { AtomicU8::from_ptr(address) };
        place.fetch_or(bits, Ordering::SeqCst);
        Some(())
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

    /// Copies out sixteen bytes as one little-endian number, each byte read once. Extracting fields from a number costs
    /// a few instructions; from bytes the compiler assembles them one by one.
    #[inline]
    pub fn read_u128(&self, at: usize) -> Option<u128> {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        {
            let address = self.at(at, 16)?;
            let (low, high): (u64, u64);
            // Some drivers put their headers anywhere, and a volatile read of what is not aligned is one of each byte.
            // SAFETY: the bytes lie in the piece, mapped while `owner` lives. The processor loads words from anywhere;
            // these two are loaded once, and whatever the guest writes meanwhile is a valid number.
            unsafe {
                std::arch::asm!(
                    "mov {low}, qword ptr [{at}]",
                    "mov {high}, qword ptr [{at} + 8]",
                    at = in(reg) address,
                    low = out(reg) low,
                    high = lateout(reg) high,
                    options(nostack, preserves_flags, readonly),
                );
            }
            Some(u128::from(low) | u128::from(high) << 64)
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        match self.window::<16, 8>(at) {
            Some(both) => Some(u128::from(both.load_u64(0)?) | u128::from(both.load_u64(8)?) << 64),
            None => self.read(at).map(u128::from_le_bytes),
        }
    }

    /// Has the processor fetch the line around `at`, to be read soon: the peer wrote it, so it is in another cache.
    #[inline]
    pub fn prefetch(&self, at: usize) {
        let Some(address) = self.at(at, 1) else { return };
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which reads nothing; the address lies in the piece all the same.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = address;
    }

    /// Copies `N` bytes in.
    pub fn write<const N: usize>(&self, at: usize, bytes: [u8; N]) -> Option<()> {
        let address = self.at(at, N)?;
        // SAFETY: the bytes lie in the piece; `[u8; N]` has no alignment.
        unsafe { address.cast::<[u8; N]>().write_volatile(bytes) };
        Some(())
    }

    /// `LEN` bytes starting at `at`, aligned to `ALIGN`: 4 or 8.
    #[inline]
    pub fn window<const LEN: usize, const ALIGN: usize>(&self, at: usize) -> Option<Window<'_, LEN, ALIGN>> {
        const { assert!(ALIGN == 4 || ALIGN == 8) };
        let base = self.at(at, LEN)?;
        (base.addr() % ALIGN == 0).then_some(Window { base, piece: PhantomData })
    }
}

/// A bounds-checked part of a range. The offset of an access within it is usually known at compile time, so that its
/// check costs nothing.
#[derive(Clone, Copy)]
pub struct Window<'a, const LEN: usize, const ALIGN: usize> {
    base: *mut u8,
    piece: PhantomData<&'a Shared>,
}

impl<const LEN: usize, const ALIGN: usize> Window<'_, LEN, ALIGN> {
    #[inline(always)]
    fn u32_at<R>(&self, at: usize, act: impl FnOnce(&AtomicU32) -> R) -> Option<R> {
        let inside = at % 4 == 0 && at <= LEN.saturating_sub(4) && LEN >= 4;
        // SAFETY: the four bytes are within the window, and so in a range that is mapped while it is borrowed; they are
        // aligned, as the window is. An atomic tolerates any concurrent access of the guest.
        inside.then(|| act(unsafe { AtomicU32::from_ptr(self.base.add(at).cast()) }))
    }

    #[inline(always)]
    fn u64_at<R>(&self, at: usize, act: impl FnOnce(&AtomicU64) -> R) -> Option<R> {
        let inside = ALIGN == 8 && at % 8 == 0 && at <= LEN.saturating_sub(8) && LEN >= 8;
        // SAFETY: as above, with eight bytes.
        inside.then(|| act(unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) }))
    }

    /// As [`Shared::load_u32`].
    #[inline(always)]
    pub fn load_u32(&self, at: usize) -> Option<u32> {
        self.u32_at(at, |value| u32::from_le(value.load(Ordering::Acquire)))
    }

    /// As [`Shared::store_u32`].
    #[inline(always)]
    pub fn store_u32(&self, at: usize, value: u32) -> Option<()> {
        self.u32_at(at, |place| place.store(value.to_le(), Ordering::Release))
    }

    /// Loads a little-endian 64-bit number; in two halves if it cannot be loaded at once.
    #[inline(always)]
    pub fn load_u64(&self, at: usize) -> Option<u64> {
        if let Some(value) = self.load_u64_native(at) {
            return Some(u64::from_le(value));
        }
        let (low, high) = (self.load_u32(at)?, self.load_u32(at.checked_add(4)?)?);
        Some(u64::from(low) | u64::from(high) << 32)
    }

    /// As [`Shared::load_u64_native`].
    #[inline(always)]
    pub fn load_u64_native(&self, at: usize) -> Option<u64> {
        self.u64_at(at, |place| place.load(Ordering::Acquire))
    }

    /// As [`Shared::store_u64_native`], in the order of the stores.
    #[inline(always)]
    pub fn store_u64_native(&self, at: usize, value: u64) -> Option<()> {
        self.u64_at(at, |place| place.store(value, Ordering::Release))
    }

    /// As [`Shared::add_u64_native`].
    #[inline(always)]
    pub fn add_u64_native(&self, at: usize, more: u64) -> Option<()> {
        self.u64_at(at, |place| place.store(place.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed))
    }

    /// Stores a little-endian 64-bit number; first the low half, then the high one, if it cannot be stored at once.
    #[inline(always)]
    pub fn store_u64(&self, at: usize, value: u64) -> Option<()> {
        if self.store_u64_native(at, value.to_le()).is_some() {
            return Some(());
        }
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        let high = at.checked_add(4)?;
        // All of it or nothing.
        self.u32_at(high, |_| ())?;
        self.store_u32(at, u32::from_le_bytes([a, b, c, d]))?;
        self.store_u32(high, u32::from_le_bytes([e, f, g, h]))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const WORD: u64 = 0x0807_0605_0403_0201;

    fn piece() -> Shared {
        Shared::of(Mapping::anonymous(4096).unwrap())
    }

    #[test]
    fn numbers_are_their_bytes_at_every_multiple_of_four() {
        for at in [0, 4, 8, 20] {
            let piece = piece();
            piece.window::<32, 8>(64).unwrap().store_u64(at, WORD).unwrap();
            piece.window::<32, 4>(164).unwrap().store_u64(at, WORD).unwrap();
            for base in [64, 164] {
                assert_eq!(piece.read::<8>(base + at), Some([1, 2, 3, 4, 5, 6, 7, 8]), "{base} and {at}");
                assert_eq!(piece.read::<8>(base + at + 8), Some([0; 8]), "{base} and {at}");
            }
            assert_eq!(piece.window::<32, 8>(64).unwrap().load_u64(at), Some(WORD));
            let narrow = piece.window::<32, 4>(164).unwrap();
            assert_eq!((narrow.load_u64(at), narrow.load_u32(at + 4)), (Some(WORD), Some(0x0807_0605)));
        }
    }

    #[test]
    fn a_number_is_exchanged_only_for_the_one_that_is_there() {
        let piece = piece();
        assert_eq!(piece.exchange_u64_native(8, 0, 5), Some(true));
        assert_eq!((piece.exchange_u64_native(8, 0, 6), piece.load_u64_native(8)), (Some(false), Some(5)));
        assert_eq!((piece.exchange_u64_native(4, 0, 6), piece.exchange_u64_native(4096, 0, 6)), (None, None));
    }

    #[test]
    fn sixteen_bytes_are_read_as_a_number_at_any_alignment() {
        let piece = piece();
        let bytes: [u8; 16] = std::array::from_fn(|index| u8::try_from(index).unwrap() + 1);
        for at in [0, 8, 68, 129, 4080] {
            piece.write(at, bytes).unwrap();
            assert_eq!(piece.read_u128(at), Some(u128::from_le_bytes(bytes)), "{at}");
        }
        for at in [4081, 4088, 4096, usize::MAX - 15, usize::MAX - 7] {
            assert_eq!(piece.read_u128(at), None, "{at}");
        }
    }

    #[test]
    fn a_window_must_be_in_bounds_and_aligned() {
        let piece = piece();
        assert!(piece.window::<16, 8>(4080).is_some() && piece.window::<16, 4>(4076).is_some());
        for at in [4084, 4088, 4096, usize::MAX - 7, usize::MAX - 15] {
            assert!(piece.window::<16, 4>(at).is_none() && piece.window::<16, 8>(at).is_none(), "{at}");
        }
        assert!(piece.window::<16, 8>(4).is_none() && piece.window::<16, 4>(2).is_none());
    }

    #[test]
    fn an_access_must_be_within_its_window_and_aligned() {
        let piece = piece();
        let window = piece.window::<16, 8>(0).unwrap();
        assert_eq!((window.load_u32(12), window.load_u64(8)), (Some(0), Some(0)));
        for at in [16, 13, 2, usize::MAX - 3] {
            assert_eq!((window.load_u32(at), window.store_u32(at, 1)), (None, None), "{at}");
        }
        for at in [12, 9, 2, usize::MAX - 3, usize::MAX - 7] {
            assert_eq!((window.load_u64(at), window.store_u64(at, 1)), (None, None), "{at}");
        }
        assert_eq!(piece.read::<32>(0), Some([0; 32]), "a refused access must write nothing");
    }
}
