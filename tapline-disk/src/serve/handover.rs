//! The messages between a disk's process and its replacement, over a SOCK_SEQPACKET socket: one per packet, with its
//! descriptors.
//!
//! 1. The new process sends hello when it has parsed its arguments and dropped unneeded privileges. The guest
//!    notices nothing until then, and for a while after.
//! 2. The old one stops accepting requests, waits for those in flight, and sends everything: the disk, its files,
//!    sockets, clients.
//! 3. The new one opens the image and confirms that it has received everything. It has written nothing, neither to
//!    a file nor to the guest: the old one can still continue as before.
//! 4. The old one sends go, and never touches anything again. If the connection ends before that, the new one must
//!    exit.
//!
//! It knows nothing about disks and servers. Invariants: a packet is accepted completely and with exactly the
//! descriptors that belong to it, or rejected; the messages of each release since 0.1 are understood. A field added by
//! a later release is an `Option`, `None` if it is absent; an older program ignores it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use control::ImageName;
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use super::admission::limits;
use super::bitmaps::Rest;
use super::shaping::Shaping;
use crate::files::passed::descriptors_of;
use crate::serve::stats::Counters;

/// The maximum length of a packet; the longest contain one path.
const PACKET_MAX: usize = 64 << 10;
/// The maximum number of descriptors of a packet: a connection's, and those of a partly received message.
const DESCRIPTORS_MAX: usize = 16;

/// The messages. Each description ends with the number of descriptors that follow.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Message {
    /// The new process has parsed its arguments. No descriptors.
    Hello {
        /// Its version.
        program: String,
        /// Its process id.
        pid: u32,
    },
    /// A layer of the disk, leaf first. One descriptor for each file of its name.
    Layer {
        /// Its name, as FORMAT:PATH.
        name: String,
        /// Whether it is open for writing too.
        write: bool,
    },
    /// The redo log of a layer, if logs are passed; the statistics page or the page of shares. One descriptor.
    Log {
        /// The file name; that of a log is derived from its image's file.
        name: PathBuf,
    },
    /// The map of changed blocks, if there is one. One descriptor. A program that does not know it does not take over.
    Changes {
        /// The path of its file.
        path: PathBuf,
    },
    /// A dirty bitmap, in the order in which clients know them. One descriptor if intervals of it are over: a map of
    /// them. A program that does not know the message does not take over.
    Bitmap {
        /// Its name.
        name: String,
        /// Whether intervals of it are over.
        over: bool,
        /// How it continues.
        rest: Rest,
    },
    /// I/O statistics of the disk. No descriptors.
    Counters(Box<Counters>),
    /// The limits of the disk. No descriptors.
    Limits(Box<limits::Handed>),
    /// How transfers are split and merged. No descriptors.
    Shape(Box<Shaping>),
    /// The listening socket of the server, or the control socket. One descriptor.
    Listener {
        /// Whether it is the control socket.
        control: bool,
        /// Device and inode of its path, if that must be removed at the end.
        bound: Option<(u64, u64)>,
    },
    /// A peer, or a part of one. Any number of descriptors.
    Peer {
        /// The server's own message.
        bytes: Vec<u8>,
    },
    /// Everything has been sent. No descriptors.
    All,
    /// The new process has received everything, and started nothing. No descriptors.
    Taken,
    /// The old process has released everything. No descriptors.
    Go,
    /// The old process continues. No descriptors.
    Stay,
}

/// One end of the socket.
#[derive(Debug)]
pub struct Channel(OwnedFd);

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other process has exited, or closed its end.
    #[error("the other process has exited")]
    Closed,
    /// The time limit has passed.
    #[error("the other process did not answer in time")]
    Late,
    /// An unexpected message was received.
    #[error("the other process sent an unexpected message: {0}")]
    Strange(String),
    /// A system call has failed.
    #[error("the socket between two processes of the disk failed")]
    Failed(#[source] io::Error),
}

impl Channel {
    /// Makes a channel of a socket, which must be of this type.
    pub fn over(socket: OwnedFd) -> Result<Channel, ChannelError> {
        match sockopt::socket_type(&socket) {
            Ok(SocketType::SEQPACKET) => Ok(Channel(socket)),
            _ => Err(ChannelError::Strange("its socket is not a SOCK_SEQPACKET socket".into())),
        }
    }

    /// Sends a message, waiting until `until` at most for space in the socket.
    pub fn send(
        &self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
        until: Option<Instant>,
    ) -> Result<(), ChannelError> {
        let bytes = serde_json::to_vec(message).map_err(|error| ChannelError::Strange(error.to_string()))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(ChannelError::Strange(format!("more than {DESCRIPTORS_MAX} descriptors")));
        }
        self.wait_at_most(Timeout::Send, until)?;
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(ChannelError::Late),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ChannelError::Closed),
                Err(errno) => return Err(ChannelError::Failed(errno.into())),
            }
        }
    }

    /// Receives the next message, waiting until `until` at most.
    pub fn receive(&self, until: Option<Instant>) -> Result<(Message, Vec<OwnedFd>), ChannelError> {
        self.wait_at_most(Timeout::Recv, until)?;
        self.receive_with(RecvFlags::CMSG_CLOEXEC)
    }

    /// Receives a message that has already arrived, if there is one.
    pub fn try_receive(&self) -> Result<Option<(Message, Vec<OwnedFd>)>, ChannelError> {
        match self.receive_with(RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT) {
            Err(ChannelError::Late) => Ok(None),
            received => received.map(Some),
        }
    }

    fn wait_at_most(&self, direction: Timeout, until: Option<Instant>) -> Result<(), ChannelError> {
        // A timeout of zero would mean none.
        let left = until.map(|until| until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        sockopt::set_socket_timeout(&self.0, direction, left).map_err(|errno| ChannelError::Failed(errno.into()))
    }

    fn receive_with(&self, flags: RecvFlags) -> Result<(Message, Vec<OwnedFd>), ChannelError> {
        let mut buffer = vec![0; PACKET_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut buffer)], &mut ancillary, flags) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(ChannelError::Late),
                Err(Errno::CONNRESET) => return Err(ChannelError::Closed),
                Err(errno) => return Err(ChannelError::Failed(errno.into())),
                Ok(received) => break received,
            }
        };
        let descriptors = descriptors_of(&mut ancillary);
        if received.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(ChannelError::Strange("more than a packet can carry".into()));
        }
        let message = serde_json::from_slice(buffer.get(..received.bytes).unwrap_or_default());
        let message = message.map_err(|error| ChannelError::Strange(error.to_string()))?;
        match wanted(&message).is_none_or(|wanted| descriptors.len() == wanted) {
            true => Ok((message, descriptors)),
            false => Err(ChannelError::Strange(format!("{} descriptors with {message:?}", descriptors.len()))),
        }
    }
}

/// Returns the number of descriptors of a message; `None` for any number.
fn wanted(message: &Message) -> Option<usize> {
    match message {
        // An invalid name is rejected by the receiver.
        Message::Layer { name, .. } => Some(name.parse::<ImageName>().map_or(1, |name| name.paths().count())),
        Message::Log { .. } | Message::Changes { .. } | Message::Listener { .. } => Some(1),
        Message::Bitmap { over, .. } => Some(usize::from(*over)),
        Message::Peer { .. } => None,
        _ => Some(0),
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod test {
    use serde_json::{Value, json};

    use super::*;

    /// The messages of a process of version 0.1, except those without contents.
    fn of_0_1() -> Vec<Value> {
        let none = json!({ "come": 0, "answered": 0, "bytes": 0, "come_ns": 0, "answered_ns": 0 });
        vec![
            json!({ "hello": { "program": "0.1.0", "pid": 7 } }),
            json!({ "layer": { "name": "qcow2:/srv/web.qcow2", "write": true } }),
            json!({ "log": { "name": "web.qcow2.redo" } }),
            json!({ "counters": {
                "elapsed_ns": 9000, "reads": { "come": 3, "answered": 3, "bytes": 9, "come_ns": 100, "answered_ns": 350 },
                "writes": none, "flushes": none, "discards": none, "rounds": 1, "sleeps": 2, "rests": 3, "polls": [5, 7],
                "polled_ns": 8, "polling": { "mode": "adaptive", "most": 50000 }, "threads": null, "fatal": 1,
                "in_page": false,
            } }),
            json!({ "limits": {
                "limits": { "iops": 100 }, "levels": [5, null, null, null, null, null],
                "share": { "weight": 100, "time": 9, "slot": 3 },
            } }),
            json!({ "shape": { "split": "65536", "merge": "none", "policy": null } }),
            json!({ "listener": { "control": true, "bound": [1, 2] } }),
            json!({ "peer": { "bytes": [1, 2] } }),
        ]
    }

    #[test]
    fn messages_of_0_1_are_understood_and_sent() {
        for message in of_0_1() {
            let parsed: Message = serde_json::from_value(message.clone()).unwrap();
            assert_eq!(serde_json::to_value(&parsed).unwrap(), message);
        }
    }

    #[test]
    fn an_optional_field_may_be_absent_and_an_unknown_one_is_ignored() {
        let mut counters = of_0_1().swap_remove(3);
        let fields = counters["counters"].as_object_mut().unwrap();
        fields.remove("threads");
        fields.insert("of a later version".into(), 1.into());
        let Message::Counters(counters) = serde_json::from_value(counters).unwrap() else { panic!("other counters") };
        assert_eq!((counters.threads, counters.fatal), (None, 1));
    }
}
