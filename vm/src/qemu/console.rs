//! The connections to a guest: its console and the port at which it says what its disks do. Both are sockets in its
//! machine's directory.
//!
//! It knows nothing about what is written there. Invariant: what is connected to is the machine's own QEMU, whatever
//! its user has put in the socket's place.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;

use crate::socket;

/// The name of the console's socket.
pub const CONSOLE: &str = "console";

/// The name of the socket of the port for `tapline-guest`.
pub const GUEST_PORT: &str = "guest";

/// Connects to a socket in the directory of the machine of the QEMU with this pid, as [`connect_to`].
pub(super) fn connect(directory: &Path, name: &str, pid: i32) -> Option<UnixStream> {
    connect_to(&directory.join(name), pid)
}

/// Connects to a socket of the QEMU with this pid, without blocking; `None` if it is not its socket, or if another
/// program is connected to it and one more waits.
pub fn connect_to(path: &Path, pid: i32) -> Option<UnixStream> {
    let connected = || {
        let socket = socket::connect(path, Instant::now())?;
        let listener = socket_peercred(&socket)?.pid.as_raw_nonzero().get();
        Ok::<_, Errno>((listener == pid).then_some(socket))
    };
    connected().ok().flatten()
}

#[cfg(test)]
mod test {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_the_socket_of_the_process_itself_is_connected_to() {
        let room = tempfile::tempdir().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(connect(room.path(), CONSOLE, own).is_none());
        let listener = UnixListener::bind(room.path().join(CONSOLE)).unwrap();
        assert!(connect(room.path(), CONSOLE, own).is_some());
        assert!(connect(room.path(), CONSOLE, 1).is_none());
        drop(listener);
        assert!(connect(room.path(), CONSOLE, own).is_none());
    }
}
