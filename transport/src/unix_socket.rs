//! Listening at a path: a Unix socket in the place of one that was left there by a process that is gone.
//!
//! Knows nothing about what is said over it. Invariant: what lies at the path is replaced only if it is a socket that
//! nobody listens at.

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

/// `sun_path` of Linux has 108 bytes, the last of which is zero.
pub(crate) const MAX_PATH: usize = 107;

/// Connections that may wait to be taken in.
const BACKLOG: i32 = 128;

/// How long a socket that takes connections may belong to a process that is gone: while it watches a socket through
/// io_uring, the kernel closes it in its own time after a kill.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why nothing listens.
#[derive(Debug)]
pub(crate) enum NotListening {
    /// The path has so many bytes, more than [`MAX_PATH`].
    PathTooLong(usize),
    /// Another process listens there.
    InUse,
    /// Something lies there that we did not make and will not remove.
    NotASocket,
    /// A system call failed: what it was to do to the socket.
    Failed { what: &'static str, source: io::Error },
}

/// Listens at `path`, without ever waiting for a connection; with `mode`, if one is named.
pub(crate) fn listen(path: &Path, mode: Option<Mode>) -> Result<(UnixListener, BoundPath), NotListening> {
    let len = path.as_os_str().len();
    if len > MAX_PATH {
        return Err(NotListening::PathTooLong(len));
    }
    let failed = |what| move |source| NotListening::Failed { what, source };
    remove_stale(path, PATIENCE)?;
    let socket = match bind(path, mode) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(NotListening::InUse),
        bound => bound.map_err(failed("bind"))?,
    };
    let path = BoundPath::made(path).map_err(failed("look at"))?;
    Ok((socket, path))
}

/// A socket has its mode before it has its name: at no moment can anybody else knock.
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

/// Removes a socket that refuses connections, which says that nobody has it open.
fn remove_stale(path: &Path, patience: Duration) -> Result<(), NotListening> {
    let failed = |what| move |source| NotListening::Failed { what, source };
    let meta = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(failed("look at"))?,
    };
    if !meta.file_type().is_socket() {
        return Err(NotListening::NotASocket);
    }
    let until = Instant::now() + patience;
    loop {
        match probe(path) {
            Err(Errno::CONNREFUSED) => return fs::remove_file(path).map_err(failed("remove the stale")),
            Err(Errno::NOENT) => return Ok(()),
            Ok(connection) => match until.checked_duration_since(Instant::now()) {
                Some(left) if ends_unanswered(&connection, left).map_err(|errno| failed("probe")(errno.into()))? => {}
                _ => return Err(NotListening::InUse),
            },
            // So many are waiting for it already.
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

/// Whether a connection ends within `patience` without a word, as it does when the listening socket goes before it was
/// taken in. A server that is there greets, or keeps it.
fn ends_unanswered(connection: &OwnedFd, patience: Duration) -> rustix::io::Result<bool> {
    let mut watched = [PollFd::new(connection, PollFlags::IN)];
    let patience = Timespec::try_from(patience).map_err(|_| Errno::INVAL)?;
    match rustix::event::poll(&mut watched, Some(&patience)) {
        Ok(_) => Ok(watched[0].revents().contains(PollFlags::HUP)),
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_socket_that_closes_a_moment_after_its_process_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let dying = UnixListener::bind(&path).unwrap();
        let closes = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(dying);
        });
        let removed = remove_stale(&path, Duration::from_secs(60));
        closes.join().unwrap();
        assert!(removed.is_ok() && !path.exists(), "{removed:?}");
    }
}
