//! What happened at a server that its owner may want to log.
//!
//! Knows nothing about where it is logged. Invariant: a hostile peer can cause any number of events, and still
//! only [`Log::ROOM`] of them are kept between two looks.

use std::error::Error;
use std::fmt;

use super::ring::Broken;

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

/// Events not looked at yet.
#[derive(Default)]
pub struct Log {
    events: Vec<Event>,
    more: usize,
}

impl Log {
    /// Events kept.
    pub const ROOM: usize = 64;

    /// Notes an event, or that there were too many.
    pub fn note(&mut self, event: Event) {
        if self.events.len() < Log::ROOM {
            self.events.push(event);
        } else {
            self.more = self.more.saturating_add(1);
        }
    }

    /// The events since the last look.
    pub fn take(&mut self) -> Vec<Event> {
        let more = std::mem::take(&mut self.more);
        let mut events = std::mem::take(&mut self.events);
        if more > 0 {
            events.push(Event::More(more));
        }
        events
    }
}

/// An error and what caused it, in one line.
pub fn in_full(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| Error::source(cause));
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_flood_of_events_is_counted_not_kept() {
        let mut log = Log::default();
        for _ in 0..Log::ROOM + 1000 {
            log.note(Event::TurnedAway);
        }
        let events = log.take();
        assert_eq!(events.len(), Log::ROOM + 1);
        assert_eq!(events.last(), Some(&Event::More(1000)));
        assert!(log.take().is_empty());
    }
}
