//! On which NUMA node the kernel puts new memory of this process.

use std::io;

/// From `linux/mempolicy.h`.
const MPOL_PREFERRED: libc::c_long = 1;

/// Nodes have smaller numbers than this: as many as one call names here, and more than any machine has.
pub const NUMA_NODES_MAX: u32 = 1024;

/// Words of the set of nodes.
const WORDS: usize = 16;

/// Prefers the memory of this node for all that this thread, and threads and processes that it starts from now on,
/// touch for the first time; where it is full, other nodes'. To be called before there is much of it: what is there
/// stays where it is.
pub fn prefer_numa_node(node: u32) -> io::Result<()> {
    let mut nodes = [0u64; WORDS];
    let word = usize::try_from(node / 64).ok().and_then(|word| nodes.get_mut(word));
    let Some(word) = word else { return Err(io::ErrorKind::InvalidInput.into()) };
    *word = 1 << (node % 64);
    // The kernel takes one bit less than it is given.
    let bits = libc::c_ulong::from(NUMA_NODES_MAX) + 1;
    // SAFETY: the kernel reads the words, which hold as many bits as it uses, and writes nothing.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, nodes.as_ptr(), bits) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_node_that_no_machine_has_is_refused() {
        assert_eq!(prefer_numa_node(NUMA_NODES_MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        // Not there, or no NUMA, or a container that may not: an error in any case.
        assert!(prefer_numa_node(NUMA_NODES_MAX - 1).is_err());
    }
}
