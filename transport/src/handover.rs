//! The state that a server hands over to the process that replaces it, unnoticed by its peers.
//!
//! It knows nothing about the contents: each server writes and reads its own parcels. Invariants: creating parcels
//! changes nothing, so that a server whose successor fails to start continues as before; and a server created from them
//! does nothing visible to its peers before it is started.

use std::os::fd::OwnedFd;

/// One unit of handover: bytes, and accompanying descriptors. Small: it is sent as one packet of a socket.
#[derive(Debug)]
pub struct Parcel {
    /// The serialized state.
    pub bytes: Vec<u8>,
    /// Accompanying descriptors.
    pub descriptors: Vec<OwnedFd>,
}

/// The complete state of a server.
#[derive(Debug)]
pub struct Handover {
    /// The listening socket.
    pub listener: OwnedFd,
    /// Device and inode of that socket's path, if this process has bound it and must remove it.
    pub bound: Option<(u64, u64)>,
    /// The connected peers.
    pub peers: Vec<Parcel>,
}

/// Why a server cannot be handed over or taken over.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// A temporary condition; try again later.
    #[error("{0}")]
    NotNow(&'static str),
    /// The state is malformed or not accepted.
    #[error("{0}")]
    Refused(String),
    /// A system call failed.
    #[error("cannot {0}")]
    Failed(&'static str, #[source] std::io::Error),
}
