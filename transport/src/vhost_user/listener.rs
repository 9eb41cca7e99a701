//! The listening socket and its path.
//!
//! Knows nothing about what is said over it, or about what lies at the path already (`unix_socket`). Invariant: the
//! path is removed only while it is ours.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

use crate::bound_path::BoundPath;
use crate::unix_socket::{self, MAX_PATH, NotListening};

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Longer than a socket's address has room for.
    #[error("the socket path {path:?} has {len} bytes; Unix sockets take at most {MAX_PATH}")]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
    },
    /// Another server is there.
    #[error("the socket {0:?} is in use by another process")]
    InUse(PathBuf),
    /// Something that we did not make and will not remove.
    #[error("{0:?} exists and is not a socket")]
    NotASocket(PathBuf),
    /// Not possible to offer.
    #[error("a disk has 1 to {max} queues, not {asked}", max = super::MAX_QUEUES)]
    Queues {
        /// What was asked for.
        asked: u16,
    },
    /// More than the device can tell.
    #[error("the serial number {0:?} has more than 20 bytes")]
    SerialTooLong(String),
    /// A system call failed.
    #[error("cannot {what} the socket {path:?}")]
    Failed {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// A listening socket.
pub struct Listener {
    /// It goes before the socket closes.
    path: BoundPath,
    socket: UnixListener,
}

impl Listener {
    /// Listens at `path`. A socket that was left there by a server that is gone is replaced.
    pub fn bind(path: &Path) -> Result<Listener, BindError> {
        Listener::bind_with(path, None)
    }

    /// The same, for this process's user only.
    pub fn bind_private(path: &Path) -> Result<Listener, BindError> {
        Listener::bind_with(path, Some(Mode::RUSR | Mode::WUSR))
    }

    /// A socket that listens already, known as `path`, which is somebody else's to remove.
    pub fn of_socket(socket: OwnedFd, path: &Path) -> Result<Listener, BindError> {
        Listener::of_bound(socket, path, None)
    }

    /// The same, where the path has this device and inode and is to be removed at the end, after [`Listener::begin`].
    pub fn of_bound(socket: OwnedFd, path: &Path, file: Option<(u64, u64)>) -> Result<Listener, BindError> {
        let socket = UnixListener::from(socket);
        let failed = |source| BindError::Failed { what: "make non-blocking", path: path.into(), source };
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Listener { socket, path: BoundPath::foreign(path, file) })
    }

    /// The process before this one has let go: the path is ours to remove, if it was its.
    pub fn begin(&mut self) {
        self.path.take_ownership();
    }

    /// Device and inode of the path, if it is to be removed at the end.
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

    /// The next connection, if one is waiting.
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

    /// The path is another process's to remove.
    #[cfg(test)]
    pub fn leave_path(&mut self) {
        self.path.disown();
    }

    /// Removes the path, if it still is the one we made.
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
    fn a_private_socket_is_its_user_s_alone() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let _listener = Listener::bind_private(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn a_socket_that_was_handed_over_is_listened_at_and_its_path_left_alone() {
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
    fn what_is_not_a_socket_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(Listener::bind(&path), Err(BindError::NotASocket(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_path_that_has_no_room_is_named_with_its_length() {
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
