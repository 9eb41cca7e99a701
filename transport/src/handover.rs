//! What a server hands to the process that takes its place, so that its peers notice nothing.
//!
//! Knows nothing about what it says: each server writes its own parcels and reads them back. Invariant: to make parcels
//! changes nothing, so that a server whose successor does not come up goes on as before; and a server made of them
//! touches nothing that its peers see before it is started.

use std::os::fd::OwnedFd;

/// One thing to be handed over: bytes, and the descriptors that go along. Small: it is one packet of a socket.
#[derive(Debug)]
pub struct Parcel {
    /// What there is to say.
    pub bytes: Vec<u8>,
    /// What goes along.
    pub descriptors: Vec<OwnedFd>,
}

/// All of a server.
#[derive(Debug)]
pub struct Handover {
    /// The socket at which it listens.
    pub listener: OwnedFd,
    /// Device and inode of that socket's path, if this process has bound it and is to remove it.
    pub bound: Option<(u64, u64)>,
    /// Its peers.
    pub peers: Vec<Parcel>,
}

/// Why a server cannot be handed over, or taken over.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// Something is under way that comes to its end by itself.
    #[error("{0}")]
    NotNow(&'static str),
    /// What was handed over is not understood, or not accepted; or peers of this kind cannot be handed over.
    #[error("{0}")]
    Refused(String),
    /// The system has failed.
    #[error("cannot {0}")]
    Failed(&'static str, #[source] std::io::Error),
}
