//! TLS between the socket and the session of one client.
//!
//! It knows nothing about NBD. Only rustls sees bytes of the socket, in both directions, except for the replies that
//! were sent before TLS began. Invariants: no byte reaches the session before the handshake is complete, with it the
//! client's certificate if one is required; a client costs at most 64 KiB of received records (16 KiB after the
//! handshake), and 64 KiB and a record to be sent.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use rustls::{Error, ProtocolVersion, ServerConnection};

use super::credentials::Tls;

/// The longest plaintext that can be in records of earlier calls: rustls keeps no longer message.
pub(super) const KEPT_MAX: usize = 64 << 10;

/// The TLS state of one client.
#[derive(Debug)]
pub(super) struct TlsChannel {
    connection: Box<ServerConnection>,
    /// Replies from before TLS that have not been sent.
    clear: Vec<u8>,
    /// The client has ended its side: nothing further can be received.
    is_closed: bool,
    is_reported: bool,
}

impl TlsChannel {
    /// The server's side of a handshake, which the client begins. `clear` is sent before it.
    pub(super) fn new(tls: &Tls, clear: Vec<u8>) -> Result<TlsChannel, Error> {
        let connection = Box::new(ServerConnection::new(Arc::clone(&tls.config))?);
        Ok(TlsChannel { connection, clear, is_closed: false, is_reported: false })
    }

    /// Returns true if the client has ended its side of the connection.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Processes bytes from the socket. Returns the number of bytes for the session, which are in `plain`: at most
    /// [`KEPT_MAX`] more than were received.
    pub(super) fn decrypt(&mut self, mut received: &[u8], plain: &mut [u8]) -> Result<usize, Error> {
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

    /// Encrypts bytes of the session; returns how many, perhaps none before others have been sent.
    pub(super) fn encrypt(&mut self, plain: &[u8]) -> usize {
        if self.connection.is_handshaking() {
            return 0;
        }
        // It is limited, and writes into memory.
        self.connection.writer().write(plain).unwrap_or(0)
    }

    /// Returns true if something is to be sent.
    pub(super) fn wants_send(&self) -> bool {
        !self.clear.is_empty() || self.connection.wants_write()
    }

    /// Sends until the socket accepts no more, which is an error (`AGAIN`).
    pub(super) fn send(&mut self, socket: &OwnedFd) -> Result<(), Errno> {
        let mut socket = Socket(socket);
        while self.wants_send() {
            let sent = if self.clear.is_empty() {
                self.connection.write_tls(&mut socket).map(drop)
            } else {
                socket.write(&self.clear).map(|len| drop(self.clear.drain(..len)))
            };
            match sent {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                sent => sent.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?,
            }
        }
        Ok(())
    }

    /// Ends our side, so that the client can tell this from a cut; a full socket keeps it from being sent.
    pub(super) fn close(&mut self, socket: &OwnedFd) {
        self.connection.send_close_notify();
        // The connection ends in any case.
        self.send(socket).ok();
    }

    /// The version and whether the client has shown a certificate, once after the handshake is complete.
    pub(super) fn take_report(&mut self) -> Option<(&'static str, bool)> {
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

/// A socket as rustls writes to it: without SIGPIPE, and several records at once.
struct Socket<'a>(&'a OwnedFd);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(sendmsg(self.0, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
