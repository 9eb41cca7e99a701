//! Listens at a path, replacing a Unix socket left there by a dead process.
//!
//! It knows nothing about the protocol. Invariant: the file at the path is replaced only if it is a socket with no
//! listener.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::bound_path::BoundPath;

/// `sun_path` of Linux has 108 bytes, the last of which is NUL.
pub const MAX_PATH: usize = 107;

/// Maximum pending connections.
const BACKLOG: i32 = 128;

/// How long the socket of a killed process may still accept connections: if the process watched it through io_uring,
/// the kernel closes it asynchronously.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A socket that refuses connections for this long has no process; one whose process is about to listen also refuses
/// them for a moment.
const REFUSES_FOR: Duration = Duration::from_millis(100);
const PROBE_EVERY: Duration = Duration::from_millis(10);

/// Why listening failed.
#[derive(Debug)]
pub enum NotListening {
    /// The path is longer than [`MAX_PATH`]; its length.
    PathTooLong(usize),
    /// Another process is listening there.
    InUse,
    /// The file there is not a socket.
    NotASocket,
    /// A system call failed; `what` describes it.
    Failed {
        /// The call as a verb.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// Creates a non-blocking socket that listens at `path`, with the permissions `mode` if given.
pub fn listen(path: &Path, mode: Option<Mode>) -> Result<(UnixListener, BoundPath), NotListening> {
    let len = path.as_os_str().len();
    if len > MAX_PATH {
        return Err(NotListening::PathTooLong(len));
    }
    let failed = |what| move |source| NotListening::Failed { what, source };
    remove_stale(path, CLOSE_TIMEOUT, REFUSES_FOR)?;
    let socket = match bind(path, mode) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(NotListening::InUse),
        bound => bound.map_err(failed("bind"))?,
    };
    let path = BoundPath::created(path).map_err(failed("look at"))?;
    Ok((socket, path))
}

/// The socket gets its mode before its name, so that other users can never connect.
fn bind(path: &Path, mode: Option<Mode>) -> io::Result<UnixListener> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    if let Some(mode) = mode {
        rustix::fs::fchmod(&socket, mode)?;
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Removes a socket that refuses connections for some time, which means that no process has it open.
fn remove_stale(path: &Path, timeout: Duration, refuses_for: Duration) -> Result<(), NotListening> {
    let failed = |what| move |source| NotListening::Failed { what, source };
    let meta = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(failed("look at"))?,
    };
    if !meta.file_type().is_socket() {
        return Err(NotListening::NotASocket);
    }
    let begun = Instant::now();
    let until = begun + timeout;
    loop {
        match probe(path) {
            Err(Errno::CONNREFUSED) if begun.elapsed() < refuses_for => std::thread::sleep(PROBE_EVERY),
            Err(Errno::CONNREFUSED) => return fs::remove_file(path).map_err(failed("remove the stale")),
            Err(Errno::NOENT) => return Ok(()),
            Ok(connection) => match until.checked_duration_since(Instant::now()) {
                Some(left)
                    if closes_without_reply(&connection, left).map_err(|errno| failed("probe")(errno.into()))? => {}
                _ => return Err(NotListening::InUse),
            },
            // Its backlog is full.
            Err(Errno::AGAIN) => return Err(NotListening::InUse),
            Err(errno) => return Err(failed("probe")(errno.into())),
        }
    }
}

fn probe(path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Returns true if a connection is closed within `timeout` without any data, as happens when the listening socket is
/// closed before it was accepted. A live server sends a greeting, or keeps it open.
fn closes_without_reply(connection: &OwnedFd, timeout: Duration) -> rustix::io::Result<bool> {
    let mut watched = [PollFd::new(connection, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).map_err(|_| Errno::INVAL)?;
    match rustix::event::poll(&mut watched, Some(&timeout)) {
        Ok(_) => Ok(watched[0].revents().contains(PollFlags::HUP)),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_socket_that_closes_shortly_after_its_process_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let dying = UnixListener::bind(&path).unwrap();
        let closing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(dying);
        });
        let removed = remove_stale(&path, Duration::from_secs(60), PROBE_EVERY);
        closing.join().unwrap();
        assert!(removed.is_ok() && !path.exists(), "{removed:?}");
    }

    #[test]
    fn a_socket_whose_process_is_about_to_listen_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let listening = std::thread::spawn(move || {
            std::thread::sleep(PROBE_EVERY);
            rustix::net::listen(&socket, 1).unwrap();
            socket
        });
        let removed = remove_stale(&path, Duration::ZERO, Duration::from_secs(60));
        let _listener = listening.join().unwrap();
        assert!(matches!(removed, Err(NotListening::InUse)) && path.exists(), "{removed:?}");
    }
}
