//! The messages between a disk's process and its replacement, over a SOCK_SEQPACKET socket: one per packet, with its
//! descriptors.
//!
//! 1. The new process says hello when it has parsed its arguments and dropped privileges that it does not need. The
//!    guest notices nothing until then, and for a while after.
//! 2. The old one stops accepting requests, waits for those in flight, and sends everything: the disk, its files,
//!    sockets, clients.
//! 3. The new one opens the image and says that it has taken everything. It has written nothing, neither to a file nor
//!    to the guest: the old one can still continue as before.
//! 4. The old one says go, and never touches anything again. If the connection ends before that, the new one must exit.
//!
//! It knows nothing about disks and servers. Invariants: a packet is accepted completely and with exactly the
//! descriptors that belong to it, or rejected; the messages of each release since 0.1 are understood. A field that a
//! later one adds is an `Option`, which is none where it is absent; an older program ignores it.

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
use super::shaping::Shaping;
use crate::files::passed::descriptors_of;
use crate::serve::stats::Counters;

/// Bytes of a packet: the longest has one path.
const PACKET_MAX: usize = 64 << 10;
/// Descriptors of a packet: a connection's, and those of a message of which only a part has come.
const DESCRIPTORS_MAX: usize = 16;

/// The messages. Each is followed by as many descriptors as its description says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Said {
    /// The new process has understood its words. None.
    Hello {
        /// Its version.
        program: String,
        /// Its number.
        pid: u32,
    },
    /// A layer of the disk, the leaf first. One for each file that its name names.
    Layer {
        /// Its name, as FORMAT:PATH.
        name: String,
        /// Whether it is open for writing too.
        write: bool,
    },
    /// The redo log of a layer, where logs are handed over; the statistics page or the page of shares. One.
    Log {
        /// Its name; of a log, derived from its image's file.
        name: PathBuf,
    },
    /// I/O statistics of the disk. No descriptors.
    Counters(Box<Counters>),
    /// What the disk is limited to. None.
    Limits(Box<limits::Handed>),
    /// How its transfers are split and merged. None.
    Shape(Box<Shaping>),
    /// The socket at which the disk's peers connect, or those of the control socket. One.
    Listener {
        /// Whether it is the control socket.
        control: bool,
        /// Device and inode of its path, if that is to be removed at the end.
        bound: Option<(u64, u64)>,
    },
    /// A peer, or a part of one. Any number.
    Peer {
        /// The server's own message.
        bytes: Vec<u8>,
    },
    /// That was all. None.
    All,
    /// Everything is taken, and nothing begun. None.
    Taken,
    /// The old process has let go. None.
    Go,
    /// The old process goes on. None.
    Stay,
}

/// One end of the socket.
#[derive(Debug)]
pub struct Channel(OwnedFd);

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other process has ended, or closed its end.
    #[error("the other process has exited")]
    Closed,
    /// It takes longer than it may.
    #[error("the other process did not answer in time")]
    Late,
    /// An unexpected message was received.
    #[error("the other process sent an unexpected message: {0}")]
    Strange(String),
    /// The system has failed.
    #[error("the socket between two processes of the disk failed")]
    Failed(#[source] io::Error),
}

impl Channel {
    /// Over this socket, if it is of the kind.
    pub fn over(socket: OwnedFd) -> Result<Channel, ChannelError> {
        match sockopt::socket_type(&socket) {
            Ok(SocketType::SEQPACKET) => Ok(Channel(socket)),
            _ => Err(ChannelError::Strange("its socket is not a SOCK_SEQPACKET socket".into())),
        }
    }

    /// Says something, waiting until `until` at most for the other process to take it.
    pub fn say(&self, said: &Said, descriptors: &[BorrowedFd<'_>], until: Option<Instant>) -> Result<(), ChannelError> {
        let bytes = serde_json::to_vec(said).map_err(|error| ChannelError::Strange(error.to_string()))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(ChannelError::Strange(format!("more than {DESCRIPTORS_MAX} descriptors")));
        }
        self.wait_at_most(Timeout::Send, until)?;
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(ChannelError::Late),
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ChannelError::Closed),
                Err(errno) => return Err(ChannelError::Failed(errno.into())),
            }
        }
    }

    /// The next message, waiting until `until` at most.
    pub fn hear(&self, until: Option<Instant>) -> Result<(Said, Vec<OwnedFd>), ChannelError> {
        self.wait_at_most(Timeout::Recv, until)?;
        self.receive(RecvFlags::CMSG_CLOEXEC)
    }

    /// A message that has already arrived, if there is one.
    pub fn hear_now(&self) -> Result<Option<(Said, Vec<OwnedFd>)>, ChannelError> {
        match self.receive(RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT) {
            Err(ChannelError::Late) => Ok(None),
            heard => heard.map(Some),
        }
    }

    fn wait_at_most(&self, direction: Timeout, until: Option<Instant>) -> Result<(), ChannelError> {
        // None at all would be for ever.
        let left = until.map(|until| until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        sockopt::set_socket_timeout(&self.0, direction, left).map_err(|errno| ChannelError::Failed(errno.into()))
    }

    fn receive(&self, flags: RecvFlags) -> Result<(Said, Vec<OwnedFd>), ChannelError> {
        let mut buffer = vec![0; PACKET_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(&mut buffer)], &mut beside, flags) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(ChannelError::Late),
                Err(Errno::CONNRESET) => return Err(ChannelError::Closed),
                Err(errno) => return Err(ChannelError::Failed(errno.into())),
                Ok(received) => break received,
            }
        };
        let descriptors = descriptors_of(&mut beside);
        if received.bytes == 0 {
            return Err(ChannelError::Closed);
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(ChannelError::Strange("more than a packet can carry".into()));
        }
        let said = serde_json::from_slice(buffer.get(..received.bytes).unwrap_or_default());
        let said = said.map_err(|error| ChannelError::Strange(error.to_string()))?;
        match wanted(&said).is_none_or(|wanted| descriptors.len() == wanted) {
            true => Ok((said, descriptors)),
            false => Err(ChannelError::Strange(format!("{} descriptors with {said:?}", descriptors.len()))),
        }
    }
}

/// How many descriptors go with it; `None` for any number.
fn wanted(said: &Said) -> Option<usize> {
    match said {
        // An invalid name is rejected by the receiver.
        Said::Layer { name, .. } => Some(name.parse::<ImageName>().map_or(1, |name| name.paths().count())),
        Said::Log { .. } | Said::Listener { .. } => Some(1),
        Said::Peer { .. } => None,
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

    /// The messages that a process of version 0.1 sends, but for those that have no contents.
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
            let said: Said = serde_json::from_value(message.clone()).unwrap();
            assert_eq!(serde_json::to_value(&said).unwrap(), message);
        }
    }

    #[test]
    fn an_optional_field_may_be_absent_and_an_unknown_one_is_ignored() {
        let mut counters = of_0_1().swap_remove(3);
        let fields = counters["counters"].as_object_mut().unwrap();
        fields.remove("threads");
        fields.insert("of a later version".into(), 1.into());
        let Said::Counters(counters) = serde_json::from_value(counters).unwrap() else { panic!("other counters") };
        assert_eq!((counters.threads, counters.fatal), (None, 1));
    }
}
