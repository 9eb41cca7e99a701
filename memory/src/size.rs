//! Lengths on a disk as lengths in memory, and back: both have 64 bits wherever this is built. And numbers in the
//! narrower fields of a format.

const _: () = assert!(usize::BITS == u64::BITS, "a length on a disk must be one in memory too");

/// A length in memory.
#[inline(always)]
pub fn in_memory(len: u64) -> usize {
    let Ok(len) = usize::try_from(len) else { unreachable!("checked when this was compiled") };
    len
}

/// A length on a disk.
#[inline(always)]
pub fn on_disk(len: usize) -> u64 {
    let Ok(len) = u64::try_from(len) else { unreachable!("checked when this was compiled") };
    len
}

/// A number as a field of 32 bits holds it. `limit` is what keeps it that small.
#[inline(always)]
pub fn in_32_bits(number: u64, limit: &str) -> u32 {
    let Ok(narrow) = u32::try_from(number) else { unreachable!("{number} exceeds {limit}") };
    narrow
}
