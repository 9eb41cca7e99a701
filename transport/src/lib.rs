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
pub mod unix_socket;
pub mod vhost_user;

use std::fmt::Display;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use disk::{Request, Token};
use memory::Buffer;

pub use bound_path::BoundPath;
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

/// A change of the buffers in which a server keeps the data of requests. An engine may register them.
pub enum MemoryChange {
    /// A new buffer is used for requests.
    Comes(Arc<Buffer>),
    /// A buffer is no longer used.
    Goes(Arc<Buffer>),
}

/// A transport that listens for its peers. Capabilities that only some transports have are traits of their own:
/// a method of this trait returns `Some` if the server has the capability.
pub trait Server: disk::Transport {
    /// Watches the listening socket.
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()>;

    /// Handles a ready descriptor. Requests that arrived are popped afterwards; an error of a peer ends that peer, not
    /// the server.
    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch);

    /// The next change of the buffers in which the server keeps the data of requests, if there is one.
    fn memory_change(&mut self) -> Option<MemoryChange>;

    /// Called before the thread sleeps: enables notifications by the peers. Returns `false` if requests have arrived
    /// meanwhile, which must be popped first.
    fn may_sleep(&mut self) -> bool;

    /// Sets a new disk size; requests are checked against it. Peers are notified if their protocol supports that;
    /// others see it when they reconnect.
    fn resized(&mut self, geometry: &disk::Geometry, watch: &mut dyn Watch);

    /// A description of the origin of a request, for log messages; `None` if the protocol has nothing to report.
    fn place_of(&self, token: Token) -> Option<String>;

    /// The number of connected peers.
    fn peers(&self) -> usize;

    /// Passes the events since the last call to `log`. How many of them to log is up to the caller.
    fn log_events(&mut self, log: &mut dyn FnMut(&dyn Display));

    /// Accepts no more requests; those popped are still completed. Removes the listening socket's path.
    fn stop(&mut self, watch: &mut dyn Watch);

    /// The interface for giving requests back, if the peers keep unanswered requests and submit them again.
    fn takes_back(&mut self) -> Option<&mut dyn TakeBack> {
        None
    }

    /// The interface for handing the peers over to another process, if that is possible by passing descriptors.
    fn hands_over(&mut self) -> Option<&mut dyn HandOver> {
        None
    }

    /// The interface for freeing memory kept for further requests, if the server keeps any.
    fn keeps_memory(&mut self) -> Option<&mut dyn KeepMemory> {
        None
    }

    /// The interface for dirty bitmaps, if the protocol has them.
    fn shows_bitmaps(&mut self) -> Option<&mut dyn ShowBitmaps> {
        None
    }

    /// The interface for detaching the disk, if it is a guest's device.
    fn detaches(&mut self) -> Option<&mut dyn Detach> {
        None
    }
}

/// A server whose peers keep unanswered requests and submit them again. Requests that were not started, because they
/// wait for an external condition, need not be answered when the server stops or a queue is stopped.
pub trait TakeBack {
    /// Returns true if a waiting request must be given back now: its queue is being stopped, or its peer is gone.
    fn recalls(&self, token: Token) -> bool;

    /// Takes back a request that was not started and never will be.
    fn give_back(&mut self, request: Request);

    /// Returns true if the peers record requests in flight, so that these survive a killed process; `None` if the
    /// protocol has no such record, or no peer is connected.
    fn records_in_flight(&self) -> Option<bool>;
}

/// A server that another process can replace unnoticed by its peers.
pub trait HandOver {
    /// Pauses or resumes taking requests from peers. Requests already taken can still be popped.
    fn hold(&mut self, held: bool);

    /// The state for the process that replaces this one. Called while held, with no request in flight. Changes nothing.
    fn hand_over(&self) -> Result<Handover, HandoverError>;

    /// Ends the peers that the handover left out, after the other process has taken over.
    fn end_left_behind(&mut self);
}

/// A server whose peers can query dirty bitmaps of the disk, which its owner knows.
pub trait ShowBitmaps {
    /// Like [`disk::Transport::complete`], for [`disk::Operation::Extents`]; `bitmaps` are those of the export as they
    /// are now. By the other method everything is described as dirty.
    fn complete_with(&mut self, request: Request, status: disk::Status, bitmaps: &dyn nbd::Bitmaps);
}

/// A server that reuses the memory of answered requests for further ones.
pub trait KeepMemory {
    /// Returns true if it keeps more memory than an idle disk should.
    fn keeps_much(&self) -> bool;

    /// Frees the kept memory.
    fn free_kept(&mut self);
}

/// A server of a guest's device, which the guest must release before the server stops, unless another process serves it
/// next.
pub trait Detach {
    /// Returns true while the guest waits for replies before it releases the disk: its requests must not be delayed.
    fn is_finishing(&self) -> bool;

    /// Requests that the guest release the disk, which is served until then. Returns true if there is nothing to wait
    /// for.
    fn close(&mut self) -> bool;

    /// Makes [`Server::stop`] not notify the guest: another process serves the device next, or the guest is gone.
    fn leave(&mut self);

    /// Returns true if the disk is released, and no guest will use it again.
    fn is_over(&self) -> bool;
}
