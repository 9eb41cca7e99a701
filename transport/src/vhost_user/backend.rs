//! The back-end channel: messages that the back-end sends to the front-end on its own initiative.
//!
//! It knows one message. It is sent completely or not at all, and requests no reply: a front-end cannot block us.
//!
//! Specification: QEMU, docs/interop/vhost-user.rst, "Back-end message types".

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::connection::DisconnectReason;
use super::message::backend_request;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG: requests that the front-end read the configuration space again.
const CONFIG_CHANGE: u32 = 2;

/// Whether the front-end was notified of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notified {
    /// A message was sent.
    Yes,
    /// The front-end has sent no channel, or has not negotiated such messages.
    Unsupported,
}

/// The back-end channel to a front-end.
pub struct Backend {
    socket: OwnedFd,
}

impl Backend {
    /// Uses the socket that the front-end has sent.
    pub fn new(socket: OwnedFd) -> io::Result<Backend> {
        let flags = fcntl_getfl(&socket)?;
        fcntl_setfl(&socket, flags | OFlags::NONBLOCK)?;
        Ok(Backend { socket })
    }

    /// The socket of the channel.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reports that the configuration space has changed. A full channel is an error: the front-end does not read it.
    pub fn configuration_changed(&mut self) -> Result<(), DisconnectReason> {
        let message = backend_request(CONFIG_CHANGE);
        loop {
            match send(&self.socket, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) if sent == message.len() => return Ok(()),
                Ok(_) | Err(Errno::AGAIN) => return Err(DisconnectReason::NotReading),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(DisconnectReason::Closed),
                Err(errno) => return Err(DisconnectReason::Failed(errno.into())),
            }
        }
    }
}

#[cfg(test)]
mod test {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_change_message_has_no_payload_and_requests_no_reply() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        Backend::new(ours.into()).unwrap().configuration_changed().unwrap();
        let mut message = [0xff; 12];
        theirs.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_front_end_that_reads_nothing_is_disconnected() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut backend = Backend::new(ours.into()).unwrap();
        let end = (0..1 << 20).find_map(|_| backend.configuration_changed().err());
        assert!(matches!(end, Some(DisconnectReason::NotReading)));
    }
}
