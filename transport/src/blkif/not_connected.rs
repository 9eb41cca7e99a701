//! Why a front end's rings could not be taken, and whether they are to be tried again.
//!
//! Knows nothing of how they are taken. Invariant: a front end that is connected is tried again, whatever it was.

use std::io;

use rustix::io::Errno;
use xen::StoreError;

use super::moment::{Mistake, mistake};
use super::node::Unusable;
use super::ring::Broken;
use super::state::{Seen, State};

/// Attempts at the rings of a front end that is not connected: it may name rings that there are not; or it closes, and
/// may have given up those in which a process that is gone owes it answers.
const ATTEMPTS: u32 = 4;

/// Why the rings could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum NotConnected {
    /// What it has written.
    #[error("its keys cannot be used")]
    Keys(#[source] Unusable),
    /// Its pages.
    #[error("its ring {queue} cannot be mapped")]
    Map {
        /// Which.
        queue: usize,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// What is in them.
    #[error("its ring {queue} is not one")]
    Ring {
        /// Which.
        queue: usize,
        /// Why.
        #[source]
        source: Broken,
    },
    /// Its signals.
    #[error("the event channel of its ring {queue} cannot be bound")]
    Bind {
        /// Of which ring.
        queue: usize,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The store does not take, or give, what is ours.
    #[error("our node cannot be written")]
    Say(#[source] StoreError),
}

impl NotConnected {
    /// The number that complaints begin with.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            NotConnected::Map { source, .. } | NotConnected::Bind { source, .. } => source.raw_os_error(),
            NotConnected::Keys(_) | NotConnected::Ring { .. } | NotConnected::Say(_) => None,
        };
        errno.unwrap_or(Errno::INVAL.raw_os_error())
    }

    /// Whether the front end is to have another attempt, after so many. One that is connected is never told to close.
    pub fn is_tried_again(&self, seen: &Seen, attempts: u32) -> bool {
        let ours_to_blame = matches!(self, NotConnected::Map { .. } | NotConnected::Bind { .. });
        let again = match (seen.ours, seen.theirs) {
            (_, Some(State::Closing | State::Closed)) => ours_to_blame && attempts < ATTEMPTS,
            (Some(State::Connected), _) => true,
            (_, Some(State::Connected)) => ours_to_blame,
            _ => ours_to_blame && attempts < ATTEMPTS,
        };
        again && !mistake(Mistake::FailureIsFinal)
    }
}
