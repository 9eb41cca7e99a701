//! Events of a server that are worth logging.
//!
//! It knows nothing about where they are logged, nor how many are buffered ([`crate::log`]).

use std::fmt;

use super::ring::Broken;
use crate::log::LogEvent;

/// An event worth a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A front-end has connected.
    Connected,
    /// A front-end was refused, because another one is connected.
    SecondRefused,
    /// The front-end has disconnected, or was disconnected.
    Disconnected {
        /// The reason.
        why: String,
        /// The number of requests in flight; their results are discarded.
        in_flight: usize,
    },
    /// A request of the front-end was refused.
    Refused {
        /// The reason.
        why: String,
    },
    /// A queue is no longer served because its driver violated the protocol.
    QueueBroken {
        /// The queue.
        queue: usize,
        /// The violation.
        why: Broken,
    },
    /// A ring was started, with or without a record of requests in flight.
    Started {
        /// Whether there is a record.
        recorded: bool,
    },
    /// Requests are taken again that an earlier process, or this one before the queue was stopped, has not answered.
    Resumed {
        /// The queue.
        queue: usize,
        /// Their number.
        count: usize,
    },
    /// A request of a queue uses memory that the front-end has removed; no more requests are taken until it changes its
    /// memory again, which happens at once if it is only moving regions.
    WaitingForMemory {
        /// The queue.
        queue: usize,
    },
    /// A connection could not be accepted.
    AcceptFailed {
        /// The reason.
        why: String,
    },
    /// The front-end was notified of a new size.
    SizeAnnounced {
        /// The new size in bytes.
        len: u64,
    },
    /// The front-end cannot be notified of a new size.
    SizeNotAnnounced {
        /// The new size in bytes.
        len: u64,
    },
    /// The number of events that were not recorded.
    More(usize),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Connected => write!(f, "a front-end has connected"),
            Event::SecondRefused => write!(f, "refused a second front-end while one is connected"),
            Event::Disconnected { why, in_flight: 0 } => write!(f, "the front-end is gone: {why}"),
            Event::Disconnected { why, in_flight } => {
                write!(f, "the front-end is gone with {in_flight} requests in flight: {why}")
            }
            Event::Refused { why } => write!(f, "refused a request of the front-end: {why}"),
            Event::QueueBroken { queue, why } => write!(f, "queue {queue} is broken by its driver: {why}"),
            Event::Started { recorded: true } => {
                write!(f, "the front-end records requests in flight: they survive a crash of this process")
            }
            Event::Started { recorded: false } => {
                write!(f, "the front-end does not record requests in flight: requests are answered in order")
            }
            Event::Resumed { queue, count } => {
                write!(f, "queue {queue} continues with {count} requests that were taken before and not answered")
            }
            Event::WaitingForMemory { queue } => {
                write!(f, "queue {queue} waits for memory that the front-end has removed")
            }
            Event::AcceptFailed { why } => write!(f, "cannot accept a connection: {why}"),
            Event::SizeAnnounced { len } => write!(f, "notified the front-end of the new disk size: {len} bytes"),
            Event::SizeNotAnnounced { len } => {
                write!(
                    f,
                    "cannot notify the front-end of the new disk size ({len} bytes); it will see it when it reconnects"
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

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn excess_events_are_counted_and_not_buffered() {
        let mut log = Log::default();
        for _ in 0..Event::CAPACITY + 1000 {
            log.record(Event::SecondRefused);
        }
        let events = log.take();
        assert_eq!(events.len(), Event::CAPACITY + 1);
        assert_eq!(events.last(), Some(&Event::More(1000)));
        assert!(log.take().is_empty());
    }
}
