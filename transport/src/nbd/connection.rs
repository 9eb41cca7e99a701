//! One client: its conversation and its socket, which never blocks.
//!
//! Knows nothing about the other clients. Invariant: the socket is open exactly as long as it may be watched;
//! bytes kept between two looks at it are either less than one message, or wait for room.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use disk::{Geometry, Request};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::error::End;
use super::export::Export;
use super::room::Room;
use super::session::{Next, Session};
use crate::Interest;

/// A client and what is known about its socket.
#[derive(Debug)]
pub(super) struct Connection {
    /// Counts the connections of a server.
    pub(super) client: u32,
    pub(super) session: Session,
    socket: Option<OwnedFd>,
    ended: bool,
    /// Received, and not used yet.
    unread: Vec<u8>,
    /// What is unread was received by the process before this one, and was not looked at here.
    fresh: bool,
    /// The socket may have bytes (or an end) for us.
    readable: bool,
    /// The socket may take bytes.
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
            fresh: false,
            readable: true,
            writable: true,
            watched: Interest::Read,
        }
    }

    /// A client whose conversation goes on from there. What was received and not used may be waiting for room, or be
    /// the beginning of a message: both are found out when more is looked for.
    pub(super) fn resumed(client: u32, session: Session, socket: OwnedFd, unread: Vec<u8>) -> Connection {
        Connection { unread, fresh: true, ..Connection::new(client, session, socket) }
    }

    /// Its socket, its conversation, and what was received and not used; none of a client that leaves.
    pub(super) fn parts(&self) -> Option<(&OwnedFd, &Session, &[u8])> {
        let socket = self.socket.as_ref().filter(|_| !self.ended)?;
        Some((socket, &self.session, &self.unread))
    }

    /// The socket, to be watched from now on.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether nothing is left of it: no socket, and no request in the disk.
    pub(super) fn is_gone(&self) -> bool {
        self.socket.is_none() && self.session.in_flight() == 0
    }

    /// Something has happened to the socket; both directions are worth a try.
    pub(super) fn wake(&mut self) {
        self.readable = true;
        self.writable = true;
    }

    /// Whether a look at the client may bring something.
    pub(super) fn is_hungry(&self, room: Room) -> bool {
        !self.ended && self.session.has_room(room) && (self.readable || self.fresh || self.session.is_stalled())
    }

    /// Takes in what waited for room, or else one piece of what the socket has. One piece only: a client that
    /// sends without end does not keep the others waiting.
    pub(super) fn take_in(
        &mut self,
        staging: &mut [u8],
        export: &Export,
        geometry: &Geometry,
        room: Room,
        requests: &mut VecDeque<Request>,
    ) -> Result<(), End> {
        let kept = self.unread.len();
        let (front, back) = staging.split_at_mut_checked(kept).ok_or(End::Socket(Errno::NOBUFS))?;
        front.copy_from_slice(&self.unread);
        let look = std::mem::take(&mut self.fresh) || self.session.is_stalled();
        let fresh = if look { 0 } else { self.receive(back)? };
        if fresh == 0 && !look {
            return Ok(());
        }
        let bytes = staging.get(..kept.saturating_add(fresh)).unwrap_or_default();
        let received = self.session.receive(bytes, export, geometry, room, requests)?;
        self.keep(bytes.get(received.used..).unwrap_or_default());
        match received.next {
            Next::Receive | Next::Stall => Ok(()),
            Next::Farewell => {
                // The answer to ABORT is a courtesy: the client does not have to wait for it.
                self.send(staging)?;
                Err(End::Farewell)
            }
        }
    }

    /// Bytes from the socket; none if there are none for now.
    fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, End> {
        let Some(socket) = &self.socket else { return Ok(0) };
        loop {
            match recv(socket, &mut *bytes, RecvFlags::empty()) {
                Ok((0, _)) => return Err(End::HungUp),
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

    fn keep(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            // A client that once had to wait does not hold its buffer for ever.
            self.unread = Vec::new();
        } else {
            self.unread.clear();
            self.unread.extend_from_slice(bytes);
        }
    }

    /// Sends what there is to send, until the socket takes no more. The only copy of a read's data is made here.
    pub(super) fn send(&mut self, staging: &mut [u8]) -> Result<(), End> {
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

    /// The socket, if it has to be watched for room as well and is not yet. It then stays so: a client with a
    /// full socket will fill it again.
    pub(super) fn watch_for_room(&mut self) -> Option<BorrowedFd<'_>> {
        if self.ended || self.writable || self.watched == Interest::ReadWrite {
            return None;
        }
        self.watched = Interest::ReadWrite;
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Whether [`Connection::watch_for_room`] has something to say.
    pub(super) fn lacks_room(&self) -> bool {
        !self.ended && !self.writable && self.watched == Interest::Read
    }

    /// Ends the conversation. The socket stays until it is no longer watched.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.unread = Vec::new();
        self.session.hang_up();
        if let Some(socket) = &self.socket {
            // Fails if the client was faster, which comes to the same.
            shutdown(socket, Shutdown::Both).ok();
        }
    }

    /// Whether the socket of a conversation that has ended is still to be forgotten and closed.
    pub(super) fn is_to_close(&self) -> bool {
        self.ended && self.socket.is_some()
    }

    /// Closes the socket, which nobody watches any more.
    pub(super) fn close(&mut self) {
        self.socket = None;
    }
}

fn end(errno: Errno) -> End {
    match errno {
        Errno::PIPE | Errno::CONNRESET => End::HungUp,
        errno => End::Socket(errno),
    }
}
