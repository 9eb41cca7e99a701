//! The listening socket.
//!
//! It knows nothing about NBD, nor about existing files at a path (`unix_socket`). Invariant: a path is removed only if
//! this process owns it.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};

use super::error::BindError;
use crate::bound_path::BoundPath;
use crate::unix_socket::{self, MAX_PATH, NotListening};

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket at this path.
    Unix(PathBuf),
    /// A TCP port of this address; port 0 lets the system choose one.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => path.display().fmt(f),
            Address::Tcp(address) => address.fmt(f),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    /// The path of a Unix socket. It is removed before the socket is closed.
    path: Option<BoundPath>,
    socket: OwnedFd,
    address: Address,
}

impl Listener {
    /// Listens at an address. A Unix socket gets the permissions `mode` if given.
    pub(super) fn bind(address: &Address, mode: Option<Mode>) -> Result<Listener, BindError> {
        let listener = match address {
            Address::Unix(path) => bind_path(path, mode)?,
            Address::Tcp(address) => bind_port(*address)?,
        };
        rustix::io::ioctl_fionbio(&listener.socket, true)
            .map_err(|errno| failed("set to non-blocking the socket", address, errno.into()))?;
        Ok(listener)
    }

    /// Uses a listening Unix socket bound to `path`, which another process will remove.
    pub(super) fn from_socket(socket: OwnedFd, path: &Path) -> Result<Listener, BindError> {
        let address = Address::Unix(path.to_owned());
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(|errno| failed("set to non-blocking the socket", &address, errno.into()))?;
        Ok(Listener { socket, address, path: None })
    }

    /// Uses a listening socket of the previous process: a TCP port, or a Unix socket bound to `path`, which has the
    /// device and inode `file` and is removed in the end if [`Listener::take_ownership`] was called.
    pub(super) fn from_bound(socket: OwnedFd, path: &Path, file: Option<(u64, u64)>) -> Result<Listener, BindError> {
        let unix = Address::Unix(path.to_owned());
        let found =
            rustix::net::getsockname(&socket).map_err(|errno| failed("examine the socket", &unix, errno.into()))?;
        let mut listener = Listener::from_socket(socket, path)?;
        listener.path = Some(BoundPath::foreign(path, file));
        if let Ok(port) = SocketAddr::try_from(found) {
            listener.address = Address::Tcp(port);
        }
        Ok(listener)
    }

    /// Takes ownership of the path if the previous process, which has released it, owned it.
    pub(super) fn take_ownership(&mut self) {
        if let Some(path) = &mut self.path {
            path.take_ownership();
        }
    }

    /// Device and inode of the path, if this process owns it.
    pub(super) fn bound(&self) -> Option<(u64, u64)> {
        self.path.as_ref().and_then(BoundPath::file)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The address of the socket, with the port chosen by the system.
    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts the next client, if one is waiting.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            return match accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) => self.prepare(socket).map(Some),
                Err(Errno::AGAIN) => Ok(None),
                // The client has disconnected already, or a signal arrived: try the next one.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(errno) => Err(errno.into()),
            };
        }
    }

    fn prepare(&self, socket: OwnedFd) -> io::Result<OwnedFd> {
        if let Address::Tcp(_) = self.address {
            sockopt::set_tcp_nodelay(&socket, true)?;
            // The kernel's keepalive timer disconnects a client whose machine has vanished.
            sockopt::set_socket_keepalive(&socket, true)?;
        }
        Ok(socket)
    }

    /// Removes the socket's path, so that no more clients can connect.
    pub(super) fn remove_path(&mut self) {
        self.path = None;
    }
}

fn bind_path(path: &Path, mode: Option<Mode>) -> Result<Listener, BindError> {
    let (socket, bound) = unix_socket::listen(path, mode).map_err(|why| match why {
        NotListening::PathTooLong(len) => BindError::PathTooLong { path: path.to_owned(), len, max: MAX_PATH },
        NotListening::InUse => BindError::PathInUse(path.to_owned()),
        NotListening::NotASocket => BindError::NotASocket(path.to_owned()),
        NotListening::Failed { what, source } => {
            BindError::Failed { doing: what, on: format!("the socket {}", path.display()), cause: source }
        }
    })?;
    Ok(Listener { socket: socket.into(), address: Address::Unix(path.to_owned()), path: Some(bound) })
}

fn bind_port(wanted: SocketAddr) -> Result<Listener, BindError> {
    let address = Address::Tcp(wanted);
    let socket = TcpListener::bind(wanted).map_err(|cause| match cause.kind() {
        io::ErrorKind::AddrInUse => BindError::PortInUse(wanted),
        _ => failed("listen on", &address, cause),
    })?;
    let found = socket.local_addr().map_err(|cause| failed("examine the socket", &address, cause))?;
    Ok(Listener { socket: socket.into(), address: Address::Tcp(found), path: None })
}

fn failed(doing: &'static str, on: &Address, cause: io::Error) -> BindError {
    BindError::Failed { doing, on: on.to_string(), cause }
}
