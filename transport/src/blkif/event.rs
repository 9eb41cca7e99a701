//! Events at a front end that are worth logging.
//!
//! It knows nothing about where they are logged, nor how many are buffered ([`crate::log`]).

use std::error::Error;
use std::fmt;

use super::ring::Broken;
use crate::log::{LogEvent, with_causes};

/// An event worth a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The backend's features were announced; the front end may connect.
    Announced,
    /// The front end is connected.
    Connected {
        /// The number of rings.
        queues: usize,
        /// The number of pages per ring.
        pages: usize,
        /// How its pages are accessed.
        grants: &'static str,
        /// It was connected to another process before.
        taken_over: bool,
    },
    /// The keys of the front end in the store are invalid.
    Refused {
        /// The reason.
        why: String,
    },
    /// The rings of the front end cannot be attached now. A connected front end stays connected, and attaching is
    /// retried.
    Retrying {
        /// The reason.
        why: String,
    },
    /// The front end has disconnected, or restarts.
    Disconnected {
        /// The reason.
        why: &'static str,
        /// The number of requests in flight; their results are discarded.
        in_flight: usize,
    },
    /// A queue is no longer served because its front end violated the protocol.
    QueueBroken {
        /// The queue.
        queue: usize,
        /// The violation.
        why: Broken,
    },
    /// An operation of Xen failed.
    Failed {
        /// The failure, as a phrase.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// The front end was notified of a new size.
    SizeAnnounced {
        /// The new size in bytes.
        len: u64,
    },
    /// The device is closed.
    Closed,
    /// The front end did not release the device in time.
    StillUsed {
        /// The current state of the front end.
        state: &'static str,
    },
    /// The number of events that were not recorded.
    More(usize),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Announced => write!(f, "waiting for the front end"),
            Event::Connected { queues, pages, grants, taken_over } => {
                let how = if *taken_over { "taken over" } else { "connected" };
                write!(f, "the front end is {how}: {queues} rings of {pages} pages, grants by {grants}")
            }
            Event::Refused { why } => write!(f, "the front end cannot be connected: {why}"),
            Event::Retrying { why } => {
                write!(f, "the front end waits: its rings cannot be attached now: {why}; retrying")
            }
            Event::Disconnected { why, in_flight: 0 } => write!(f, "disconnected: {why}"),
            Event::Disconnected { why, in_flight } => {
                write!(f, "disconnected with {in_flight} requests in flight: {why}")
            }
            Event::QueueBroken { queue, why } => write!(f, "queue {queue} is broken by its front end: {why}"),
            Event::Failed { what, why } => write!(f, "{what}: {why}"),
            Event::SizeAnnounced { len } => write!(f, "notified the front end of the new disk size: {len} bytes"),
            Event::Closed => write!(f, "the device is closed"),
            Event::StillUsed { state } => {
                write!(
                    f,
                    "the front end stays {state}: the guest still uses the device; \
                     unmount it there, or detach by force"
                )
            }
            Event::More(count) => write!(f, "and {count} more events"),
        }
    }
}

impl LogEvent for Event {
    const CAPACITY: usize = 64;

    fn dropped(count: usize) -> Event {
        Event::More(count)
    }
}

/// The buffer of events that were not taken yet.
pub type Log = crate::log::Log<Event>;

impl Log {
    /// Logs a failed operation.
    pub fn failed(&mut self, what: &'static str, why: &dyn Error) {
        self.record(Event::Failed { what, why: with_causes(why) });
    }
}
