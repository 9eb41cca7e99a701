//! TLS between the bytes of a network and those of the protocol: one side of one connection, and its settings.
//!
//! It knows nothing about NBD and sockets; only [`directory`] reads files. Invariants: no byte reaches the protocol
//! before the handshake is complete, with it the peer's certificate if one is required; a peer costs at most 64 KiB of
//! received records (16 KiB after the handshake), and 64 KiB and a record to be sent.

mod credentials;
pub mod directory;

use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::{ClientConnection, Connection, ProtocolVersion, ServerConnection};

pub use credentials::{ClientCredentials, ClientTls, Credentials, CredentialsError, Part, ServerTls};
pub use rustls::Error;

/// The longest plaintext that can be in records of earlier calls: rustls keeps no longer message.
pub const KEPT_MAX: usize = 64 << 10;

/// One side of a connection.
#[derive(Debug)]
pub struct Channel {
    connection: Box<Connection>,
    /// The peer has ended its side: nothing further can be received.
    is_closed: bool,
    is_reported: bool,
}

impl Channel {
    /// The server's side of a handshake, which the client begins.
    pub fn of_server(tls: &ServerTls) -> Result<Channel, Error> {
        Ok(Channel::of(ServerConnection::new(Arc::clone(&tls.config))?.into()))
    }

    /// The client's side of a handshake, which it begins: something is to be sent.
    pub fn of_client(tls: &ClientTls) -> Result<Channel, Error> {
        Ok(Channel::of(ClientConnection::new(Arc::clone(&tls.config), tls.name.clone())?.into()))
    }

    fn of(connection: Connection) -> Channel {
        Channel { connection: Box::new(connection), is_closed: false, is_reported: false }
    }

    /// Returns true if the peer has ended its side of the connection.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Processes bytes from the network. Returns the number of bytes for the protocol, which are in `plain`: at most
    /// [`KEPT_MAX`] more than were received.
    pub fn decrypt(&mut self, mut received: &[u8], plain: &mut [u8]) -> Result<usize, Error> {
        let mut filled = 0;
        while !received.is_empty() && !self.is_closed {
            self.connection.read_tls(&mut received).map_err(|error| Error::General(error.to_string()))?;
            let state = self.connection.process_new_packets()?;
            let len = state.plaintext_bytes_to_read();
            let Some(room) = plain.get_mut(filled..filled + len) else {
                return Err(Error::General("more bytes than were received".into()));
            };
            self.connection.reader().read_exact(room).map_err(|error| Error::General(error.to_string()))?;
            filled += len;
            self.is_closed = state.peer_has_closed();
        }
        Ok(filled)
    }

    /// Encrypts bytes of the protocol; returns how many, perhaps none before others have been sent.
    pub fn encrypt(&mut self, plain: &[u8]) -> usize {
        if self.connection.is_handshaking() {
            return 0;
        }
        // It is limited, and writes into memory.
        self.connection.writer().write(plain).unwrap_or(0)
    }

    /// Returns true if something is to be sent.
    pub fn wants_send(&self) -> bool {
        self.connection.wants_write()
    }

    /// Writes what is to be sent, in one call of `to` that may take a part of it.
    pub fn send(&mut self, to: &mut dyn Write) -> io::Result<()> {
        self.connection.write_tls(to).map(drop)
    }

    /// Adds the end of our side to what is to be sent, so that the peer can tell it from a cut.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }

    /// The version and whether the peer has shown a certificate, once after the handshake is complete.
    pub fn take_report(&mut self) -> Option<(&'static str, bool)> {
        if self.is_reported || self.connection.is_handshaking() {
            return None;
        }
        self.is_reported = true;
        let version = match self.connection.protocol_version() {
            Some(ProtocolVersion::TLSv1_2) => "TLS 1.2",
            Some(ProtocolVersion::TLSv1_3) => "TLS 1.3",
            _ => "TLS",
        };
        Some((version, self.connection.peer_certificates().is_some()))
    }
}
