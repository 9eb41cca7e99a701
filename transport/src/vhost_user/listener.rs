//! The listening socket and its path.
//!
//! It knows nothing about the protocol, nor about existing files at the path (`unix_socket`). Invariant: the path is
//! removed only if this process owns it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;

use crate::bound_path::BoundPath;
use crate::unix_socket::{self, MAX_PATH, NotListening};

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The path does not fit into a socket address.
    #[error("the socket path {path:?} has {len} bytes; Unix sockets take at most {MAX_PATH}")]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
    },
    /// Another server is listening there.
    #[error("the socket {0:?} is in use by another process")]
    InUse(PathBuf),
    /// The file there is not a socket.
    #[error("{0:?} exists and is not a socket")]
    NotASocket(PathBuf),
    /// An unsupported number of queues.
    #[error("{requested} queues requested; must be 1-{max}", max = super::MAX_QUEUES)]
    Queues {
        /// The requested number.
        requested: u16,
    },
    /// The serial number exceeds the device's limit.
    #[error("the serial number {0:?} is longer than 20 bytes")]
    SerialTooLong(String),
    /// A system call failed.
    #[error("cannot {what} the socket {path:?}")]
    Failed {
        /// The failed step, as a verb.
        what: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// A listening socket.
pub struct Listener {
    /// Removed before the socket is closed.
    path: BoundPath,
    socket: UnixListener,
}

impl Listener {
    /// Listens at `path`. A socket left there by a dead server is replaced.
    pub fn bind(path: &Path) -> Result<Listener, BindError> {
        Listener::bind_with(path, None)
    }

    /// Like [`Listener::bind`], with a socket accessible only to this process's user.
    pub fn bind_private(path: &Path) -> Result<Listener, BindError> {
        Listener::bind_with(path, Some(Mode::RUSR | Mode::WUSR))
    }

    /// Uses a listening socket bound to `path`, which another process will remove.
    pub fn of_socket(socket: OwnedFd, path: &Path) -> Result<Listener, BindError> {
        Listener::of_bound(socket, path, None)
    }

    /// Uses a listening socket of the previous process, bound to `path`, which has the device and inode `file` and is
    /// removed in the end if [`Listener::begin`] was called.
    pub fn of_bound(socket: OwnedFd, path: &Path, file: Option<(u64, u64)>) -> Result<Listener, BindError> {
        let socket = UnixListener::from(socket);
        let failed = |source| BindError::Failed { what: "make non-blocking", path: path.into(), source };
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Listener { socket, path: BoundPath::foreign(path, file) })
    }

    /// Takes ownership of the path if the previous process, which has released it, owned it.
    pub fn begin(&mut self) {
        self.path.take_ownership();
    }

    /// Device and inode of the path, if this process owns it.
    pub fn bound(&self) -> Option<(u64, u64)> {
        self.path.file()
    }

    fn bind_with(path: &Path, mode: Option<Mode>) -> Result<Listener, BindError> {
        let (socket, path) = unix_socket::listen(path, mode).map_err(|why| match why {
            NotListening::PathTooLong(len) => BindError::PathTooLong { path: path.into(), len },
            NotListening::InUse => BindError::InUse(path.into()),
            NotListening::NotASocket => BindError::NotASocket(path.into()),
            NotListening::Failed { what, source } => BindError::Failed { what, path: path.into(), source },
        })?;
        Ok(Listener { socket, path })
    }

    /// The socket, to be watched.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns false if no connection is waiting to be accepted.
    pub(super) fn may_have_pending(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec::default())) != Ok(0)
    }

    /// Accepts the next connection, if one is waiting.
    pub fn accept(&self) -> io::Result<Option<UnixStream>> {
        loop {
            match self.socket.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives up the path: another process will remove it.
    #[cfg(test)]
    pub fn leave_path(&mut self) {
        self.path.disown();
    }

    /// Removes the path if this process owns it and it is still the same file.
    pub fn remove_path(&mut self) {
        self.path.remove();
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_live_socket_is_in_use_and_a_stale_one_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let other = UnixListener::bind(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(BindError::InUse(_))));
        drop(other);
        let listener = Listener::bind(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(BindError::InUse(_))));
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_private_socket_is_accessible_only_to_its_user() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let _listener = Listener::bind_private(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn the_path_of_a_handed_over_socket_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let mut listener = Listener::of_socket(UnixListener::bind(&path).unwrap().into(), &path).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        listener.remove_path();
        drop(listener);
        assert!(path.exists());
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&path), Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn the_error_for_a_long_path_states_its_length() {
        let path = PathBuf::from(format!("/tmp/{}", "a".repeat(103)));
        let refused = Listener::bind(&path).err().unwrap();
        assert!(refused.to_string().contains("has 108 bytes"), "{refused}");
    }

    #[test]
    fn the_path_of_a_later_server_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let listener = Listener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _later = UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }
}
