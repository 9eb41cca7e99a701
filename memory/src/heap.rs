//! The heap of this process, whose allocator keeps freed memory until it is trimmed.

/// Returns pages without live allocations to the kernel. It scans the whole heap, so it should not be called often.
pub fn give_back_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it works on the allocator's free memory, under the allocator's own locks, and moves nothing in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
