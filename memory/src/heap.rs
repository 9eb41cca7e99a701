//! The heap of this process, which keeps for itself what was freed, until it is told that it need not.

/// Gives the pages back to the kernel that hold nothing any more. It takes a look at all of the heap: not to be called
/// often.
pub fn give_back_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it works on what the allocator keeps for itself, under the allocator's own locks, and moves nothing in
    // use.
    unsafe {
        libc::malloc_trim(0);
    }
}
