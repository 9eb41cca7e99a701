//! Why a front end's rings could not be attached, and whether to retry.
//!
//! It knows nothing about how they are attached. Invariant: for a connected front end attaching is retried after every
//! error.

use std::io;

use rustix::io::Errno;
use xen::StoreError;

use super::kill_point::{InjectedBug, injected};
use super::node::KeysError;
use super::ring::Broken;
use super::state::{Handshake, XenbusState};

/// The number of attempts for a front end that is not connected: its rings may not exist; or it is closing, and may
/// have released the rings in which an earlier process has left requests unanswered.
const ATTEMPTS: u32 = 4;

/// Why the rings could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The keys of the front end are invalid.
    #[error("its keys are invalid")]
    Keys(#[source] KeysError),
    /// The pages of a ring cannot be mapped.
    #[error("cannot map ring {queue}")]
    Map {
        /// Index of the ring.
        queue: usize,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The contents of a ring are invalid.
    #[error("ring {queue} is malformed")]
    Ring {
        /// Index of the ring.
        queue: usize,
        /// The cause.
        #[source]
        source: Broken,
    },
    /// An event channel cannot be bound.
    #[error("cannot bind the event channel of ring {queue}")]
    Bind {
        /// Index of the ring.
        queue: usize,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Our node in the store cannot be read or written.
    #[error("cannot update the backend node in the store")]
    Store(#[source] StoreError),
}

impl AttachError {
    /// The errno for the error report in the store.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            AttachError::Map { source, .. } | AttachError::Bind { source, .. } => source.raw_os_error(),
            AttachError::Keys(_) | AttachError::Ring { .. } | AttachError::Store(_) => None,
        };
        errno.unwrap_or(Errno::INVAL.raw_os_error())
    }

    /// Returns true if attaching should be retried after this number of attempts. A connected front end is never made
    /// to close.
    pub fn should_retry(&self, handshake: &Handshake, attempts: u32) -> bool {
        let may_be_our_fault = matches!(self, AttachError::Map { .. } | AttachError::Bind { .. });
        let again = match (handshake.ours, handshake.theirs) {
            (_, Some(XenbusState::Closing | XenbusState::Closed)) => may_be_our_fault && attempts < ATTEMPTS,
            (Some(XenbusState::Connected), _) => true,
            (_, Some(XenbusState::Connected)) => may_be_our_fault,
            _ => may_be_our_fault && attempts < ATTEMPTS,
        };
        again && !injected(InjectedBug::FailureIsFinal)
    }
}
