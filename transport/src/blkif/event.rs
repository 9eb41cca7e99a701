//! What happened at a front end that the disk's owner may want to log.
//!
//! Knows nothing about where it is logged, nor how many there may be ([`crate::log`]).

use std::error::Error;
use std::fmt;

use super::ring::Broken;
use crate::log::{Noted, in_full};

/// Something worth a line in a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The front end may come: it was told what there is.
    Announced,
    /// The front end is connected.
    Connected {
        /// Rings.
        queues: usize,
        /// Pages of each.
        pages: usize,
        /// How its pages are reached.
        grants: &'static str,
        /// It was connected to another process before us.
        taken_over: bool,
    },
    /// What the front end has written about itself cannot be used.
    Refused {
        /// Why.
        why: String,
    },
    /// The rings of the front end cannot be taken now. If it is connected it stays so, and they are tried again.
    NotYet {
        /// Why.
        why: String,
    },
    /// The front end is gone, or begins anew.
    Disconnected {
        /// Why.
        why: &'static str,
        /// Requests that were under way, which are finished into nothing.
        in_flight: usize,
    },
    /// A queue is not served any more, since its front end broke the rules.
    QueueBroken {
        /// The queue.
        queue: usize,
        /// How.
        why: Broken,
    },
    /// Something of Xen did not do what was asked of it.
    Failed {
        /// What was tried.
        what: &'static str,
        /// Why not.
        why: String,
    },
    /// The front end was told of a new size.
    SizeTold {
        /// Bytes of the disk.
        len: u64,
    },
    /// The device is closed.
    Closed,
    /// The front end did not let the device go in time.
    StillUsed {
        /// The state that it stays in.
        state: &'static str,
    },
    /// So many more events happened.
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
            Event::NotYet { why } => {
                write!(f, "the front end waits, since its rings cannot be taken now: {why}; trying again")
            }
            Event::Disconnected { why, in_flight: 0 } => write!(f, "disconnected: {why}"),
            Event::Disconnected { why, in_flight } => {
                write!(f, "disconnected with {in_flight} requests under way: {why}")
            }
            Event::QueueBroken { queue, why } => write!(f, "queue {queue} is broken by its front end: {why}"),
            Event::Failed { what, why } => write!(f, "{what}: {why}"),
            Event::SizeTold { len } => write!(f, "the front end was told that the disk has {len} bytes now"),
            Event::Closed => write!(f, "the device is closed"),
            Event::StillUsed { state } => {
                write!(
                    f,
                    "the front end stays {state} and does not let the device go; the guest has it in use: \
                     unmount it there, or detach by force"
                )
            }
            Event::More(count) => write!(f, "and {count} more events"),
        }
    }
}

impl Noted for Event {
    const ROOM: usize = 64;

    fn more(count: usize) -> Event {
        Event::More(count)
    }
}

/// Events not looked at yet.
pub type Log = crate::log::Log<Event>;

impl Log {
    /// Notes what could not be done.
    pub fn failed(&mut self, what: &'static str, why: &dyn Error) {
        self.note(Event::Failed { what, why: in_full(why) });
    }
}
