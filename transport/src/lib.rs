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

use std::fmt::Display;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use disk::{Request, Token};
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

/// A transport that listens for its peers. A capability that only some transports have is a trait of its own, which the
/// server returns if it has it.
pub trait Server: disk::Transport {
    /// Watches the listening socket.
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()>;

    /// Handles a ready descriptor. Requests that arrived are popped afterwards; an error of a peer ends that peer, not
    /// the server.
    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch);

    /// The next change of the server's own memory that holds requests' data, if there is one.
    fn memory_change(&mut self) -> Option<MemoryChange>;

    /// Called before the thread sleeps: has the peers signal new requests. Returns `false` if some arrived in the
    /// meantime, which must be popped first.
    fn may_sleep(&mut self) -> bool;

    /// Sets a new disk size; requests are checked against it. Peers are notified if their protocol supports that;
    /// others see it when they reconnect.
    fn resized(&mut self, geometry: &disk::Geometry, watch: &mut dyn Watch);

    /// A description of where a request came from, for log messages; `None` if there is nothing to report.
    fn place_of(&self, token: Token) -> Option<String>;

    /// The number of peers that use the disk now.
    fn peers(&self) -> usize;

    /// Passes the events since the last call to `log`. How many of them to log is up to the caller.
    fn log_events(&mut self, log: &mut dyn FnMut(&dyn Display));

    /// Takes no more requests; those popped will still be completed. Removes the listening socket's path.
    fn stop(&mut self, watch: &mut dyn Watch);

    /// Where requests can be given back, if the peers keep unanswered requests and submit them again.
    fn takes_back(&mut self) -> Option<&mut dyn TakeBack> {
        None
    }

    /// The way to another process that replaces this one, if the peers can be handed over by descriptors.
    fn hands_over(&mut self) -> Option<&mut dyn HandOver> {
        None
    }

    /// The memory kept for the next requests, if any is.
    fn keeps_memory(&mut self) -> Option<&mut dyn KeepMemory> {
        None
    }

    /// The way to detach the disk, if its guest attaches and detaches it.
    fn detaches(&mut self) -> Option<&mut dyn Detach> {
        None
    }
}

/// A server whose peers keep unanswered requests and submit them again: requests that wait for an external condition,
/// and were not started, need not be answered when the server stops, nor when a peer wants them back.
pub trait TakeBack {
    /// Whether a waiting request is wanted back now: its queue is to stop, or its peer is gone.
    fn recalls(&self, token: Token) -> bool;

    /// Takes back a request that was not started and never will be.
    fn give_back(&mut self, request: Request);

    /// Whether the peers record requests in flight, so that these survive a killed process; `None` if the protocol has
    /// no such record, or no peer uses the disk.
    fn records_in_flight(&self) -> Option<bool>;
}

/// A server that another process can replace without its peers noticing.
pub trait HandOver {
    /// Pauses or resumes taking requests from peers. Requests already taken are still popped.
    fn hold(&mut self, held: bool);

    /// The state that a replacing process needs. Called while held, with no request in flight. It changes nothing.
    fn hand_over(&self) -> Result<Handover, HandoverError>;
}

/// A server that keeps memory of answered requests for the next ones.
pub trait KeepMemory {
    /// Whether that is so much that an idle disk should free it.
    fn keeps_much(&self) -> bool;

    /// Frees it.
    fn free_kept(&mut self);
}

/// A server of a guest's device, which the guest must release before the server stops, unless another process serves it
/// next.
pub trait Detach {
    /// Whether the guest waits for answers to release the disk: its requests should not be kept waiting.
    fn is_finishing(&self) -> bool;

    /// Asks the guest to release the disk, which is served until it has. Returns `true` if it need not be waited for.
    fn close(&mut self) -> bool;

    /// Makes stopping not notify the guest: another process serves the device next, or the guest is gone.
    fn leave(&mut self);

    /// Whether the disk is released, and no guest will use it again.
    fn is_over(&self) -> bool;
}
