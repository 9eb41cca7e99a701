//! Signals the front-end or the driver through eventfds and pipes.
//!
//! It knows nothing about when that is done. Invariant: signalling never blocks.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

use super::kill_point;
use super::refusal::Refusal;

/// Signals an eventfd or pipe, if there is one. It does not block (see `signal_fd`).
pub fn signal(fd: Option<&OwnedFd>) {
    if let Some(fd) = fd.filter(|_| kill_point::is_alive()) {
        // Fails only if it is signalled already, or if the other end is closed and needs no signal.
        rustix::io::write(fd, &1u64.to_ne_bytes()).ok();
    }
}

/// Prepares the descriptor of a queue for [`signal`]: only an eventfd or a pipe is accepted (writing to a file may wait
/// for the server of its file system), and made non-blocking, as QEMU, Cloud Hypervisor and `blkio` do themselves.
pub fn vring_fd(queue: u32, fd: OwnedFd) -> Result<OwnedFd, Refusal> {
    signal_fd(fd, |source| Refusal::Fd { queue, source })?.ok_or(Refusal::NotSignal(queue))
}

/// Prepares a descriptor for [`signal`]; `None` if it is neither an eventfd nor a pipe.
pub fn signal_fd(fd: OwnedFd, failed: impl Fn(std::io::Error) -> Refusal) -> Result<Option<OwnedFd>, Refusal> {
    let failed = |errno: rustix::io::Errno| failed(errno.into());
    let mode = fstat(&fd).map_err(failed)?.st_mode;
    // An eventfd is an anonymous inode, which has no file type at all.
    match FileType::from_raw_mode(mode) {
        FileType::Unknown | FileType::Fifo => {}
        _ => return Ok(None),
    }
    let flags = fcntl_getfl(&fd).map_err(failed)?;
    fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(failed)?;
    Ok(Some(fd))
}
