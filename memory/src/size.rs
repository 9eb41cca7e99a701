//! Lengths on a disk as lengths in memory, and back. Both have 64 bits wherever this is built.

const _: () = assert!(usize::BITS == u64::BITS, "a length on a disk must be one in memory too");

/// A length in memory.
pub fn in_memory(len: u64) -> usize {
    let Ok(len) = usize::try_from(len) else { unreachable!("checked when this was compiled") };
    len
}

/// A length on a disk.
pub fn on_disk(len: usize) -> u64 {
    let Ok(len) = u64::try_from(len) else { unreachable!("checked when this was compiled") };
    len
}
