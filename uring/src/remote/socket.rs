//! The socket of a connection to an NBD server: connected without waiting, and never blocking.
//!
//! It knows nothing about the protocol. Names of hosts are resolved once, before the process is used for anything: a
//! later attempt to connect opens no file and waits for no other server.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use nbd::uri::{Place, Uri};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recv, send,
    shutdown, socket_with, sockopt,
};

/// After this time in which the server has acknowledged nothing, or its window has stayed closed, a connection over TCP
/// is taken for lost. It is long because a server that is slow, not dead, has our writes in its receive buffer, and
/// may execute them after what is written on the next connection (decision 0060). The kernel also measures an idle
/// connection by it, instead of by the number of probes.
const DEAD_AFTER_MS: u32 = 300_000;
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 4;

/// An address of a server.
#[derive(Clone, Debug)]
pub(super) enum Target {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

impl Target {
    /// The addresses of a server, of which there is at least one.
    pub(super) fn all(uri: &Uri) -> io::Result<Vec<Target>> {
        let found: Vec<Target> = match &uri.place {
            Place::Unix(path) => vec![Target::Unix(path.clone())],
            Place::Tcp(host, port) => (host.as_str(), *port).to_socket_addrs()?.map(Target::Tcp).collect(),
        };
        match found.is_empty() {
            true => Err(io::Error::new(io::ErrorKind::NotFound, "the host has no address")),
            false => Ok(found),
        }
    }
}

/// A socket.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// Begins to connect; [`Socket::is_connected`] returns the outcome.
    pub(super) fn begin(target: &Target) -> io::Result<Socket> {
        let family = match target {
            Target::Unix(_) => AddressFamily::UNIX,
            Target::Tcp(SocketAddr::V4(_)) => AddressFamily::INET,
            Target::Tcp(SocketAddr::V6(_)) => AddressFamily::INET6,
        };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        let begun = match target {
            Target::Unix(path) => connect(&socket, &SocketAddrUnix::new(path)?),
            Target::Tcp(address) => {
                sockopt::set_tcp_nodelay(&socket, true)?;
                sockopt::set_socket_keepalive(&socket, true)?;
                sockopt::set_tcp_keepidle(&socket, KEEPALIVE_IDLE)?;
                sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL)?;
                sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_COUNT)?;
                sockopt::set_tcp_user_timeout(&socket, DEAD_AFTER_MS)?;
                connect(&socket, address)
            }
        };
        match begun {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(Socket(socket)),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Ends the connection at once: the engine that watches it has the socket open too, so that dropping this alone
    /// would leave the server with a client, perhaps the only one that it accepts.
    pub(super) fn end(&self) {
        // An error means that the connection has ended already.
        let _ended = shutdown(&self.0, Shutdown::Both);
    }

    /// Returns whether it is connected by now, or why it cannot be.
    pub(super) fn is_connected(&self) -> io::Result<bool> {
        if !self.wait(PollFlags::OUT, Some(Duration::ZERO))? {
            return Ok(false);
        }
        sockopt::socket_error(&self.0)??;
        Ok(true)
    }

    /// Waits until it can be read, or with `write` written; no longer than `most`.
    pub(super) fn wait_for(&self, write: bool, most: Duration) -> io::Result<bool> {
        self.wait(if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }, Some(most))
    }

    fn wait(&self, events: PollFlags, most: Option<Duration>) -> io::Result<bool> {
        let most = most.map(|most| Timespec {
            tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(most.subsec_nanos()),
        });
        match poll(&mut [PollFd::new(&self.0, events)], most.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Receives what has arrived; `None` if nothing has. An end of the stream is an error.
    pub(super) fn receive(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match recv(&self.0, &mut *into, RecvFlags::empty()) {
                Ok((_, 0)) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server has closed it")),
                Ok((_, len)) => return Ok(Some(len)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends what the socket takes; `None` if it takes nothing now.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<Option<usize>> {
        loop {
            match send(&self.0, bytes, SendFlags::NOSIGNAL) {
                Ok(len) => return Ok(Some(len)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
