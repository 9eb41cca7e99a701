//! One client: its session and its non-blocking socket.
//!
//! It knows nothing about other clients. Invariants: the socket is open exactly as long as it may be watched; `unread`
//! is either an incomplete message, or a message for which there is no memory, and was received through TLS if that is
//! in force; once the client has started TLS, no byte goes between socket and session but through it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ::nbd::tls::{KEPT_MAX, ServerTls as Tls};
use disk::{Geometry, Request};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use super::error::DisconnectReason;
use super::export::Export;
use super::memory_quota::MemoryQuota;
use super::session::{Next, Session};
use super::tls::TlsChannel;
use crate::Interest;

/// The number of bytes that are encrypted at once: four records of the maximum length.
const RECORDS: usize = 64 << 10;

/// The export and how it is served, as all clients of a server see it.
pub(super) struct Serving<'a> {
    pub(super) export: &'a Export,
    pub(super) tls: Option<&'a Tls>,
}

/// A client and the state of its socket.
#[derive(Debug)]
pub(super) struct Connection {
    /// The number of the connection within its server.
    pub(super) client: u32,
    pub(super) session: Session,
    socket: Option<OwnedFd>,
    /// Set when the client has started TLS.
    tls: Option<TlsChannel>,
    ended: bool,
    /// Received, but not processed yet.
    unread: Vec<u8>,
    /// The bytes in `unread` were received by the previous process, and have not been examined by this one.
    inherited: bool,
    /// The socket may have data (or hang-up) for us.
    readable: bool,
    /// The socket may accept data.
    writable: bool,
    watched: Interest,
}

impl Connection {
    pub(super) fn new(client: u32, session: Session, socket: OwnedFd) -> Connection {
        Connection {
            client,
            session,
            socket: Some(socket),
            tls: None,
            ended: false,
            unread: Vec::new(),
            inherited: false,
            readable: true,
            writable: true,
            watched: Interest::Read,
        }
    }

    /// A client taken over from another process. Unprocessed input may be waiting for memory, or be the beginning of a
    /// message: both are determined by the next attempt to process it.
    pub(super) fn resumed(client: u32, session: Session, socket: OwnedFd, unread: Vec<u8>) -> Connection {
        Connection { unread, inherited: true, ..Connection::new(client, session, socket) }
    }

    /// The socket, the session and unprocessed input, to be handed over; `None` for a client that is disconnecting, or
    /// uses TLS.
    pub(super) fn state(&self) -> Option<(&OwnedFd, &Session, &[u8])> {
        let socket = self.socket.as_ref().filter(|_| !self.ended && self.tls.is_none())?;
        Some((socket, &self.session, &self.unread))
    }

    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Returns true if the client has started TLS, whose keys cannot be handed over.
    pub(super) fn uses_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// The version of TLS, and whether the client has shown a certificate, once after the handshake is complete.
    pub(super) fn take_tls_report(&mut self) -> Option<(&'static str, bool)> {
        self.tls.as_mut()?.take_report()
    }

    /// Returns true if there is no socket and no request in the disk any more.
    pub(super) fn is_gone(&self) -> bool {
        self.socket.is_none() && self.session.in_flight() == 0
    }

    /// Marks the socket as possibly ready in both directions.
    pub(super) fn wake(&mut self) {
        self.readable = true;
        self.writable = true;
    }

    /// Returns true if processing input may make progress.
    pub(super) fn wants_input(&self, quota: MemoryQuota) -> bool {
        !self.ended && self.session.has_memory(quota) && (self.readable || self.inherited || self.session.is_stalled())
    }

    /// Processes input that waited for memory, or else one chunk from the socket. Only one chunk, so that a client that
    /// sends continuously does not starve the others.
    pub(super) fn process_input(
        &mut self,
        staging: &mut [u8],
        serving: &Serving<'_>,
        geometry: &Geometry,
        quota: MemoryQuota,
        requests: &mut VecDeque<Request>,
    ) -> Result<(), DisconnectReason> {
        let kept = self.unread.len();
        let (front, back) = staging.split_at_mut_checked(kept).ok_or(DisconnectReason::Socket(Errno::NOBUFS))?;
        front.copy_from_slice(&self.unread);
        let retry = std::mem::take(&mut self.inherited) || self.session.is_stalled();
        let len = if retry { 0 } else { self.receive(back)? };
        if len == 0 && !retry {
            return Ok(());
        }
        let bytes = staging.get(..kept + len).unwrap_or_default();
        let received = self.session.receive(bytes, serving.export, geometry, quota, requests)?;
        let unused = bytes.get(received.used..).unwrap_or_default();
        match received.next {
            Next::Receive | Next::Stall => {
                self.save_unread(unused);
                Ok(())
            }
            Next::StartTls => self.start_tls(serving.tls, unused),
            Next::Disconnect => {
                // The reply to ABORT is optional: the client need not wait for it.
                self.send(staging)?;
                Err(DisconnectReason::Disconnect)
            }
        }
    }

    /// Passes all further bytes through TLS. Bytes that the client has sent behind the option are a part of its
    /// handshake, if they are authentic: a third party can insert options there, which must not be processed.
    fn start_tls(&mut self, tls: Option<&Tls>, received: &[u8]) -> Result<(), DisconnectReason> {
        self.unread = Vec::new();
        let Some(tls) = tls else { unreachable!("a session without TLS refuses the option") };
        let clear = self.session.outgoing().unsent();
        self.session.outgoing().sent(clear.len());
        let channel = self.tls.insert(TlsChannel::new(tls, clear).map_err(DisconnectReason::Tls)?);
        // Nothing can be decrypted yet: the client has not seen our part of the handshake.
        channel.decrypt(received, &mut []).map(drop).map_err(DisconnectReason::Tls)
    }

    /// Receives bytes for the session; zero if there are none for now.
    fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, DisconnectReason> {
        if self.tls.is_none() {
            return self.receive_raw(bytes);
        }
        // Received in the last part, they are decrypted into the rest, where there is room for what TLS has kept.
        let room = bytes.len().saturating_sub(KEPT_MAX) / 2;
        let (plain, received) = bytes.split_at_mut(bytes.len() - room);
        let len = self.receive_raw(received)?;
        let Some(tls) = &mut self.tls else { return Ok(0) };
        let received = received.get(..len).unwrap_or_default();
        match tls.decrypt(received, plain).map_err(DisconnectReason::Tls)? {
            0 if tls.is_closed() => Err(DisconnectReason::HungUp),
            len => Ok(len),
        }
    }

    /// Receives bytes from the socket; zero if there are none for now.
    fn receive_raw(&mut self, bytes: &mut [u8]) -> Result<usize, DisconnectReason> {
        let Some(socket) = &self.socket else { return Ok(0) };
        loop {
            match recv(socket, &mut *bytes, RecvFlags::empty()) {
                Ok((0, _)) => return Err(DisconnectReason::HungUp),
                Ok((len, _)) => return Ok(len),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.readable = false;
                    return Ok(0);
                }
                Err(errno) => return Err(end(errno)),
            }
        }
    }

    fn save_unread(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            // Frees the buffer of a client that once had to wait for memory.
            self.unread = Vec::new();
        } else {
            self.unread.clear();
            self.unread.extend_from_slice(bytes);
        }
    }

    /// Sends pending replies until the socket accepts no more.
    pub(super) fn send(&mut self, staging: &mut [u8]) -> Result<(), DisconnectReason> {
        match &self.tls {
            None => self.send_clear(),
            Some(_) => self.send_encrypted(staging),
        }
    }

    /// Here a read's data is encrypted, into memory of rustls, which takes no more until that has been sent.
    fn send_encrypted(&mut self, staging: &mut [u8]) -> Result<(), DisconnectReason> {
        let (Some(socket), Some(tls)) = (&self.socket, &mut self.tls) else { return Ok(()) };
        while self.writable {
            match tls.send(socket) {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    self.writable = false;
                    break;
                }
                Err(errno) => return Err(end(errno)),
            }
            let len = self.session.outgoing().fill(staging.get_mut(..RECORDS).unwrap_or_default());
            let encrypted = tls.encrypt(staging.get(..len).unwrap_or_default());
            if encrypted == 0 {
                break;
            }
            self.session.outgoing().sent(encrypted);
        }
        Ok(())
    }

    /// Here a read's data is copied by the kernel only.
    fn send_clear(&mut self) -> Result<(), DisconnectReason> {
        let Some(socket) = &self.socket else { return Ok(()) };
        while self.writable && !self.session.outgoing().is_empty() {
            let sent = memory::send(socket.as_fd(), &self.session.outgoing().pieces());
            match sent.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)) {
                Ok(sent) => self.session.outgoing().sent(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(errno) => return Err(end(errno)),
            }
        }
        Ok(())
    }

    /// The socket, if it must now be watched for writability and is not yet. It stays watched: a client that has filled
    /// its socket will do so again.
    pub(super) fn watch_for_write(&mut self) -> Option<BorrowedFd<'_>> {
        if self.ended || self.writable || self.watched == Interest::ReadWrite {
            return None;
        }
        self.watched = Interest::ReadWrite;
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Returns true if [`Connection::watch_for_write`] would return the socket.
    pub(super) fn needs_write_watch(&self) -> bool {
        !self.ended && !self.writable && self.watched == Interest::Read
    }

    /// Ends the session. The socket stays open until it is no longer watched.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.unread = Vec::new();
        self.session.hang_up();
        if let Some(socket) = &self.socket {
            if let Some(tls) = &mut self.tls {
                // With the alert that names the reason, if the client is at fault.
                tls.close(socket);
            }
            // Fails if the client has closed it already, to the same effect.
            shutdown(socket, Shutdown::Both).ok();
        }
    }

    /// Returns true if the session has ended and its socket must be unwatched and closed.
    pub(super) fn needs_close(&self) -> bool {
        self.ended && self.socket.is_some()
    }

    /// Closes the socket, which must not be watched any more.
    pub(super) fn close(&mut self) {
        self.socket = None;
    }
}

fn end(errno: Errno) -> DisconnectReason {
    match errno {
        Errno::PIPE | Errno::CONNRESET => DisconnectReason::HungUp,
        errno => DisconnectReason::Socket(errno),
    }
}
