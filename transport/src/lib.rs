//! Servers through which peers access a disk, each with its own protocol: vhost-user-blk, NBD and blkif.
//!
//! A server here owns its sockets and rings but does not wait: it registers the file descriptors to be watched
//! ([`Watch`]) and is called when one is ready ([`Server::ready`]). Every byte that a peer can write is hostile.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

// Code shared by the tests of this crate and other crates uses the crate by its name.
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

/// A server's key for a file descriptor it watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchKey(pub u64);

/// The readiness to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Readable: bytes, a connection, a signalled event, or hang-up.
    Read,
    /// Writable as well.
    ReadWrite,
}

/// The event loop of the disk's thread, as seen by a server.
pub trait Watch {
    /// Reports `key` when `fd` is ready now, and after that at each new event (edge triggered: a socket must be read
    /// until it would block; an eventfd need not be read at all). Watching a key again replaces its interest. The
    /// caller keeps `fd` open until it has called `forget`.
    fn watch(&mut self, fd: BorrowedFd<'_>, interest: Interest, key: WatchKey) -> io::Result<()>;

    /// Stops reporting `key`; one report may already be in progress.
    fn forget(&mut self, key: WatchKey);
}

/// A change of a server's own memory that holds the data of requests. An engine may register it.
pub enum MemoryChange {
    /// Much I/O goes through this buffer from now on.
    Comes(Arc<Buffer>),
    /// No more I/O goes through it.
    Goes(Arc<Buffer>),
}

/// A transport that listens for its peers.
pub trait Server: disk::Transport {
    /// Watches the listening socket.
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()>;

    /// Handles a ready descriptor. Requests that arrived are popped afterwards; an error of a peer ends that peer, not
    /// the server.
    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch);

    /// The next change of our own memory that holds requests' data, if there is one. A server without such memory has
    /// none.
    fn memory_change(&mut self) -> Option<MemoryChange> {
        None
    }

    /// Called before the thread sleeps: asks the peers to signal new requests. Returns `false` if some arrived in the
    /// meantime, which must be popped first.
    fn may_sleep(&mut self) -> bool;

    /// Sets a new disk size; requests are checked against it. Peers are notified if their protocol supports that;
    /// others see it when they reconnect.
    fn resized(&mut self, geometry: &disk::Geometry, watch: &mut dyn Watch);

    /// Whether its peers keep unanswered requests and submit them again: then requests that wait for an external
    /// condition, and were not started, need not be answered when the server stops, nor when a peer wants them back.
    fn takes_back(&self) -> bool {
        false
    }

    /// Whether a waiting request is wanted back now ([`Server::give_back`]): its queue is to stop, or its peer is gone.
    fn recalls(&self, _token: Token) -> bool {
        false
    }

    /// Whether a peer waits for answers to let the disk go: its requests should not be kept waiting.
    fn is_finishing(&self) -> bool {
        false
    }

    /// Takes back a request that was not started and never will be. A server that cannot take requests back fails it
    /// with no space, since that is what the request has waited for.
    fn give_back(&mut self, request: Request) {
        self.complete(request, Status::NoSpace);
    }

    /// Pauses or resumes taking requests from peers. Requests already taken are still popped.
    fn hold(&mut self, _held: bool) {}

    /// Whether another process can replace this one through [`Server::hand_over`].
    fn can_hand_over(&self) -> bool {
        false
    }

    /// The state that a replacing process needs. Called while held, with no request in flight. It changes nothing.
    fn hand_over(&self) -> Result<Handover, HandoverError> {
        Err(HandoverError::Refused("its peers cannot be handed over by descriptors".into()))
    }

    /// Whether the peers record requests in flight, so that these survive this process; `None` if the protocol has no
    /// such record.
    fn records_in_flight(&self) -> Option<bool> {
        None
    }

    /// A description of where a request came from, for log messages; `None` if there is nothing to report.
    fn place_of(&self, _token: Token) -> Option<String> {
        None
    }

    /// Whether it keeps so much memory for the next requests that an idle disk should free it.
    fn keeps_memory(&self) -> bool {
        false
    }

    /// Frees the memory kept for the next requests.
    fn free_kept_memory(&mut self) {}

    /// The number of peers that use the disk now.
    fn peers(&self) -> usize;

    /// Takes no more requests; those popped will still be completed. Removes the listening socket's path.
    fn stop(&mut self, watch: &mut dyn Watch);
}
