//! Why a connection to a server must end.

/// What is wrong with a connection. Nothing that arrives on it afterwards can be trusted; what was not answered is sent
/// again on the next one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The first bytes are not those of an NBD server.
    #[error("the server does not speak NBD")]
    NotNbd,
    /// The server knows only the protocol before "fixed newstyle".
    #[error("the server does not offer the fixed newstyle negotiation of NBD")]
    OldStyle,
    /// The server requires TLS.
    #[error("the server requires TLS, which this client does not have yet")]
    TlsRequired,
    /// The server refuses the export.
    #[error("the server refuses the export: {0}")]
    Refused(String),
    /// A message of the negotiation violates the protocol.
    #[error("the server violates the protocol in the negotiation: {0}")]
    Negotiation(&'static str),
    /// The export cannot be used.
    #[error("the export cannot be used: {0}")]
    Unusable(String),
    /// The export is another one than on the connection before.
    #[error("the export has changed: {0}; it is not used until it is as before")]
    Changed(String),
    /// A reply begins with neither of the two magic numbers.
    #[error("a reply of the server has the wrong magic number {0:#x}")]
    Magic(u32),
    /// A reply to no request in flight: never sent, or answered before.
    #[error("the server answers a request that is not in flight (cookie {0})")]
    UnknownCookie(u64),
    /// A reply violates the protocol.
    #[error("the server violates the protocol in a reply: {0}")]
    Reply(&'static str),
    /// A read was ended before all its bytes had arrived.
    #[error("the server ended a read of {len} bytes at {at} without all of its data")]
    Short {
        /// The offset of the read.
        at: u64,
        /// Its length.
        len: u64,
    },
    /// The server is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
}
