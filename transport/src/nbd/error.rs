//! Errors of clients, and the events that a server reports about clients.

use std::io;
use std::path::PathBuf;

use crate::log::LogEvent;

/// A protocol violation that ends a client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The client set flags that we did not offer.
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
        /// Announced length.
        len: u32,
    },
    /// More options than a client needs.
    #[error("too many options")]
    OptionFlood,
    /// An option that needs fixed newstyle, from a client that does not support it.
    #[error("option {0} from a client that does not support fixed newstyle")]
    NotFixed(u32),
    /// A client that requests an export without TLS by the option that has no error reply.
    #[error("the client does not use TLS, which is required")]
    TlsRequired,
    /// A nonexistent export, named by the option that has no error reply.
    #[error("the client requested an export that does not exist")]
    UnknownExport,
    /// NBD_OPT_EXPORT_NAME from a client that has negotiated extended headers, which requires NBD_OPT_GO.
    #[error("the client negotiated extended headers and then used the option EXPORT_NAME")]
    NotGo,
    /// A request without its magic number.
    #[error("a request does not begin with its magic number")]
    RequestMagic,
    /// A write, or another request with data, with more than we announced to support.
    #[error("a request announces {0} bytes of data")]
    DataTooLong(u64),
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum DisconnectReason {
    /// NBD_CMD_DISC or NBD_OPT_ABORT.
    #[error("client disconnected")]
    Disconnect,
    /// The client closed the socket.
    #[error("the client closed the socket without disconnecting")]
    HungUp,
    /// The client violated the protocol.
    #[error("protocol error: {0}")]
    Protocol(#[from] ProtocolError),
    /// TLS failed: in its handshake, or by a record that is not authentic.
    #[error("TLS: {0}")]
    Tls(rustls::Error),
    /// The connection cannot be handed over to the process that replaces this one.
    #[error("disconnected by an upgrade: a TLS connection is not handed over, and the client must reconnect")]
    NotHandedOver,
    /// The socket failed.
    #[error("the socket failed: {0}")]
    Socket(rustix::io::Errno),
    /// The socket cannot be watched.
    #[error("cannot watch the socket: {0}")]
    Watch(io::Error),
    /// Too many connections were negotiating, and this one was the oldest.
    #[error("dropped in favour of a newer client before it finished negotiating")]
    Displaced,
}

/// An event worth a log line.
#[derive(Debug, thiserror::Error)]
pub enum Event {
    /// A client has connected.
    #[error("client {client}: connected")]
    Connected {
        /// The number of the connection, counted from 1.
        client: u32,
    },
    /// A client has completed the handshake of TLS.
    #[error("client {client}: encrypted by {version}{}", if *is_verified { ", certificate verified" } else { "" })]
    Encrypted {
        /// The number of the connection, counted from 1.
        client: u32,
        /// The negotiated version.
        version: &'static str,
        /// Whether the client has shown a certificate of the authority.
        is_verified: bool,
    },
    /// A client's connection has ended.
    #[error("client {client}: {why}")]
    Ended {
        /// The number of the connection, counted from 1.
        client: u32,
        /// The reason.
        why: DisconnectReason,
    },
    /// A client was refused because of the connection limit.
    #[error("refused a client: all {limit} connections are in use")]
    LimitReached {
        /// The maximum number of connections.
        limit: usize,
    },
    /// A client could not be accepted.
    #[error("cannot accept a client: {0}")]
    AcceptFailed(io::Error),
    /// Events were dropped because the buffer was full.
    #[error("{0} further events were not recorded")]
    Omitted(usize),
}

impl LogEvent for Event {
    const CAPACITY: usize = 256;

    fn dropped(count: usize) -> Event {
        Event::Omitted(count)
    }
}

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another server is listening at this path.
    #[error("cannot listen on {}: another server is listening there", .0.display())]
    PathInUse(PathBuf),
    /// The file at this path is not a socket.
    #[error("cannot listen on {}: the path exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// The path does not fit into a socket address.
    #[error("cannot listen on {}: the path has {len} bytes; the maximum is {max}", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
        /// The maximum length.
        max: usize,
    },
    /// Another process is listening on this port.
    #[error("cannot listen on {0}: the port is in use")]
    PortInUse(std::net::SocketAddr),
    /// An export's name or description exceeds the protocol's limit.
    #[error("cannot export: {what} has {len} bytes; NBD allows {max}")]
    TextTooLong {
        /// "the name", "the description" or "the name of a dirty bitmap".
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The maximum length.
        max: usize,
    },
    /// An export has more dirty bitmaps than the state that is handed over has room for.
    #[error("cannot export {count} dirty bitmaps; the maximum is {max}")]
    TooManyBitmaps {
        /// Their number.
        count: usize,
        /// The maximum.
        max: usize,
    },
    /// Any other error.
    #[error("cannot {doing} {on}")]
    Failed {
        /// The failed step, as a verb phrase.
        doing: &'static str,
        /// The object of that verb.
        on: String,
        /// The system error.
        #[source]
        cause: io::Error,
    },
}
