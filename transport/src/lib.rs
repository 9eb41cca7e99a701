//! Peers that ask a disk for I/O, each speaking its own protocol: vhost-user-blk, NBD and blkif.
//!
//! A server here owns its sockets and rings but no wait: it names the file descriptors it wants to hear of
//! ([`Watch`]) and is told when one is ready ([`Server::ready`]). Every byte that a peer can write is hostile.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

// What tests of this crate and those beside it share calls it by its name.
#[cfg(test)]
extern crate self as transport;

pub mod blkif;
mod bound_path;
mod handover;
mod log;
pub mod nbd;
mod timer;
mod unix_socket;
pub mod vhost_user;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use disk::{Request, Status, Token};
use memory::Buffer;

pub use handover::{Handover, HandoverError, Parcel};
pub use timer::Timer;

/// A server's own name for a file descriptor it watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchKey(pub u64);

/// What to wait for on a file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes to read, a connection to accept, an event signalled, the peer gone.
    Read,
    /// Also room to write.
    ReadWrite,
}

/// The wait of the disk's thread, as a server sees it.
pub trait Watch {
    /// Reports `key` when `fd` is ready now, and after that each time something new arrives on it (edge
    /// triggered: a socket is to be read until it would block; an eventfd need not be read at all). Watching a
    /// key again replaces its interest. The caller keeps `fd` open until it has called `forget`.
    fn watch(&mut self, fd: BorrowedFd<'_>, interest: Interest, key: WatchKey) -> io::Result<()>;

    /// No more reports for `key`, except one that may be under way already.
    fn forget(&mut self, key: WatchKey);
}

/// A change of the memory of a server's own that the data of requests lie in. An engine may make itself ready for it.
pub enum MemoryChange {
    /// Much goes through this from now on.
    Comes(Arc<Buffer>),
    /// Nothing more does.
    Goes(Arc<Buffer>),
}

/// A transport that listens for its peers.
pub trait Server: disk::Transport {
    /// Watches the listening socket.
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()>;

    /// Something watched is ready. Requests that came with it are popped afterwards; errors of a peer end that
    /// peer, not the server.
    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch);

    /// The next change of our own memory in which requests' data lie, if there is one. A server without such memory has
    /// none.
    fn memory_change(&mut self) -> Option<MemoryChange> {
        None
    }

    /// Called before the thread sleeps: asks the peers to signal new requests. `false` if some came in the
    /// meantime, which are to be popped first.
    fn may_sleep(&mut self) -> bool;

    /// The disk has this size now, and requests are held to it. Peers are told where their protocol has words for it;
    /// the others see it when they come again.
    fn resized(&mut self, geometry: &disk::Geometry, watch: &mut dyn Watch);

    /// Whether its peers keep what is not answered and offer it again: then what waits for something outside, and was
    /// not begun, need not be answered when the server stops, nor when a peer wants it back.
    fn takes_back(&self) -> bool {
        false
    }

    /// Whether a request that waits is wanted back now ([`Server::give_back`]): its queue is to stop, or its peer has
    /// gone.
    fn recalls(&self, _token: Token) -> bool {
        false
    }

    /// Takes back a request of which nothing is under way and nothing will be done. A server that takes nothing back
    /// answers that there is no space, since that is what the request has waited for.
    fn give_back(&mut self, request: Request) {
        self.complete(request, Status::NoSpace);
    }

    /// Takes nothing more from its peers, or does so again. What it has taken and not handed out yet is still popped.
    fn hold(&mut self, _held: bool) {}

    /// Whether another process can take the place of this one by [`Server::hand_over`].
    fn can_hand_over(&self) -> bool {
        false
    }

    /// All that the process which takes the place of this one needs. While held, with no request under way. Nothing is
    /// changed by it.
    fn hand_over(&self) -> Result<Handover, HandoverError> {
        Err(HandoverError::Refused("its peers cannot be handed over by descriptors".into()))
    }

    /// Whether the peers record what is in flight, so that it survives this process; `None` where none says.
    fn records_in_flight(&self) -> Option<bool> {
        None
    }

    /// Where a request came from, for people; `None` where there is nothing to say.
    fn place_of(&self, _token: Token) -> Option<String> {
        None
    }

    /// Peers that use the disk now.
    fn peers(&self) -> usize;

    /// No more requests are taken in; those popped will still be completed. The listening socket's path is removed.
    fn stop(&mut self, watch: &mut dyn Watch);
}
