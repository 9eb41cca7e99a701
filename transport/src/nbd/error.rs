//! What can go wrong with a client, and what a server tells its caller about clients.

use std::io;
use std::path::PathBuf;

use crate::log::Noted;

/// What a client did that ends its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Flags of the client that we did not offer.
    #[error("the client set unknown handshake flags {0:#x}")]
    ClientFlags(u32),
    /// An option without its magic number.
    #[error("an option does not begin with its magic number")]
    OptionMagic,
    /// An option with more data than any option needs.
    #[error("option {option} announces {len} bytes of data")]
    OptionTooLong {
        /// The option.
        option: u32,
        /// Bytes announced.
        len: u32,
    },
    /// More options than a client needs.
    #[error("too many options")]
    OptionFlood,
    /// An option that needs fixed newstyle, from a client that does not speak it.
    #[error("option {0} from a client that does not speak fixed newstyle")]
    NotFixed(u32),
    /// An export that does not exist, by the option that has no way to say so.
    #[error("the client asked for an export that does not exist")]
    UnknownExport,
    /// A request without its magic number.
    #[error("a request does not begin with its magic number")]
    RequestMagic,
    /// A write whose data is longer than we told the client.
    #[error("a write announces {0} bytes of data")]
    WriteTooLong(u32),
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// NBD_CMD_DISC or NBD_OPT_ABORT.
    #[error("the client said farewell")]
    Farewell,
    /// The client closed the socket.
    #[error("the client hung up")]
    HungUp,
    /// The client did what it must not.
    #[error("protocol error: {0}")]
    Protocol(#[from] ProtocolError),
    /// The socket failed.
    #[error("the socket failed: {0}")]
    Socket(rustix::io::Errno),
    /// The socket cannot be watched.
    #[error("the socket cannot be watched: {0}")]
    Watch(io::Error),
    /// Too many connections were negotiating, and this one had done so for the longest time.
    #[error("dropped in favour of a newer client: it had not finished negotiating")]
    Displaced,
}

/// Something worth a line in a log.
#[derive(Debug, thiserror::Error)]
pub enum Event {
    /// A client has connected.
    #[error("client {client}: connected")]
    Connected {
        /// Counts connections from 1.
        client: u32,
    },
    /// A client's connection has ended.
    #[error("client {client}: {why}")]
    Ended {
        /// Counts connections from 1.
        client: u32,
        /// Why.
        why: End,
    },
    /// A client was turned away at the door.
    #[error("a client was turned away: all {limit} connections are in use")]
    TurnedAway {
        /// Connections there can be.
        limit: usize,
    },
    /// A client could not be accepted.
    #[error("accepting a client failed: {0}")]
    AcceptFailed(io::Error),
    /// More happened than was asked for in time.
    #[error("{0} further events were not recorded")]
    Omitted(usize),
}

impl Noted for Event {
    const ROOM: usize = 256;

    fn more(count: usize) -> Event {
        Event::Omitted(count)
    }
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another server answers at this path.
    #[error("cannot listen on {}: another server is listening there", .0.display())]
    PathInUse(PathBuf),
    /// There is a file at this path and it is no socket.
    #[error("cannot listen on {}: the path exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// The path does not fit into a socket address.
    #[error("cannot listen on {}: the path has {len} bytes, a socket's may have {max}", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        len: usize,
        /// What fits.
        max: usize,
    },
    /// Another process listens on this port.
    #[error("cannot listen on {0}: the port is in use")]
    PortInUse(std::net::SocketAddr),
    /// An export's name or description is longer than the protocol allows.
    #[error("cannot export: {what} has {len} bytes, NBD allows {max}")]
    TextTooLong {
        /// Which text.
        what: &'static str,
        /// Its length.
        len: usize,
        /// What is allowed.
        max: usize,
    },
    /// Anything else.
    #[error("cannot {doing} {on}")]
    Failed {
        /// What was tried.
        doing: &'static str,
        /// On what.
        on: String,
        /// What the system said.
        #[source]
        cause: io::Error,
    },
}
