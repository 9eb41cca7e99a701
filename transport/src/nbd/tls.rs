//! TLS between the socket and the session of one client.
//!
//! It knows nothing about NBD. Only rustls sees bytes of the socket, in both directions, except for the replies that
//! were sent before TLS began. Invariant: see [`Channel`].

use std::io::{self, IoSlice, Write};
use std::os::fd::OwnedFd;

use ::nbd::tls::{Channel, Error, ServerTls};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

/// The TLS state of one client.
#[derive(Debug)]
pub(super) struct TlsChannel {
    channel: Channel,
    /// Replies from before TLS that have not been sent.
    clear: Vec<u8>,
}

impl TlsChannel {
    /// The server's side of a handshake, which the client begins. `clear` is sent before it.
    pub(super) fn new(tls: &ServerTls, clear: Vec<u8>) -> Result<TlsChannel, Error> {
        Ok(TlsChannel { channel: Channel::of_server(tls)?, clear })
    }

    /// Returns true if the client has ended its side of the connection.
    pub(super) fn is_closed(&self) -> bool {
        self.channel.is_closed()
    }

    /// See [`Channel::decrypt`].
    pub(super) fn decrypt(&mut self, received: &[u8], plain: &mut [u8]) -> Result<usize, Error> {
        self.channel.decrypt(received, plain)
    }

    /// See [`Channel::encrypt`].
    pub(super) fn encrypt(&mut self, plain: &[u8]) -> usize {
        self.channel.encrypt(plain)
    }

    /// Returns true if something is to be sent.
    pub(super) fn wants_send(&self) -> bool {
        !self.clear.is_empty() || self.channel.wants_send()
    }

    /// Sends until the socket accepts no more, which is an error (`AGAIN`).
    pub(super) fn send(&mut self, socket: &OwnedFd) -> Result<(), Errno> {
        let mut socket = Socket(socket);
        while self.wants_send() {
            let sent = if self.clear.is_empty() {
                self.channel.send(&mut socket)
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
        self.channel.close();
        // The connection ends in any case.
        self.send(socket).ok();
    }

    /// See [`Channel::take_report`].
    pub(super) fn take_report(&mut self) -> Option<(&'static str, bool)> {
        self.channel.take_report()
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
