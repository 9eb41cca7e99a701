//! Connects to a Unix socket in bounded time, even if its queue is full; the standard library would wait forever.
//!
//! It knows nothing about what is sent.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_socket, socket_with};

/// A socket whose queue is full is tried again so soon.
const AGAIN: Duration = Duration::from_millis(10);

/// A connection, which does not block. [`Errno::AGAIN`]: the queue was full until the deadline.
pub fn connect(path: &Path, deadline: Instant) -> Result<UnixStream, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match connect_socket(&socket, &address) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            Err(Errno::AGAIN) if Instant::now() < deadline => thread::sleep(AGAIN),
            Err(error) => return Err(error),
        }
    }
}
