//! One connected front-end: receives bytes and file descriptors, sends replies, and never blocks.
//!
//! Of a message it knows only the header. Invariant: a message is read up to its end and not one byte further, so that
//! file descriptors (which the kernel delivers with the bytes they were sent with) always belong to the message being
//! read.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use zerocopy::FromBytes;

use super::kill_point;
use super::message::{Frame, HEADER_LEN, Header, MAX_FDS, MAX_PAYLOAD};

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum DisconnectReason {
    /// The front-end closed its socket between two messages.
    #[error("the front-end closed the connection")]
    Closed,
    /// The front-end closed its socket within a message.
    #[error("the front-end closed the connection in the middle of a message")]
    Truncated,
    /// The socket failed.
    #[error("the connection failed")]
    Failed(#[source] io::Error),
    /// The payload is larger than that of any message.
    #[error("request {request} announces a payload of {size} bytes; the maximum is {MAX_PAYLOAD}")]
    Oversized {
        /// The request.
        request: u32,
        /// The announced size.
        size: u32,
    },
    /// Not a request of version 1.
    #[error("request {request} has flags {flags:#x}, which is not a request of vhost-user version 1")]
    Version {
        /// The request.
        request: u32,
        /// Its flags.
        flags: u32,
    },
    /// More file descriptors than a message may have.
    #[error("a message came with more than {MAX_FDS} file descriptors")]
    TooManyFds,
    /// The front-end does not read its replies.
    #[error("the front-end does not read its replies")]
    NotReading,
    /// A write to guest memory could not be logged, so that a migration would lose it.
    #[error("its dirty log does not cover the guest's memory")]
    Unlogged,
    /// A request was refused whose reply cannot express an error.
    #[error("{0}")]
    Refused(String),
}

/// One connected front-end.
pub struct Connection {
    stream: UnixStream,
    /// The message being read.
    partial: Box<[u8; HEADER_LEN + MAX_PAYLOAD]>,
    filled: usize,
    fds: Vec<OwnedFd>,
}

impl Connection {
    /// Uses an accepted socket.
    pub fn new(stream: UnixStream) -> io::Result<Connection> {
        stream.set_nonblocking(true)?;
        Ok(Connection { stream, partial: Box::new([0; HEADER_LEN + MAX_PAYLOAD]), filled: 0, fds: Vec::new() })
    }

    /// Uses a socket on which part of a message was received already.
    pub fn resumed(stream: UnixStream, partial: &[u8], fds: Vec<OwnedFd>) -> io::Result<Connection> {
        let mut connection = Connection::new(stream)?;
        let place = connection.partial.get_mut(..partial.len()).ok_or(io::ErrorKind::InvalidData)?;
        place.copy_from_slice(partial);
        (connection.filled, connection.fds) = (partial.len(), fds);
        Ok(connection)
    }

    /// The socket, and the received part of an incomplete message.
    pub fn pending_message(&self) -> (BorrowedFd<'_>, &[u8], &[OwnedFd]) {
        (self.fd(), self.partial.get(..self.filled).unwrap_or_default(), &self.fds)
    }

    /// The socket, to be watched.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Returns whether the front-end has closed its socket; messages that it sent before may be unread.
    pub fn has_hung_up(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// The next message, if it has arrived completely.
    pub fn receive(&mut self) -> Result<Option<Frame>, DisconnectReason> {
        loop {
            let end = match self.header()? {
                Some(header) if self.filled == message_len(&header) => return Ok(Some(self.take(header))),
                Some(header) => message_len(&header),
                None => HEADER_LEN,
            };
            match self.read_until(end)? {
                Some(0) if self.filled == 0 => return Err(DisconnectReason::Closed),
                Some(0) => return Err(DisconnectReason::Truncated),
                Some(count) => self.filled += count,
                None => return Ok(None),
            }
        }
    }

    /// The header, if it is complete, validated before anything after it is read.
    fn header(&self) -> Result<Option<Header>, DisconnectReason> {
        if self.filled < HEADER_LEN {
            return Ok(None);
        }
        let Ok((header, _)) = Header::read_from_prefix(&self.partial[..]) else { return Ok(None) };
        if usize::try_from(header.size).map_or(true, |size| size > MAX_PAYLOAD) {
            return Err(DisconnectReason::Oversized { request: header.request, size: header.size });
        }
        if !header.is_request() {
            return Err(DisconnectReason::Version { request: header.request, flags: header.flags });
        }
        Ok(Some(header))
    }

    /// Reads up to byte `end` of the message; `None` if nothing is available, zero at end of file.
    fn read_until(&mut self, end: usize) -> Result<Option<usize>, DisconnectReason> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let Some(room) = self.partial.get_mut(self.filled..end) else { return Ok(None) };
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = loop {
            match rustix::net::recvmsg(&self.stream, &mut [IoSliceMut::new(room)], &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::CONNRESET) => break None,
                Err(error) => return Err(DisconnectReason::Failed(error.into())),
                Ok(received) => break Some(received),
            }
        };
        let Some(received) = received else { return Ok(Some(0)) };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(DisconnectReason::TooManyFds);
        }
        Ok(Some(received.bytes))
    }

    fn take(&mut self, header: Header) -> Frame {
        let payload = self.partial.get(HEADER_LEN..self.filled).unwrap_or_default().to_vec();
        self.filled = 0;
        Frame { header, payload, fds: std::mem::take(&mut self.fds) }
    }

    /// Sends a reply, and its file descriptor. A front-end has few requests outstanding, so a full socket means that it
    /// does not read.
    pub fn send(&mut self, reply: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), DisconnectReason> {
        if !kill_point::is_alive() {
            return Ok(());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(fd) = &fd {
            // The space suffices for one.
            control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        }
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.stream, &[IoSlice::new(reply)], &mut control, flags) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Err(DisconnectReason::NotReading),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => return Err(DisconnectReason::Closed),
                Err(error) => return Err(DisconnectReason::Failed(error.into())),
                Ok(count) if count == reply.len() => return Ok(()),
                Ok(_) => return Err(DisconnectReason::NotReading),
            }
        }
    }
}

/// Size of the whole message; the payload size has been checked.
fn message_len(header: &Header) -> usize {
    usize::try_from(header.size).unwrap_or(MAX_PAYLOAD).saturating_add(HEADER_LEN)
}

#[cfg(test)]
mod test {
    use std::io::Write;

    use super::*;

    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Connection::new(ours).unwrap(), theirs)
    }

    fn bytes(request: u32, flags: u32, size: u32) -> Vec<u8> {
        [request, flags, size].iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn a_message_may_arrive_byte_by_byte() {
        let (mut connection, mut peer) = pair();
        let mut message = bytes(2, 1, 8);
        message.extend([7; 8]);
        for byte in &message[..19] {
            peer.write_all(&[*byte]).unwrap();
            assert!(connection.receive().unwrap().is_none());
        }
        peer.write_all(&message[19..]).unwrap();
        assert_eq!(connection.receive().unwrap().unwrap().payload, [7; 8]);
        assert!(connection.receive().unwrap().is_none());
    }

    #[test]
    fn two_messages_in_one_write_are_two_messages() {
        let (mut connection, mut peer) = pair();
        peer.write_all(&[bytes(1, 1, 0), bytes(3, 9, 0)].concat()).unwrap();
        assert_eq!(connection.receive().unwrap().unwrap().header.request, 1);
        assert!(connection.receive().unwrap().unwrap().header.needs_reply());
        assert!(connection.receive().unwrap().is_none());
    }

    #[test]
    fn an_oversized_message_ends_the_connection_before_it_is_read() {
        let (mut connection, mut peer) = pair();
        peer.write_all(&bytes(24, 1, u32::MAX)).unwrap();
        assert!(matches!(connection.receive(), Err(DisconnectReason::Oversized { request: 24, size: u32::MAX })));
    }

    #[test]
    fn another_version_or_a_reply_is_refused() {
        let (mut connection, mut peer) = pair();
        peer.write_all(&bytes(1, 2, 0)).unwrap();
        assert!(matches!(connection.receive(), Err(DisconnectReason::Version { .. })));
        let (mut connection, mut peer) = pair();
        peer.write_all(&bytes(1, 5, 0)).unwrap();
        assert!(matches!(connection.receive(), Err(DisconnectReason::Version { .. })));
    }

    #[test]
    fn end_of_file_within_a_message_is_truncation() {
        let (mut connection, mut peer) = pair();
        peer.write_all(&bytes(1, 1, 0)[..5]).unwrap();
        drop(peer);
        assert!(matches!(connection.receive(), Err(DisconnectReason::Truncated)));
        let (mut connection, peer) = pair();
        drop(peer);
        assert!(matches!(connection.receive(), Err(DisconnectReason::Closed)));
    }

    #[test]
    fn a_front_end_that_reads_nothing_is_disconnected() {
        let (mut connection, _peer) = pair();
        let end = loop {
            if let Err(end) = connection.send(&[0; 4096], None) {
                break end;
            }
        };
        assert!(matches!(end, DisconnectReason::NotReading));
    }
}
