//! The back-end's own channel: what is said to the front-end without being asked.
//!
//! Knows one message. It is sent whole or not at all, and no answer to it is wanted: a front-end cannot make us wait.
//!
//! Specification: QEMU, docs/interop/vhost-user.rst, "Back-end message types".

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::connection::End;
use super::message::backend_request;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG: the front-end is to ask for the configuration space again.
const CONFIG_CHANGE: u32 = 2;

/// Whether the front-end has heard of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It was sent a message.
    Yes,
    /// It has given us no channel, or has not negotiated such messages.
    CannotBe,
}

/// The channel.
pub struct Backend {
    socket: OwnedFd,
}

impl Backend {
    /// Takes over the socket that the front-end has sent.
    pub fn new(socket: OwnedFd) -> io::Result<Backend> {
        let flags = fcntl_getfl(&socket)?;
        fcntl_setfl(&socket, flags | OFlags::NONBLOCK)?;
        Ok(Backend { socket })
    }

    /// The socket.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Says that the configuration space has changed. A channel so full that nothing goes in is one that nobody reads.
    pub fn configuration_changed(&mut self) -> Result<(), End> {
        let message = backend_request(CONFIG_CHANGE);
        loop {
            match send(&self.socket, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) if sent == message.len() => return Ok(()),
                Ok(_) | Err(Errno::AGAIN) => return Err(End::Deaf),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(End::Closed),
                Err(errno) => return Err(End::Failed(errno.into())),
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
    fn a_change_is_a_message_without_payload_and_without_a_wish_for_an_answer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        Backend::new(ours.into()).unwrap().configuration_changed().unwrap();
        let mut message = [0xff; 12];
        theirs.read_exact(&mut message).unwrap();
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_front_end_that_reads_nothing_is_given_up() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut backend = Backend::new(ours.into()).unwrap();
        let end = (0..1 << 20).find_map(|_| backend.configuration_changed().err());
        assert!(matches!(end, Some(End::Deaf)));
    }
}
