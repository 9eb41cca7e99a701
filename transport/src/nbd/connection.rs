//! One client: its session and its non-blocking socket.
//!
//! It knows nothing about other clients. Invariants: the socket is open exactly as long as it may be watched; `unread`
//! is either an incomplete message, or a message for which there is no memory.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use disk::{Geometry, Request};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::error::DisconnectReason;
use super::export::Export;
use super::memory_quota::MemoryQuota;
use super::session::{Next, Session};
use crate::Interest;

/// A client and the state of its socket.
#[derive(Debug)]
pub(super) struct Connection {
    /// The number of the connection within its server.
    pub(super) client: u32,
    pub(super) session: Session,
    socket: Option<OwnedFd>,
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

    /// The socket, the session and unprocessed input, to be handed over; `None` for a client that is disconnecting.
    pub(super) fn state(&self) -> Option<(&OwnedFd, &Session, &[u8])> {
        let socket = self.socket.as_ref().filter(|_| !self.ended)?;
        Some((socket, &self.session, &self.unread))
    }

    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
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
        export: &Export,
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
        let received = self.session.receive(bytes, export, geometry, quota, requests)?;
        self.save_unread(bytes.get(received.used..).unwrap_or_default());
        match received.next {
            Next::Receive | Next::Stall => Ok(()),
            Next::Disconnect => {
                // The reply to ABORT is optional: the client need not wait for it.
                self.send(staging)?;
                Err(DisconnectReason::Disconnect)
            }
        }
    }

    /// Receives bytes from the socket; zero if there are none for now.
    fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, DisconnectReason> {
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

    /// Sends pending replies until the socket accepts no more. Here a read's data is copied, once.
    pub(super) fn send(&mut self, staging: &mut [u8]) -> Result<(), DisconnectReason> {
        let Some(socket) = &self.socket else { return Ok(()) };
        while self.writable && !self.session.outgoing().is_empty() {
            let len = self.session.outgoing().fill(staging);
            match send(socket, staging.get(..len).unwrap_or_default(), SendFlags::NOSIGNAL) {
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
