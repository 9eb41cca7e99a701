//! Buffered events of a server.
//!
//! It knows nothing about the contents of events, nor where they are logged. Invariant: although a hostile peer can
//! cause any number of events, at most [`LogEvent::CAPACITY`] of them are buffered.

use std::error::Error;

/// An event worth a log line.
pub trait LogEvent {
    /// Maximum number of buffered events.
    const CAPACITY: usize;

    /// The event that reports how many others were dropped.
    fn dropped(count: usize) -> Self;
}

/// Buffered events.
pub struct Log<E> {
    events: Vec<E>,
    dropped: usize,
}

impl<E> Default for Log<E> {
    fn default() -> Log<E> {
        Log { events: Vec::new(), dropped: 0 }
    }
}

impl<E: LogEvent> Log<E> {
    /// Adds an event, or counts it if the buffer is full.
    pub fn record(&mut self, event: E) {
        if self.events.len() < E::CAPACITY {
            self.events.push(event);
        } else {
            self.dropped += 1;
        }
    }

    /// Takes the buffered events.
    pub fn take(&mut self) -> Vec<E> {
        let dropped = std::mem::take(&mut self.dropped);
        let mut events = std::mem::take(&mut self.events);
        if dropped > 0 {
            events.push(E::dropped(dropped));
        }
        events
    }
}

/// An error and its causes, in one line.
pub fn with_causes(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| Error::source(cause));
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}
