//! What happened at a server that its owner may want to log.
//!
//! Knows nothing about where it is logged, nor how many there may be ([`crate::log`]).

use std::fmt;

use super::ring::Broken;
use crate::log::LogEvent;

/// Something worth a line in a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A front-end has connected.
    Connected,
    /// A front-end was turned away, since one is connected already.
    TurnedAway,
    /// The front-end has gone, or was sent away.
    Disconnected {
        /// Why.
        why: String,
        /// Requests that were under way, which are finished into nothing.
        in_flight: usize,
    },
    /// A request of the front-end was answered with "no".
    Refused {
        /// Why.
        why: String,
    },
    /// A queue is not served any more, since its driver broke the rules.
    QueueBroken {
        /// The queue.
        queue: usize,
        /// How.
        why: Broken,
    },
    /// A ring runs, and what is in flight in it is recorded by the front-end, or is not.
    Started {
        /// It is recorded.
        recorded: bool,
    },
    /// Requests were taken by a process before this one, or before the queue was stopped, and not answered.
    TakenAgain {
        /// The queue.
        queue: usize,
        /// How many.
        count: usize,
    },
    /// A request of a queue lies in memory that the front-end has taken away; no more are taken until it changes memory
    /// again, which is at once where it only moves things.
    Waits {
        /// The queue.
        queue: usize,
    },
    /// A connection could not be taken in.
    AcceptFailed {
        /// Why.
        why: String,
    },
    /// The front-end was told of a new size.
    SizeTold {
        /// Bytes of the disk.
        len: u64,
    },
    /// The front-end has no ear for a new size.
    SizeUntold {
        /// Bytes of the disk.
        len: u64,
    },
    /// So many more events happened.
    More(usize),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Connected => write!(f, "a front-end has connected"),
            Event::TurnedAway => write!(f, "a second front-end was turned away while one is connected"),
            Event::Disconnected { why, in_flight: 0 } => write!(f, "the front-end is gone: {why}"),
            Event::Disconnected { why, in_flight } => {
                write!(f, "the front-end is gone with {in_flight} requests under way: {why}")
            }
            Event::Refused { why } => write!(f, "refused a request of the front-end: {why}"),
            Event::QueueBroken { queue, why } => write!(f, "queue {queue} is broken by its driver: {why}"),
            Event::Started { recorded: true } => {
                write!(f, "the front-end records what is in flight: it survives the end of this process")
            }
            Event::Started { recorded: false } => write!(
                f,
                "the front-end records nothing of what is in flight: answers are given in the order of the requests"
            ),
            Event::TakenAgain { queue, count } => {
                write!(f, "queue {queue} goes on with {count} requests that were taken before and not answered")
            }
            Event::Waits { queue } => write!(f, "queue {queue} waits for memory that the front-end has taken away"),
            Event::AcceptFailed { why } => write!(f, "cannot take in a connection: {why}"),
            Event::SizeTold { len } => write!(f, "the front-end was told that the disk has {len} bytes now"),
            Event::SizeUntold { len } => {
                write!(
                    f,
                    "the front-end cannot be told that the disk has {len} bytes now; it sees so when it comes again"
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

/// Events not looked at yet.
pub type Log = crate::log::Log<Event>;

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_flood_of_events_is_counted_not_kept() {
        let mut log = Log::default();
        for _ in 0..Event::CAPACITY + 1000 {
            log.record(Event::TurnedAway);
        }
        let events = log.take();
        assert_eq!(events.len(), Event::CAPACITY + 1);
        assert_eq!(events.last(), Some(&Event::More(1000)));
        assert!(log.take().is_empty());
    }
}
