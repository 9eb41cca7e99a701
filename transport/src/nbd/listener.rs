//! The socket that clients knock at.
//!
//! Knows nothing about NBD. Invariant: a path is only replaced when nobody listens at the socket there, and only
//! removed while it is ours.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, socket_with, sockopt};

use super::error::BindError;
use crate::bound_path::BoundPath;

/// `sun_path` of Linux has 108 bytes, the last of which is zero.
const PATH_MAX: usize = 107;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket at this path.
    Unix(PathBuf),
    /// A TCP port of this address; port 0 is one of the system's choice.
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
    /// That of a Unix socket. It goes before the socket closes.
    path: Option<BoundPath>,
    socket: OwnedFd,
    address: Address,
}

impl Listener {
    pub(super) fn bind(address: &Address) -> Result<Listener, BindError> {
        let listener = match address {
            Address::Unix(path) => bind_path(path)?,
            Address::Tcp(address) => bind_port(*address)?,
        };
        rustix::io::ioctl_fionbio(&listener.socket, true)
            .map_err(|errno| failed("make non-blocking the socket", address, errno.into()))?;
        Ok(listener)
    }

    /// A Unix socket that listens already, known as `path`, which is somebody else's to remove.
    pub(super) fn of_socket(socket: OwnedFd, path: &Path) -> Result<Listener, BindError> {
        let address = Address::Unix(path.to_owned());
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(|errno| failed("make non-blocking the socket", &address, errno.into()))?;
        Ok(Listener { socket, address, path: None })
    }

    /// The same, where the path has this device and inode and is to be removed at the end, after [`Listener::begin`];
    /// or a TCP port.
    pub(super) fn of_bound(socket: OwnedFd, path: &Path, file: Option<(u64, u64)>) -> Result<Listener, BindError> {
        let unix = Address::Unix(path.to_owned());
        let found =
            rustix::net::getsockname(&socket).map_err(|errno| failed("look at the socket", &unix, errno.into()))?;
        let mut listener = Listener::of_socket(socket, path)?;
        listener.path = Some(BoundPath::of_another(path, file));
        if let Ok(port) = SocketAddr::try_from(found) {
            listener.address = Address::Tcp(port);
        }
        Ok(listener)
    }

    /// The process before this one has let go: the path is ours to remove, if it was its.
    pub(super) fn begin(&mut self) {
        if let Some(path) = &mut self.path {
            path.begin();
        }
    }

    /// Device and inode of the path, if it is to be removed at the end.
    pub(super) fn bound(&self) -> Option<(u64, u64)> {
        self.path.as_ref().and_then(BoundPath::file)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Where it listens; with the port that the system chose.
    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The next client, if one has knocked.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            return match accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(socket) => self.prepare(socket).map(Some),
                Err(Errno::AGAIN) => Ok(None),
                // That client has gone, or a signal came: the next one.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(errno) => Err(errno.into()),
            };
        }
    }

    fn prepare(&self, socket: OwnedFd) -> io::Result<OwnedFd> {
        if let Address::Tcp(_) = self.address {
            sockopt::set_tcp_nodelay(&socket, true)?;
            // A client whose machine has vanished gives up its place, by the kernel's timer.
            sockopt::set_socket_keepalive(&socket, true)?;
        }
        Ok(socket)
    }

    /// Removes the socket's path, when nobody is to come any more.
    pub(super) fn remove_path(&mut self) {
        self.path = None;
    }
}

fn bind_path(path: &Path) -> Result<Listener, BindError> {
    let address = Address::Unix(path.to_owned());
    let len = path.as_os_str().len();
    if len > PATH_MAX {
        return Err(BindError::PathTooLong { path: path.to_owned(), len, max: PATH_MAX });
    }
    remove_stale(path)?;
    let socket = UnixListener::bind(path).map_err(|cause| match cause.kind() {
        io::ErrorKind::AddrInUse => BindError::PathInUse(path.to_owned()),
        _ => failed("listen on", &address, cause),
    })?;
    let bound = BoundPath::made(path).map_err(|cause| failed("look at the socket", &address, cause))?;
    Ok(Listener { socket: socket.into(), address, path: Some(bound) })
}

/// Removes the socket of a server that is gone: one at which nobody answers.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let address = || Address::Unix(path.to_owned());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(cause) => return Err(failed("listen on", &address(), cause)),
        Ok(found) if !found.file_type().is_socket() => return Err(BindError::NotASocket(path.to_owned())),
        Ok(_) => {}
    }
    match knock(path) {
        Err(Errno::CONNREFUSED) => {
            fs::remove_file(path).map_err(|cause| failed("remove the abandoned socket", &address(), cause))
        }
        // AGAIN: a server that is too busy to accept.
        Ok(()) | Err(Errno::AGAIN) => Err(BindError::PathInUse(path.to_owned())),
        Err(errno) => Err(failed("find out who listens on the existing socket", &address(), errno.into())),
    }
}

/// Connects without waiting, to see whether anybody is there.
fn knock(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

fn bind_port(wanted: SocketAddr) -> Result<Listener, BindError> {
    let address = Address::Tcp(wanted);
    let socket = TcpListener::bind(wanted).map_err(|cause| match cause.kind() {
        io::ErrorKind::AddrInUse => BindError::PortInUse(wanted),
        _ => failed("listen on", &address, cause),
    })?;
    let found = socket.local_addr().map_err(|cause| failed("look at the socket", &address, cause))?;
    Ok(Listener { socket: socket.into(), address: Address::Tcp(found), path: None })
}

fn failed(doing: &'static str, on: &Address, cause: io::Error) -> BindError {
    BindError::Failed { doing, on: on.to_string(), cause }
}
